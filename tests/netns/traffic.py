"""Clients and backends: sockets of any namespace, driven by the event loop of the test."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.namespaces import Namespace
from userspace_proxy.core.model import L4Protocol

TCP_PATIENCE_S = 2.0
UDP_PATIENCE_S = 1.0


class NoAnswer(Exception):
    """Nobody answered in time, or somebody refused to."""


def opened(namespace: Namespace, protocol: L4Protocol, address: str, source: str = "") -> socket.socket:
    """Return a non-blocking socket in a namespace, of the family of `address`, bound to `source` if there is one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with namespace.entered():
        sock = socket.socket(family, socket.SOCK_STREAM if protocol is L4Protocol.TCP else socket.SOCK_DGRAM)
    sock.setblocking(False)
    if source:
        sock.bind((source, 0))
    return sock


async def ask(
    namespace: Namespace, protocol: L4Protocol, address: str, port: int, *, source: str = "", patience_s: float = 0.0
) -> str:
    """Send a word from a namespace and return who answered. The socket is connected: only the address asked counts.

    Raises NoAnswer.
    """
    with opened(namespace, protocol, address, source) as sock:
        return await ask_by(sock, address, port, patience_s=patience_s)


async def ask_by(sock: socket.socket, address: str, port: int, *, patience_s: float = 0.0) -> str:
    """Connect a socket and send a word by it. Raises NoAnswer."""
    is_tcp = sock.type == socket.SOCK_STREAM
    patience_s = patience_s or (TCP_PATIENCE_S if is_tcp else UDP_PATIENCE_S)
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except (TimeoutError, OSError) as error:
        raise NoAnswer(f"{address} {port}: {str(error) or 'not connected in time'}") from error
    return await ask_again(sock, patience_s=patience_s - (time.monotonic() - began))


async def ask_again(sock: socket.socket, *, patience_s: float = TCP_PATIENCE_S) -> str:
    """Send another word by a connected socket. Raises NoAnswer."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(patience_s):
            await loop.sock_sendall(sock, b"ping")
            answer = await loop.sock_recv(sock, 100)
    except (TimeoutError, OSError) as error:
        raise NoAnswer(f"{sock}: {str(error) or 'no answer in time'}") from error
    if not answer.endswith(b":ping"):
        raise NoAnswer(f"closed after {answer!r}")
    return answer.decode().partition(":")[0]


@contextmanager
def backend(namespace: Namespace, address: str, port: int, name: str) -> Iterator[None]:
    """Answer `NAME:word` to every word, by TCP and UDP, from threads."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with namespace.entered():
        listener, datagrams = socket.socket(family, socket.SOCK_STREAM), socket.socket(family, socket.SOCK_DGRAM)
    for sock in (listener, datagrams):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    listener.listen(128)
    prefix = name.encode() + b":"
    threads = [
        threading.Thread(target=_answer_streams, args=(listener, prefix), daemon=True),
        threading.Thread(target=_answer_datagrams, args=(datagrams, prefix), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for sock in (listener, datagrams):
            with_shutdown(sock)
        for thread in threads:
            thread.join(5)
        listener.close()
        datagrams.close()


def with_shutdown(sock: socket.socket) -> None:
    """Wake a thread that waits for this socket."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # an unconnected datagram socket says it is not connected, and wakes its reader all the same


def _answer_streams(listener: socket.socket, prefix: bytes) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer_stream, args=(client, prefix), daemon=True).start()


def _answer_stream(client: socket.socket, prefix: bytes) -> None:
    with client:
        try:
            while word := client.recv(4096):
                client.sendall(prefix + word)
        except OSError:
            return


def _answer_datagrams(sock: socket.socket, prefix: bytes) -> None:
    while True:
        try:
            word, client = sock.recvfrom(65536)
        except OSError:
            return
        if client is None or not word:
            return
        sock.sendto(prefix + word, client)
