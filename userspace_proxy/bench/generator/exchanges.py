"""TCP requests and replies, one connection each or on connections that are kept, in a closed or an open loop.

The closed loop asks again when it was answered. The open loop asks when a request is due: one that finds no free
connection waits, and its latency counts from when it was due, as that of its client would.
"""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from collections.abc import Iterator

from userspace_proxy.bench.generator import schedule
from userspace_proxy.bench.generator.codecs import Codec, codec_for
from userspace_proxy.bench.generator.columns import Columns, kind_of
from userspace_proxy.bench.generator.exchange import Exchange
from userspace_proxy.bench.generator.job import Job, Raw
from userspace_proxy.bench.generator.loop import Loop
from userspace_proxy.bench.scenario import Connect, Hold, Http, Requests, Visits

_BUFFER_SIZE = 256 * 1024
_OPENING_AT_ONCE = 64
_SWEEP_S = 0.05
_PAUSE_AFTER_FAILURE_S = 0.01
_LONG_S = 1.0
_UNCOUNTED = -1.0
_SO_BIND_ADDRESS_NO_PORT = 24
_NON_BLOCKING_STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC

ExchangeLoad = Connect | Requests | Http | Hold | Visits


class Exchanges:
    """All connections of one load."""

    def __init__(self, job: Job, loop: Loop) -> None:
        load = job.load
        assert isinstance(load, ExchangeLoad)
        self.loop, self.columns = loop, Columns()
        self.codec: Codec = codec_for(load, job.targets[0][0], job.own_backends)
        self.buffer = bytearray(_BUFFER_SIZE)
        self.view = memoryview(self.buffer)
        self.sequence = job.process << 48
        self._job, self._timeout_s = job, float(load.timeout)
        self._rng = random.Random(f"clients {job.seed} {job.process}")
        self._dues, self._is_closed_loop = _dues(job, load)
        self._due = next(self._dues, None)
        self._connections = max(1, job.share(_connections_of(load)))
        self._per_connection = _requests_per_connection(load)
        self._reopens = not isinstance(load, Hold)
        self._to_open = 0 if self._per_connection == 1 else self._connections
        self._opened_count = self._opening = 0
        self._open: set[Exchange] = set()
        self._idle: deque[Exchange] = deque()
        self._queue: deque[schedule.Due] = deque()
        self._paused: deque[float] = deque()
        self._sweep_at = self._now = 0.0
        self._has_begun = False
        self._refusal = ""  # why the last connection could not be opened

    # What the loop calls

    def advance(self, now: float) -> float | None:
        job, self._now = self._job, now
        if now < job.start_at:
            return job.start_at
        if (now >= job.measure_to and self._due is None) or (self._is_closed_loop and now >= job.measure_to):
            if not self._queue and not any(exchange.waiting for exchange in self._open):
                return None
        elif self._is_closed_loop:
            self._begin_closed_loop(now)
        self._dispatch(now)
        self._open_kept(now)
        if now >= self._sweep_at:
            self._sweep(now)
        if now > job.measure_to + 2 * self._timeout_s + _LONG_S:
            return None
        return min(self._sweep_at, self._due[0] if self._due else now + _LONG_S)

    def finish(self) -> Raw:
        """Close everything and return what was seen."""
        raw = self.columns.raw
        raw.kept = sum(exchange.answered > 0 for exchange in self._open)
        raw.unsent = len(self._queue)
        for exchange in [*self._open]:
            exchange.close()
        raw.opened, raw.names = self._opened_count, self.codec.names
        return self.columns.finish()

    # What exchanges call

    def on_reply(self, exchange: Exchange, reply: bytes) -> None:
        now = self._now = time.monotonic()
        columns, due = self.columns, exchange.due
        fault = self.codec.check(reply, exchange.sequence)
        exchange.waiting = False
        exchange.answered += 1
        if exchange.answered == 1:
            exchange.backend = self.codec.backend(reply)
            columns.assign(exchange.opened, exchange.client, exchange.backend)
            self._opening -= 1
        if fault:
            columns.fail(now, due, fault, backend=exchange.backend, client=exchange.client)
        elif due >= 0.0:
            columns.latencies.append(now - due)
            columns.ends.append(now)
        if exchange.answered == self._per_connection:
            self._discard(exchange)
            self._next_connection(now)
        elif self._is_closed_loop:
            if now < self._job.measure_to:
                exchange.ask(now, now)
        elif self._queue:
            exchange.ask(self._queue.popleft()[0], now)
        else:
            self._idle.append(exchange)

    def on_broken(self, exchange: Exchange, kind: str) -> None:
        now = self._now = time.monotonic()
        if exchange.waiting:
            due = exchange.due if exchange.due >= 0.0 else max(exchange.asked_at, self._job.measure_from)
            self.columns.fail(now, due, kind, backend=exchange.backend, client=exchange.client)
        if exchange.answered and self._per_connection == 0:
            self.columns.broke(now, exchange.opened, kind, exchange.backend)
        if not exchange.answered:
            self._opening -= 1
        self._discard(exchange)
        if self._reopens:
            self._paused.append(now + _PAUSE_AFTER_FAILURE_S)

    # Steps

    def _begin_closed_loop(self, now: float) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._to_open = 0
            for _ in range(self._connections):
                self._connect(now, schedule.NOBODY, now)
        while self._paused and self._paused[0] <= now:
            self._paused.popleft()
            self._connect(now, schedule.NOBODY, now)

    def _dispatch(self, now: float) -> None:
        """Start every request that is due, or let it wait for a connection."""
        lags = self.columns.lags
        while self._due is not None and self._due[0] <= now:
            due = self._due
            self._due = next(self._dues, None)
            if due[0] >= self._job.measure_from:
                lags.append(now - due[0])
                self.columns.raw.sent += 1
            if self._per_connection == 1:
                if len(self._open) < self._connections:
                    self._connect(due[0], due[1], now)
                else:
                    self._queue.append(due)
            elif self._idle:
                self._idle.popleft().ask(due[0], now)
            else:
                self._queue.append(due)

    def _open_kept(self, now: float) -> None:
        """Open the connections that are to be kept, a few at a time, and again those that were lost."""
        if self._is_closed_loop:
            return
        while self._paused and self._paused[0] <= now:
            self._paused.popleft()
            if self._per_connection != 1:
                self._to_open += 1
            elif self._queue:
                self._connect(*self._queue.popleft(), now)
        while self._to_open > 0 and self._opening < _OPENING_AT_ONCE:
            self._to_open -= 1
            self._connect(_UNCOUNTED, schedule.NOBODY, now)

    def _next_connection(self, now: float) -> None:
        """A connection has done all its requests: open the next one, where there is a use for it."""
        if self._is_closed_loop:
            if now < self._job.measure_to:
                self._connect(now, schedule.NOBODY, now)
        elif self._per_connection != 1:
            self._to_open += 1
        elif self._queue:
            self._connect(*self._queue.popleft(), now)

    def _connect(self, due: float, client: int, now: float) -> None:
        """Open a connection and ask at once, for a request that was due at that time."""
        job = self._job
        host, port = job.targets[self._opened_count % len(job.targets)]
        if client == schedule.NOBODY and job.clients:
            client = self._rng.randrange(len(job.clients))
        sock = None
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, _NON_BLOCKING_STREAM)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if job.clients:
                sock.setsockopt(socket.IPPROTO_IP, _SO_BIND_ADDRESS_NO_PORT, 1)
                sock.bind((job.clients[client], 0))
            sock.connect((host, port))
        except BlockingIOError:
            pass
        except OSError as error:
            if sock is not None:
                sock.close()
            self._paused.append(now + _PAUSE_AFTER_FAILURE_S)
            if not self.columns.own_limit(error):
                self._refusal = kind_of(error)
                if due >= 0.0:
                    self.columns.fail(now, due, self._refusal, client=client)
            return
        assert sock is not None
        self._opened_count += 1
        self._opening += 1
        exchange = Exchange(
            self, sock, client, time.monotonic()
        )  # its own moment, as it is also its place in the order
        self._open.add(exchange)
        exchange.ask(due, now)

    def _discard(self, exchange: Exchange) -> None:
        exchange.close()
        exchange.waiting = False
        self._open.discard(exchange)
        if self._idle and exchange in self._idle:
            self._idle.remove(exchange)

    def _sweep(self, now: float) -> None:
        """Give up what has waited too long."""
        self._sweep_at = now + _SWEEP_S
        for exchange in [e for e in self._open if e.waiting and now - _since(e) > self._timeout_s]:
            self.on_broken(exchange, "time-out")
        while self._queue and now - self._queue[0][0] > self._timeout_s:
            due, client = self._queue.popleft()
            kind = "time-out" if self._open or not self._refusal else self._refusal
            self.columns.fail(now, due, kind, client=client)


def _since(exchange: Exchange) -> float:
    return exchange.due if exchange.due >= 0.0 else exchange.asked_at


def _dues(job: Job, load: ExchangeLoad) -> tuple[Iterator[schedule.Due], bool]:
    """Return when requests are due, and whether the loop is closed instead."""
    if isinstance(load, Visits):
        dues = schedule.visits(load.at, load.clients, job.measure_from, job.seed)
    elif isinstance(load, Hold):
        dues = schedule.constant(load.connections / load.ping, job.measure_from, job.measure_from, job.measure_to)
    elif load.rate is None:
        return iter(()), True
    elif load.arrivals == "poisson":
        dues = schedule.poisson(load.rate, job.start_at, job.measure_to, job.seed)
    else:
        dues = schedule.constant(load.rate, job.start_at, job.measure_from, job.measure_to)
    return schedule.share_of(dues, job.process, job.processes), False


def _connections_of(load: ExchangeLoad) -> int:
    return load.clients * len(load.at) if isinstance(load, Visits) else load.connections


def _requests_per_connection(load: ExchangeLoad) -> int:
    match load:
        case Requests():
            return load.requests_per_connection
        case Hold():
            return 0
        case Http():
            return 0 if load.keep_alive else 1
        case _:
            return 1
