"""A small TCP and UDP balancer that is good, or faulty in exactly one way. The harness has to tell which.

python balancer.py FAULT HOST:PORT BACKEND,BACKEND,...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
import sys
import time

FAULTS = ("none", "random", "skewed", "sticky", "runs", "stalling", "slow-sometimes", "frozen", "refusing", "resetting",
          "closing", "dropping", "doubling", "damaging", "wandering", "half-deaf", "greedy-affinity", "affinity",
          "forgetful-affinity", "one-endpoint-ignored", "corrupting", "breaking")  # fmt: skip
RESET = struct.pack("ii", 1, 0)


class Balancer:
    def __init__(self, fault: str, backends: list[tuple[str, int]]) -> None:
        self.fault, self.backends = fault, backends
        self.rng = random.Random(7)
        self.turns = itertools.count()
        self.remembered: dict[str, tuple[str, int]] = {}

    def pick(self, client: str) -> tuple[str, int]:
        turn, backends = next(self.turns), self.backends
        match self.fault:
            case "random":
                return self.rng.choice(backends)
            case "skewed":
                return backends[0] if self.rng.random() < 0.2 else backends[turn % len(backends)]
            case "sticky":
                if self.rng.random() < 0.5:
                    return self.remembered.setdefault(client, self.rng.choice(backends))
            case "runs":
                return backends[turn // 20 % len(backends)]
            case "one-endpoint-ignored":
                return backends[turn % (len(backends) - 1)]
            case "greedy-affinity" | "affinity" | "forgetful-affinity":
                if self.fault == "forgetful-affinity" and self.rng.random() < 0.1:
                    self.remembered.pop(client, None)
                return self.remembered.setdefault(client, backends[turn % len(backends)])
        return backends[turn % len(backends)]

    async def serve(self, host: str, port: int) -> None:
        if self.fault == "refusing":
            # Somebody answers once, so that it counts as started; then nobody does.
            server = await asyncio.start_server(self.close_at_once, host, port)
            await asyncio.sleep(0.4)
            server.close()
        else:
            await asyncio.start_server(self.relay, host, port, backlog=1024)
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: Datagrams(self), (host, port))
        if self.fault == "stalling":
            while True:
                await asyncio.sleep(0.4)
                time.sleep(0.25)  # noqa: ASYNC251 (the fault itself)
        await asyncio.Event().wait()

    async def close_at_once(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("peername")[0]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self.relay_to(self.pick(client), reader, writer)
        writer.close()

    async def relay_to(
        self, backend: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.fault == "resetting" and self.rng.random() < 0.05:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
            return
        if self.fault == "closing" and self.rng.random() < 0.05:
            return
        to_reader, to_writer = await asyncio.open_connection(*backend)
        try:
            if self.fault == "breaking":
                async with asyncio.timeout(0.6):
                    await self.both_ways(reader, writer, to_reader, to_writer)
            else:
                await self.both_ways(reader, writer, to_reader, to_writer)
        except TimeoutError:
            writer.transport.abort()
        finally:
            to_writer.close()

    async def both_ways(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        to_reader: asyncio.StreamReader, to_writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.copy(reader, to_writer, is_request=True))
            tasks.create_task(self.copy(to_reader, writer, is_request=False))

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool) -> None:
        while data := await reader.read(65536):
            if is_request and self.fault == "slow-sometimes" and self.rng.random() < 0.02:
                await asyncio.sleep(0.6)  # longer than a busy machine explains
            if is_request and self.fault == "frozen":
                await asyncio.Event().wait()
            if not is_request and self.fault == "corrupting" and self.rng.random() < 0.2:
                data = data[:-1] + b"\0"
            writer.write(data)
            await writer.drain()
        if self.fault == "half-deaf":
            raise ConnectionError("one end is the end of both")
        with contextlib.suppress(OSError):
            writer.write_eof()


class Datagrams(asyncio.DatagramProtocol):
    """Sessions by client address, each with a socket of its own."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.sessions: dict[tuple[str, int], socket.socket] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 2**20)

    def datagram_received(self, data: bytes, client: tuple[str, int]) -> None:
        fault, rng = self.balancer.fault, self.balancer.rng
        if fault == "frozen" or (fault == "dropping" and rng.random() < 0.01):
            return
        session = self.sessions.get(client)
        if session is None or (fault == "wandering" and rng.random() < 0.05):
            session = self.open_session(client)
        with contextlib.suppress(OSError):
            session.send(data)

    def open_session(self, client: tuple[str, int]) -> socket.socket:
        session = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        session.setblocking(False)
        session.connect(self.balancer.pick(client[0]))
        asyncio.get_running_loop().add_reader(session, self.on_reply, session, client)
        self.sessions[client] = session
        return session

    def on_reply(self, session: socket.socket, client: tuple[str, int]) -> None:
        fault, rng = self.balancer.fault, self.balancer.rng
        with contextlib.suppress(OSError):
            data = session.recv(65536)
            if fault == "dropping" and rng.random() < 0.01:
                return
            if fault == "damaging" and rng.random() < 0.02:
                data = data[:-1] + b"\0"
            for _ in range(2 if fault == "doubling" and rng.random() < 0.02 else 1):
                self.transport.sendto(data, client)


def main() -> None:
    fault, listen, backends = sys.argv[1:4]
    assert fault in FAULTS, fault
    host, _, port = listen.rpartition(":")
    parsed = [(text.rpartition(":")[0], int(text.rpartition(":")[2])) for text in backends.split(",")]
    asyncio.run(Balancer(fault, parsed).serve(host, int(port)))


if __name__ == "__main__":
    main()
