"""TCP in bulk, down or up. Bytes are counted where they arrive, or leave, and by stream."""

from __future__ import annotations

import random
import select
import socket
import time

from userspace_proxy.bench import wire
from userspace_proxy.bench.generator.columns import Columns, kind_of
from userspace_proxy.bench.generator.job import Job, Raw
from userspace_proxy.bench.generator.loop import Loop
from userspace_proxy.bench.scenario import Download, Upload

_CHUNK = 1024 * 1024
_BULK = bytes(_CHUNK)
_LAST_WORD_S = 2.0


class Stream:
    """A connection that moves bytes one way."""

    def __init__(self, load: Streams, sock: socket.socket, number: int, client: int, now: float) -> None:
        self.load, self.sock, self.number, self.client, self.opened = load, sock, number, client, now
        self.fd, self.moved, self.is_up = sock.fileno(), 0, load.is_up
        self.backend, self.is_finishing = 0, False
        self._head = b""
        operation = wire.UPLOAD if self.is_up else wire.DOWNLOAD
        self._opening = wire.pack(operation, 0, 0, 0)
        load.loop.watch(self.fd, self.on_ready, select.EPOLLIN | select.EPOLLOUT)

    def on_ready(self, events: int) -> None:
        now = time.monotonic()
        try:
            if self._opening:
                self._open()
            elif events & select.EPOLLOUT and self.is_up and not self.is_finishing:
                size = self.sock.send(_BULK)
                self.moved += size
                self.load.columns.moved(now, size, self.number)
            if events & ~select.EPOLLOUT:
                self._read(now)
        except BlockingIOError:
            return
        except OSError as error:
            self.load.on_end(self, kind_of(error))

    def finish(self) -> None:
        """No more is measured: an upload asks how much has arrived."""
        self.is_finishing = True
        if not self.is_up:
            self.load.on_end(self, "")
            return
        try:
            self.load.loop.watch(self.fd, self.on_ready, select.EPOLLIN)
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.load.on_end(self, kind_of(error))

    def _open(self) -> None:
        sent = self.sock.send(self._opening)
        self._opening = self._opening[sent:]
        self.moved += sent
        if not self._opening and not self.is_up:
            self.load.loop.watch(self.fd, self.on_ready, select.EPOLLIN)

    def _read(self, now: float) -> None:
        if self.backend and not self.is_up:
            size = self.sock.recv_into(self.load.buffer, _CHUNK, socket.MSG_TRUNC)  # the kernel need not copy
            self.load.columns.moved(now, size, self.number)
        else:
            size = self._read_head(now)
        if size == 0:
            self.load.on_end(self, "closed")

    def _read_head(self, now: float) -> int:
        """Read who it is, and at the end of an upload how much has arrived."""
        data = self.sock.recv(wire.HEADER.size)
        self._head += data
        if len(self._head) == wire.HEADER.size:
            _, _, backend, _, _, arrived = wire.HEADER.unpack(self._head)
            self._head = b""
            if not self.backend:
                self.backend = backend
                self.load.columns.assign(self.opened, self.client, backend)
            elif self.is_finishing:
                self.load.on_end(self, "" if arrived == self.moved else "bytes lost")
        return len(data)


class Streams:
    """All streams of one load."""

    def __init__(self, job: Job, loop: Loop) -> None:
        load = job.load
        assert isinstance(load, Download | Upload)
        self.loop, self.columns, self.is_up = loop, Columns(), isinstance(load, Upload)
        self.buffer = bytearray(_CHUNK)
        self._job, self._count = job, max(1, job.share(load.streams))
        self._rng = random.Random(f"streams {job.seed} {job.process}")
        self._open: list[Stream] = []
        self._has_begun = self._is_finishing = False

    def advance(self, now: float) -> float | None:
        job = self._job
        if now < job.start_at:
            return job.start_at
        if not self._has_begun:
            self._has_begun = True
            for number in range(self._count):
                self._connect(number, now)
        if now < job.measure_to:
            return job.measure_to
        if not self._is_finishing:
            self._is_finishing = True
            for stream in [*self._open]:
                stream.finish()
        if now > job.measure_to + _LAST_WORD_S:
            for stream in [*self._open]:
                self.on_end(stream, "no word of what arrived")
        return now + 0.1 if self._open else None

    def finish(self) -> Raw:
        """Close everything and return what was seen."""
        for stream in [*self._open]:
            self.on_end(stream, "")
        self.columns.raw.opened = self._count
        return self.columns.finish()

    def on_end(self, stream: Stream, kind: str) -> None:
        """The stream is over; `kind` says why where that is a fault."""
        if kind:
            self.columns.fail(time.monotonic(), stream.opened, kind, backend=stream.backend, client=stream.client)
        self.loop.forget(stream.fd)
        stream.sock.close()
        self._open.remove(stream)

    def _connect(self, number: int, now: float) -> None:
        job = self._job
        host, port = job.targets[number % len(job.targets)]
        client = self._rng.randrange(len(job.clients)) if job.clients else -1
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            if job.clients:
                sock.bind((job.clients[client], 0))
            sock.connect((host, port))
        except BlockingIOError:
            pass
        except OSError as error:
            sock.close()
            if not self.columns.own_limit(error):
                self.columns.fail(now, now, kind_of(error), client=client)
            return
        self._open.append(Stream(self, sock, number * job.processes + job.process, client, now))
