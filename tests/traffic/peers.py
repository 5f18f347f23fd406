"""Both ends of the conversations that the tests hold: clients and backends, as blocking sockets with a time limit."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from userspace_proxy import Endpoint, ListenAddress

PATIENCE_S = 5.0
"""How long anything may take that the tests set no tighter limit for."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Address = ListenAddress | Endpoint | tuple[str, int]


def socket_address(address: Address) -> tuple[str, int]:
    return address if isinstance(address, tuple) else (address.address, address.port)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def eventually(is_so: Callable[[], bool], *, within: float = PATIENCE_S) -> bool:
    """Tell whether the condition comes true in time. Looks again and again."""
    deadline = time.monotonic() + within
    while not is_so():
        if time.monotonic() > deadline:
            return is_so()
        time.sleep(0.002)
    return True


class Peer:
    """One end of a TCP connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        self.sock = sock

    @classmethod
    def connect(
        cls,
        address: Address,
        *,
        source: str | None = None,
        receive_buffer: int | None = None,
        timeout: float = PATIENCE_S,
    ) -> Self:
        host, port = socket_address(address)
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            if source is not None:
                sock.bind((source, 0))
            sock.settimeout(timeout)
            sock.connect((host, port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self, size: int) -> bytes:
        """Return exactly `size` bytes, or fewer where the stream ends before."""
        parts = []
        while size and (part := self.sock.recv(min(size, 1 << 18))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def receive_all(self) -> bytes:
        """Return everything until the stream's clean end."""
        return self.receive(1 << 40)

    def receive_until_reset(self) -> bytes:
        """Return everything that comes before a reset. A clean end is a failure."""
        received = bytearray()
        try:
            while part := self.sock.recv(1 << 18):
                received += part
        except ConnectionResetError:
            return bytes(received)
        raise AssertionError(f"a clean end after {len(received)} bytes, where a reset was due")

    def hears_nothing(self, *, during: float) -> bool:
        """Tell whether the peer sends nothing, not even an end, for so long."""
        self.sock.settimeout(during)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(PATIENCE_S)
        return False

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Close with a reset, which discards what was not sent yet."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Backend:
    """A listening TCP socket whose connections the test accepts by hand."""

    def __init__(self, address: str = "127.0.0.1", *, port: int = 0, backlog: int = 128) -> None:
        self.sock = socket.socket(family_of(address), socket.SOCK_STREAM)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sock.settimeout(PATIENCE_S)
        self.sock.bind((address, port))
        self.sock.listen(backlog)
        self.endpoint = Endpoint(*self.sock.getsockname()[:2])
        self.accepted: list[Peer] = []

    def accept(self, *, within: float = PATIENCE_S) -> Peer:
        self.sock.settimeout(within)
        peer = Peer(self.sock.accept()[0])
        self.accepted.append(peer)
        return peer

    def close(self) -> None:
        self.sock.close()
        for peer in self.accepted:
            peer.close()


class ServingBackend(Backend):
    """A backend that treats each connection in a thread of its own."""

    def __init__(self, treat: Callable[[Peer], None], address: str = "127.0.0.1", *, port: int = 0) -> None:
        super().__init__(address, port=port, backlog=1024)
        self._treat = treat
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self.sock.settimeout(None)
        self._acceptor = threading.Thread(target=self._accept_all)
        self._acceptor.start()

    def finish(self) -> None:
        """Wait until those connections have been treated that are there."""
        for thread in list(self._threads):
            thread.join(PATIENCE_S)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._acceptor.join(PATIENCE_S)
        self.sock.close()
        for peer in self.accepted:
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)  # wakes the treating thread
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for peer in self.accepted:
            peer.close()

    def _accept_all(self) -> None:
        while True:
            try:
                sock, _ = self.sock.accept()
            except OSError:
                return
            peer = Peer(sock)
            self.connections += 1
            thread = threading.Thread(target=self._treat_one, args=(peer,))
            self.accepted = [*(peer for peer in self.accepted if peer.sock.fileno() >= 0), peer]
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
            thread.start()

    def _treat_one(self, peer: Peer) -> None:
        with contextlib.suppress(OSError):  # the other end may go at any time
            self._treat(peer)


def echo(peer: Peer) -> None:
    """Send back what comes, and the end after it."""
    peer.sock.settimeout(None)
    while data := peer.sock.recv(1 << 16):
        peer.sock.sendall(data)
    peer.close()


def identify(name: bytes) -> Callable[[Peer], None]:
    """Return a treatment that sends a name and closes."""

    def treat(peer: Peer) -> None:
        peer.send(name)
        peer.half_close()
        peer.sock.settimeout(None)
        peer.receive_all()
        peer.close()

    return treat


def hold(peer: Peer) -> None:
    """Say nothing, and close when the other end does."""
    peer.sock.settimeout(None)
    peer.receive_all()
    peer.close()


@contextlib.contextmanager
def black_hole() -> Iterator[Endpoint]:
    """An endpoint that answers no SYN: its accept queue is full and nobody accepts."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers: list[socket.socket] = []
    try:
        while True:
            filler = socket.socket()
            fillers.append(filler)
            filler.settimeout(0.1)
            try:
                filler.connect(listener.getsockname())
            except TimeoutError:
                break
        yield Endpoint(*listener.getsockname())
    finally:
        for sock in (listener, *fillers):
            sock.close()


@contextlib.contextmanager
def refusing(address: str = "127.0.0.1", kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[Endpoint]:
    """An endpoint that refuses: its port is bound, so that nobody else gets it, and nobody listens."""
    with socket.socket(family_of(address), kind) as sock:
        sock.bind((address, 0))
        if kind == socket.SOCK_DGRAM:  # a bound datagram socket would receive: one that is connected elsewhere does not
            sock.connect((address, 9))
        yield Endpoint(*sock.getsockname()[:2])


class Datagrams:
    """A UDP socket: a client when it is connected, else a backend."""

    def __init__(self, address: str = "127.0.0.1", *, port: int = 0, to: Address | None = None) -> None:
        self.sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.bind((address, port))
        self.endpoint = Endpoint(*self.sock.getsockname()[:2])
        if to is not None:
            self.sock.connect(socket_address(to))

    def send(self, data: bytes) -> None:
        self.sock.send(data)

    def receive(self, *, within: float = PATIENCE_S) -> bytes:
        return self.receive_from(within=within)[0]

    def receive_from(self, *, within: float = PATIENCE_S) -> tuple[bytes, tuple[str, int]]:
        self.sock.settimeout(within)
        data, sender = self.sock.recvfrom(1 << 16)
        return data, sender[:2]

    def answer(self, data: bytes, client: tuple[str, int]) -> None:
        self.sock.sendto(data, client)

    def hears_nothing(self, *, during: float) -> bool:
        try:
            self.receive(within=during)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self.sock.close()


class AnsweringDatagrams(Datagrams):
    """A UDP backend that answers each datagram from a thread of its own."""

    def __init__(
        self, answer: Callable[[bytes], bytes], address: str = "127.0.0.1", *, port: int = 0, delay_s: float = 0.0
    ) -> None:
        super().__init__(address, port=port)
        self.received: list[bytes] = []
        self._answer = answer
        self._delay_s = delay_s
        self._stopping = threading.Event()
        self.sock.settimeout(None)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, though it reports an error
        self._thread.join(PATIENCE_S)
        self.sock.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                data, client = self.sock.recvfrom(1 << 16)
            except OSError:
                continue
            if self._stopping.is_set():
                return
            self.received.append(data)
            self._stopping.wait(self._delay_s)
            with contextlib.suppress(OSError):
                self.sock.sendto(self._answer(data), client)
