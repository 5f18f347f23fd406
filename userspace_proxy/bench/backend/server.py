"""A backend process: one epoll, TCP and UDP on the same port, a control channel on stdin and stdout.

    python -m userspace_proxy.bench.backend.server NUMBER HOST:PORT     (port 0: any)

It ends when its stdin is closed, so it never outlives who started it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

import msgspec

from userspace_proxy.bench import wire
from userspace_proxy.bench.addresses import text_of
from userspace_proxy.bench.backend.behaviour import BackendReport, Behaviour, Command
from userspace_proxy.bench.backend.conversation import Peer
from userspace_proxy.bench.backend.scripts import Opening
from userspace_proxy.node.limits import raise_descriptor_limit

_BACKLOG = 4096
_ACCEPTS_PER_EVENT = 64
_DATAGRAMS_PER_EVENT = 64
_RECEIVE_BUFFER = 4 * 2**20
_BIND_ATTEMPTS = 50
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_SO_MEMINFO, _MEMINFO_DROPS = 55, 8
_ACCEPT_PAUSE_S = 0.05


class Server:
    """A backend. See `conversation` for what it answers."""

    def __init__(self, number: int, host: str, port: int) -> None:
        self.number = number
        self.behaviour = Behaviour()
        self.journal: dict[int, str] = {}
        self.requests = self._connections = self._open = self._datagrams = 0
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._dropped_before = 0
        self._listener, self._udp = _bind(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._serve()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), action))

    def watch(self, sock: socket.socket, handler: Callable[[int], None], *, writable: bool) -> None:
        fd, events = sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, sock: socket.socket) -> None:
        fd = sock.fileno()
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        sock.close()
        self._open -= 1

    def run(self, control_in: int, control_out: int) -> None:
        """Serve until the control channel is closed."""
        decoder, rest = msgspec.json.Decoder(Command), b""
        os.set_blocking(control_in, False)
        self._epoll.register(control_in, select.EPOLLIN)
        while True:
            wait_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for fd, events in self._epoll.poll(wait_s):
                if fd == control_in:
                    data = os.read(control_in, 65536)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        answer = self._obey(decoder.decode(line))
                        os.write(control_out, msgspec.json.encode(answer) + b"\n")
                elif (handler := self._handlers.get(fd)) is not None:
                    handler(events)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()

    def report(self) -> BackendReport:
        return BackendReport(
            backend=self.number,
            address=text_of(self.address),
            connections=self._connections,
            open_connections=self._open,
            requests=self.requests,
            datagrams=self._datagrams,
            datagrams_dropped=self._dropped() - self._dropped_before,
            journal=self.journal,
        )

    def _obey(self, command: Command) -> BackendReport:
        if command.behave is not None:
            self._behave(command.behave)
        answer = self.report()
        if command.start_over:
            self.requests = self._connections = self._datagrams = 0
            self._dropped_before = self._dropped()
            self.journal = {}
        return answer

    def _behave(self, behaviour: Behaviour) -> None:
        was_refusing, self.behaviour = self.behaviour.refuse, behaviour
        if behaviour.refuse and not was_refusing:
            for sock in (self._listener, self._udp):
                del self._handlers[sock.fileno()]
                sock.close()
            self._dropped_before = 0
        elif was_refusing and not behaviour.refuse:
            self._listener, self._udp = _bind(*self.address)
            self._serve()

    def _serve(self) -> None:
        self.watch(self._listener, self._on_connections, writable=False)
        self.watch(self._udp, self._on_datagrams, writable=False)

    def _dropped(self) -> int:
        if self._udp.fileno() < 0:
            return 0
        info = self._udp.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 9 * 4)
        return int(struct.unpack("9I", info)[_MEMINFO_DROPS])

    def _on_connections(self, events: int) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor left, or the client has gone already
                time.sleep(_ACCEPT_PAUSE_S)
                return
            self._connections += 1
            self._open += 1
            if self.behaviour.reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self.forget(sock)
            else:
                Peer(self, sock, Opening)

    def _on_datagrams(self, events: int) -> None:
        for _ in range(_DATAGRAMS_PER_EVENT):
            try:
                data, client = self._udp.recvfrom(wire.MAX_DATAGRAM)
            except OSError:  # nothing more, or an ICMP error for a client that has gone
                return
            self._datagrams += 1
            if self.behaviour.reset:
                continue
            if self.behaviour.delay_s:
                self.later(self.behaviour.delay_s, lambda data=data, client=client: self._answer(data, client))  # type: ignore[misc]
            else:
                self._answer(data, client)

    def _answer(self, data: bytes, client: tuple[str, int]) -> None:
        if len(data) >= wire.HEADER.size and data[0] == wire.MAGIC:
            _, operation, _, request_size, reply_size, sequence = wire.HEADER.unpack_from(data)
            header = wire.pack(operation, sequence, request_size, reply_size, self.number)
            data = header + data[wire.HEADER.size : reply_size]
        with contextlib.suppress(OSError):  # a full send buffer loses it, as any network may
            self._udp.sendto(data, client)


def _bind(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Return a listener and a UDP socket on the same port. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for attempt in range(_BIND_ATTEMPTS):
        listener = socket.socket(family, socket.SOCK_STREAM)
        udp = socket.socket(family, socket.SOCK_DGRAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            udp.bind(listener.getsockname())
            break
        except OSError:
            listener.close()
            udp.close()
            if port or attempt == _BIND_ATTEMPTS - 1:
                raise
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _RECEIVE_BUFFER)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    udp.setblocking(False)
    return listener, udp


def main() -> None:
    """Serve as the command line says. The first line on stdout is a report, which says where."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us
    raise_descriptor_limit()
    host, _, port = sys.argv[2].rpartition(":")
    try:
        server = Server(int(sys.argv[1]), host.strip("[]"), int(port))
    except OSError as error:
        sys.exit(f"cannot listen on {sys.argv[2]}: {error.strerror}")
    os.write(1, msgspec.json.encode(server.report()) + b"\n")
    server.run(0, 1)


if __name__ == "__main__":
    main()
