"""UDP round trips: every datagram has a number, so a lost, late, doubled, damaged or misdelivered one is told apart."""

from __future__ import annotations

import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

from userspace_proxy.bench import wire
from userspace_proxy.bench.generator import schedule
from userspace_proxy.bench.generator.codecs import Text
from userspace_proxy.bench.generator.columns import Columns, kind_of
from userspace_proxy.bench.generator.job import DatagramCounts, Job, Raw
from userspace_proxy.bench.generator.loop import Loop
from userspace_proxy.bench.scenario import Udp

_RECEIVE_BUFFER = 2**20
_SO_MEMINFO, _MEMINFO_DROPS = 55, 8
_READS_PER_EVENT = 64
_SWEEP_S = 0.02
_REMEMBERED = 10_000
_SEQUENCE = slice(12, 20)


class Flow:
    """A socket, and what it waits for."""

    __slots__ = ("answered", "backend", "client", "fd", "load", "moved", "opened", "sent", "sock", "waiting")

    def __init__(self, load: Datagrams, sock: socket.socket, client: int, now: float) -> None:
        self.load, self.sock, self.client, self.opened, self.fd = load, sock, client, now, sock.fileno()
        self.sent = self.answered = self.backend = 0
        self.moved = False
        self.waiting: dict[int, tuple[float, int, float]] = {}  # sequence: due, size, sent at
        load.loop.watch(self.fd, self.on_ready, select.EPOLLIN)

    def on_ready(self, events: int) -> None:
        load = self.load
        for _ in range(load.reads_per_event):
            try:
                data = self.sock.recv(wire.MAX_DATAGRAM)
            except BlockingIOError:
                return
            except OSError as error:
                load.on_error(self, error)
                return
            load.on_datagram(self, data)
            if self.fd < 0:
                return


