"""The data process: carries out what a control process asks for, and goes on with its last state when there is none."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from userspace_proxy.core.balancer import RoundRobin
from userspace_proxy.core.counters import CountedServicePort
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePortName
from userspace_proxy.core.plan import Listening, Plan
from userspace_proxy.dataplane.channel import Channel
from userspace_proxy.dataplane.interface import Applied, Notices
from userspace_proxy.dataplane.opening import Opened
from userspace_proxy.dataplane.plane import DataPlane
from userspace_proxy.dataplane.remote.messages import (
    LISTENERS_PER_MESSAGE,
    NAMES_PER_MESSAGE,
    AllPresent,
    Configure,
    DialFailed,
    Done,
    Drain,
    Keep,
    NeedsPods,
    Page,
    Present,
    ReadCounters,
    Reading,
    Request,
    Step,
    in_batches,
)
from userspace_proxy.garbage import keep_out_of_collections

SetUpLogging = Callable[[int, str], None]

_ENDPOINTS_PER_PAGE = 200  # about 1 ms
_MANY_UPDATES = 1000  # a large cluster was taken in
_MAX_PENDING_NOTICES = 1 << 18  # bytes that the control process has not read yet

_log = logging.getLogger(__name__)


class DataServer:
    """Has a data path, and serves one control process at a time: the one that was attached last."""

    def __init__(self, set_up_logging: SetUpLogging = lambda verbosity, log_format: None) -> None:
        self._set_up_logging = set_up_logging
        self._loop = asyncio.get_running_loop()
        self._identity = secrets.randbits(63)
        self._plane: DataPlane | None = None
        self._channel: Channel[Request] | None = None
        self._requests: asyncio.Queue[tuple[Request, list[int]] | None] = asyncio.Queue()
        self._received: dict[Listening, socket.socket] = {}
        self._counted: tuple[CountedServicePort, ...] = ()
        self._kept: list[Keep] = []
        self._updates_since_freeze = 0

    def attach(self, sock: socket.socket) -> None:
        """Serve the control process at the other end of this socket from now on, and tell it what there is."""
        self._detach()
        self._channel = Channel(self._loop, sock, Request, on_message=self._take, on_end=self._end)
        self._requests.put_nowait(None)

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._serve_next(tasks)
        finally:
            self._detach()
            if self._plane is not None:
                self._plane.close()

    def _take(self, request: Request, fds: list[int]) -> None:
        self._requests.put_nowait((request, fds))

    def _end(self, reason: str) -> None:
        self._channel = None
        if reason:
            _log.error("the control process cannot be understood: %s", reason)

    def _detach(self) -> None:
        """Leave the control process, and forget what it asked for: the next one asks anew."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        while not self._requests.empty():
            _, fds = self._requests.get_nowait() or (None, [])
            for fd in fds:
                os.close(fd)

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message with descriptors that stay ours: there may be no room for copies."""
        if self._channel is not None:
            self._channel.send(message, fds, lent=True)

    async def _serve_next(self, tasks: asyncio.TaskGroup) -> None:
        item = await self._requests.get()
        if item is None:
            self._tell_what_is_present()
            return
        request, fds = item
        match request:
            case Configure():
                self._configure(request)
            case Keep(is_first):
                self._kept = [request] if is_first else [*self._kept, request]
            case Step():
                await self._carry_out(request, fds)
            case ReadCounters():
                await self._send_page(request)
            case Drain():
                tasks.create_task(self._drain(request))
            case _:
                assert_never(request)

    def _configure(self, request: Configure) -> None:
        if request.verbosity is not None:
            self._set_up_logging(request.verbosity, request.log_format)
        if self._plane is not None:
            self._plane.reconfigure(request.settings)
            return
        self._plane = DataPlane(
            request.settings,
            make_balancer=RoundRobin,
            notices=Notices(dial_failed=self._tell_dial_failure, needs_pods=self._tell_need),
            open_sockets=self._take_received,
        )

    async def _carry_out(self, step: Step, fds: list[int]) -> None:
        assert self._plane is not None
        if len(fds) < len(step.open):  # the kernel had no room for all: none is taken, which can be tried again
            for fd in fds:
                os.close(fd)
            self._send(Done(step.id, refused=step.open))
            return
        for listening, fd in zip(step.open, fds, strict=True):
            self._received[listening] = socket.socket(fileno=fd)
        self._updates_since_freeze += len(step.update)
        await self._plane.apply(
            Plan(
                update=tuple(each.service_port() for each in step.update),
                open=step.open,
                close=step.close,
                remove=step.remove,
            ),
            Applied(),
        )
        self._send(Done(step.id))
        if self._updates_since_freeze >= _MANY_UPDATES and self._requests.empty():
            self._updates_since_freeze = 0
            keep_out_of_collections()

    def _take_received(
        self, name: ServicePortName, addresses: Iterable[ListenAddress]
    ) -> tuple[Opened, tuple[ListenFailed, ...]]:
        return {address: self._received.pop((name, address)) for address in addresses}, ()

    def _tell_what_is_present(self) -> None:
        if self._plane is not None:
            for names in in_batches(self._plane.names(), NAMES_PER_MESSAGE):
                self._send(Present(names=names))
            for batch in in_batches(self._plane.listeners().items(), LISTENERS_PER_MESSAGE):
                listening = tuple(key for key, _ in batch)
                bound = tuple(listener.address for _, listener in batch)
                self._send(Present(open=listening, bound=bound), [listener.fileno() for _, listener in batch])
        for kept in self._kept:
            self._send(kept)
        self._send(AllPresent(self._identity))
        for name in self._plane.waited_at() if self._plane is not None else ():
            self._tell_need(name)  # the former control process may have died before it could ask for pods

    async def _send_page(self, request: ReadCounters) -> None:
        assert self._plane is not None
        whole = None
        if request.start == 0:
            live = await self._plane.live_counters()
            self._counted, whole = live.service_ports, replace(live, service_ports=())
        readings = []
        count = 0
        for counted in self._counted[request.start :]:
            readings.append(Reading.of(counted))
            count += 1 + len(readings[-1].endpoints)
            if count >= _ENDPOINTS_PER_PAGE:
                break
        is_last = request.start + len(readings) >= len(self._counted)
        self._send(Page(request.id, whole, tuple(readings), is_last))
        if is_last:
            self._counted = ()

    async def _drain(self, request: Drain) -> None:
        assert self._plane is not None
        await self._plane.drain(request.timeout_s)
        self._send(Done(request.id))

    def _tell_dial_failure(self, name: ServicePortName, endpoint: Endpoint) -> None:
        if self._channel is not None and self._channel.pending_bytes < _MAX_PENDING_NOTICES:
            self._send(DialFailed(name, endpoint))

    def _tell_need(self, name: ServicePortName) -> None:
        self._send(NeedsPods(name))
