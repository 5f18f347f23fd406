"""Plays the pods of shop.yaml, serves them with `userspace-proxy local`, and shows who answers.

Run it with `make demo`; `make demo DEMO_ARGS=--exit-after=5` ends by itself after five seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import sys
from datetime import datetime
from pathlib import Path

MANIFEST = Path(__file__).with_name("shop.yaml")
WEB_PODS = {"web-1": "127.0.1.1", "web-2": "127.0.1.2", "web-3": "127.0.1.3"}
GREETER_PODS = {"greeter-1": "127.0.1.1", "greeter-2": "127.0.1.2"}
WEB_POD_PORT, GREETER_POD_PORT = 19080, 19053
ANSWER_TIMEOUT_S = 5
WEB_ADDRESS, GREETER_ADDRESS = ("127.0.0.1", 18080), ("127.0.0.1", 18053)


def show(pod: str, address: str, request: str) -> None:
    """Print which endpoint has answered."""
    print(f"{datetime.now():%H:%M:%S}  {pod:<10} {address:<16} answered  {request}", flush=True)


async def serve_web(pod: str, address: str) -> asyncio.Server:
    """Return a web server that names itself."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            body = f"hello from {pod} ({address})\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
            await writer.drain()
            show(pod, f"{address}:{WEB_POD_PORT}", head.partition(b"\r\n")[0].decode(errors="replace"))
        writer.close()

    return await asyncio.start_server(answer, address, WEB_POD_PORT)


class Greeter(asyncio.DatagramProtocol):
    """A UDP server that names itself."""

    def __init__(self, pod: str, address: str) -> None:
        self._pod, self._address = pod, address

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, client: tuple[str, int]) -> None:
        self._transport.sendto(f"{self._pod} greets {data.decode(errors='replace').strip()}\n".encode(), client)
        show(self._pod, f"{self._address}:{GREETER_POD_PORT}", f"UDP {data!r}")


async def start_pods() -> list[asyncio.Server]:
    """Start all pods and return what keeps the web servers alive.

    Raises OSError when an address is taken, or not there: macOS has 127.0.0.1 alone.
    """
    servers = [await serve_web(pod, address) for pod, address in WEB_PODS.items()]
    for pod, address in GREETER_PODS.items():
        await asyncio.get_running_loop().create_datagram_endpoint(
            lambda pod=pod, address=address: Greeter(pod, address), local_addr=(address, GREETER_POD_PORT)
        )
    return servers


async def start_proxy() -> asyncio.subprocess.Process:
    """Start the proxy and return once it has printed what it serves."""
    proxy = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "userspace_proxy", "local", "-f", str(MANIFEST), stdout=asyncio.subprocess.PIPE
    )
    assert proxy.stdout is not None
    print((await proxy.stdout.readuntil(b"\n\n")).decode())
    return proxy


async def ask_web() -> None:
    """Send one request through the proxy. Raises OSError when it is not answered."""
    reader, writer = await asyncio.open_connection(*WEB_ADDRESS)
    writer.write(b"GET /demo HTTP/1.1\r\nHost: demo\r\n\r\n")
    reply = await asyncio.wait_for(reader.read(), ANSWER_TIMEOUT_S)
    writer.close()
    if b"hello from" not in reply:
        raise ConnectionError("the web service gave no answer")


async def ask_greeter() -> None:
    """Send one datagram through the proxy. Raises OSError when it is not answered."""
    answered = asyncio.Event()

    class Client(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            answered.set()

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Client, remote_addr=GREETER_ADDRESS)
    transport.sendto(b"demo")
    try:
        await asyncio.wait_for(answered.wait(), ANSWER_TIMEOUT_S)
    finally:
        transport.close()


async def run(exit_after_s: float) -> None:
    """Run the demo until it is interrupted, or for that many seconds."""
    servers = await start_pods()
    proxy = await start_proxy()
    try:
        print("Try it from another terminal, several times:\n")
        print(f"    curl http://{WEB_ADDRESS[0]}:{WEB_ADDRESS[1]}/")
        print(f"    echo you | nc -u -w1 {GREETER_ADDRESS[0]} {GREETER_ADDRESS[1]}\n")
        print("Meanwhile the demo asks by itself. Ctrl-C ends it.\n", flush=True)
        end = asyncio.get_running_loop().time() + exit_after_s
        for turn in itertools.count():
            await (ask_greeter() if turn % 4 == 1 else ask_web())
            if asyncio.get_running_loop().time() >= end:
                return
            await asyncio.sleep(min(1, exit_after_s))
    finally:
        with contextlib.suppress(ProcessLookupError):
            proxy.terminate()
        await proxy.wait()
        for server in servers:
            server.close()


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exit-after", type=float, default=math.inf, metavar="SECONDS", help="end by itself")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(parser.parse_args().exit_after))


if __name__ == "__main__":
    main()