class Datagrams:
    """All flows of one load."""

    def __init__(self, job: Job, loop: Loop) -> None:
        load = job.load
        assert isinstance(load, Udp)
        self.loop, self.columns, self.counts = loop, Columns(), DatagramCounts()
        self.columns.raw.datagrams = self.counts
        self._job, self._load = job, load
        self._text = Text(job.own_backends) if job.own_backends else None
        self._rng = random.Random(f"flows {job.seed} {job.process}")
        self._padding = wire.pattern(wire.MAX_DATAGRAM, job.seed)
        self._sequence = job.process << 48
        self._dues = _dues(job, load)
        self._due = next(self._dues, None)
        self._is_closed_loop = load.rate is None
        # In a closed loop no more than what was under way: the answers to what is sent now are for the next turn.
        self.reads_per_event = load.window if self._is_closed_loop else _READS_PER_EVENT
        self._flows: deque[Flow] = deque()
        self._retired: list[Flow] = []
        self._answered: dict[int, Flow] = {}
        self._sweep_at = 0.0
        self._opened = 0
        self._wanted = max(1, job.share(load.flows))

    # What the loop calls

    def advance(self, now: float) -> float | None:
        job = self._job
        if now < job.start_at:
            return job.start_at
        is_over = now >= job.measure_to and self._due is None
        if is_over and not any(flow.waiting for flow in (*self._flows, *self._retired)):
            return None
        if not is_over:
            self._open_flows(now)
        while self._due is not None and self._due[0] <= now and self._flows:
            due, self._due = self._due[0], next(self._dues, None)
            if due >= job.measure_from:
                self.columns.lags.append(now - due)
            self._send(self._next_flow(), due, now)
        if now >= self._sweep_at:
            self._sweep(now)
        return min(self._sweep_at, self._due[0] if self._due else now + 1.0)

    def finish(self) -> Raw:
        """Close everything and return what was seen."""
        for flow in [*self._flows, *self._retired]:
            self._close(flow)
        raw = self.columns.raw
        raw.sent, raw.opened = sum(self.counts.sent.values()), self._opened
        if self._text:
            raw.names = self._text.names
        return self.columns.finish()

    # What flows call

    def on_datagram(self, flow: Flow, data: bytes) -> None:
        now = time.monotonic()
        sequence = self._sequence_of(flow, data)
        asked = flow.waiting.pop(sequence, None)
        if asked is None:
            self._note_stray(flow, sequence)
            return
        due, size, _ = asked
        flow.answered += 1
        self.counts.answered_in_all += 1
        if self._text is None and data[wire.HEADER.size :] != self._padding[: size - wire.HEADER.size]:
            self.counts.damaged += 1
        backend = self._text.backend(data) if self._text else int.from_bytes(data[2:4], "big")
        if flow.answered == 1:
            flow.backend = backend
            self.columns.assign(flow.opened, flow.client, backend)
        elif backend != flow.backend and not flow.moved:
            flow.moved = True
            self.counts.flows_moved += 1
        self._remember(sequence, flow)
        self.columns.latencies.append(now - due)
        self.columns.ends.append(now)
        if self._is_closed_loop:
            self._go_on(flow, now)

    def on_error(self, flow: Flow, error: OSError) -> None:
        """An ICMP error: what was under way is gone."""
        now = time.monotonic()
        if self.columns.own_limit(error):
            return
        self.counts.refused += 1
        for due, _, _ in flow.waiting.values():
            self.columns.fail(now, due, kind_of(error), backend=flow.backend, client=flow.client)
        self._lose(flow, list(flow.waiting))

    # Steps

    def _open_flows(self, now: float) -> None:
        while len(self._flows) < self._wanted:
            flow = self._open(now)
            if flow is None:
                return
            self._flows.append(flow)
            if self._is_closed_loop:
                for _ in range(self._load.window if self._text is None else 1):
                    self._send(flow, now, now)

    def _open(self, now: float) -> Flow | None:
        job = self._job
        host, port = job.targets[self._opened % len(job.targets)]
        client = self._rng.randrange(len(job.clients)) if job.clients else -1
        sock = None
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            if job.clients:
                sock.bind((job.clients[client], 0))
            sock.connect((host, port))
        except OSError as error:
            if sock is not None:
                sock.close()
            if not self.columns.own_limit(error):
                self.columns.fail(now, now, kind_of(error), client=client)
            return None
        self._opened += 1
        self.counts.flows += 1
        return Flow(self, sock, client, time.monotonic())

    def _next_flow(self) -> Flow:
        """Return the flow whose turn it is; where backends number nothing, rather one that waits for nothing."""
        for _ in range(len(self._flows) if self._text else 1):
            self._flows.rotate(-1)
            if not self._flows[-1].waiting:
                break
        return self._flows[-1]

    def _send(self, flow: Flow, due: float, now: float) -> None:
        self._sequence += 1
        size = int(self._rng.choice(self._load.sizes))
        if self._text:
            data = self._text.request(self._sequence)
            size = len(data)
        else:
            size = max(size, wire.HEADER.size)
            data = wire.pack(wire.REQUEST, self._sequence, size, size) + self._padding[: size - wire.HEADER.size]
        if due >= self._job.measure_from:
            self.counts.sent[size] = self.counts.sent.get(size, 0) + 1
        flow.waiting[self._sequence] = (due, size, now)
        flow.sent += 1
        self.counts.sent_in_all += 1
        try:
            flow.sock.send(data)
        except OSError as error:
            self.on_error(flow, error)
        limit = self._load.datagrams_per_flow
        if limit and flow.sent >= limit and flow in self._flows and not self._is_closed_loop:
            self._flows.remove(flow)
            self._retired.append(flow)

    def _go_on(self, flow: Flow, now: float) -> None:
        """In a closed loop: send the next datagram of the flow, or let it be replaced when it has sent all."""
        limit = self._load.datagrams_per_flow
        if now >= self._job.measure_to or flow not in self._flows:
            return
        if not limit or flow.sent < limit:
            self._send(flow, now, now)
        elif not flow.waiting:
            self._flows.remove(flow)
            self._retired.append(flow)

    def _sequence_of(self, flow: Flow, data: bytes) -> int:
        if self._text:
            return next(iter(flow.waiting), -1)
        if len(data) < wire.HEADER.size or data[0] != wire.MAGIC:
            return -1
        return int.from_bytes(data[_SEQUENCE], "big")

    def _note_stray(self, flow: Flow, sequence: int) -> None:
        """Note a datagram that this flow does not wait for."""
        owner = self._answered.get(sequence)
        if sequence == -1:
            self.counts.damaged += 1
        elif owner is flow:
            self.counts.duplicates += 1
        elif owner is None and not any(sequence in other.waiting for other in self._flows):
            self.counts.late += 1
        else:
            self.counts.foreign += 1

    def _remember(self, sequence: int, flow: Flow) -> None:
        self._answered[sequence] = flow
        if len(self._answered) > _REMEMBERED:
            del self._answered[next(iter(self._answered))]

    def _lose(self, flow: Flow, sequences: list[int]) -> None:
        for sequence in sequences:
            due, size, _ = flow.waiting.pop(sequence)
            if due >= self._job.measure_from:
                self.counts.lost[size] = self.counts.lost.get(size, 0) + 1

    def _sweep(self, now: float) -> None:
        """Give up what has waited too long, and close flows that are done."""
        self._sweep_at, limit_s = now + _SWEEP_S, float(self._load.timeout)
        for flow in [*self._flows, *self._retired]:
            expired = [sequence for sequence, (_, _, sent_at) in flow.waiting.items() if now - sent_at > limit_s]
            for sequence in expired:
                self.columns.fail(now, flow.waiting[sequence][0], "lost", backend=flow.backend, client=flow.client)
            self._lose(flow, expired)
            if expired and self._is_closed_loop:
                self._go_on(flow, now)
        done = [flow for flow in self._retired if not flow.waiting and now - flow.opened > limit_s]
        for flow in done:
            self._retired.remove(flow)
            self._close(flow)

    def _close(self, flow: Flow) -> None:
        if flow.sent and not flow.answered:
            self.counts.flows_dead += 1
        info = flow.sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 9 * 4)
        self.counts.own_drops += struct.unpack("9I", info)[_MEMINFO_DROPS]
        self.loop.forget(flow.fd)
        flow.sock.close()
        flow.fd = -1


def _dues(job: Job, load: Udp) -> Iterator[schedule.Due]:
    if load.rate is None:
        return iter(())
    if load.arrivals == "poisson":
        dues = schedule.poisson(load.rate, job.start_at, job.measure_to, job.seed)
    else:
        dues = schedule.constant(load.rate, job.start_at, job.measure_from, job.measure_to)
    return schedule.share_of(dues, job.process, job.processes)
