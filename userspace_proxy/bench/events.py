"""Carries out the events of a test at their times, and notes when each really happened."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterable
from typing import assert_never

from userspace_proxy.bench.addresses import Address
from userspace_proxy.bench.analysis.failover import Happened
from userspace_proxy.bench.backend.behaviour import Behaviour
from userspace_proxy.bench.fleet import Fleet
from userspace_proxy.bench.processes import StartFailed
from userspace_proxy.bench.scenario import (
    Add,
    AnyEvent,
    BackendEvent,
    Churn,
    Delay,
    Freeze,
    FreezeTarget,
    HalfClose,
    Kill,
    Refuse,
    Remove,
    Reset,
    Run,
    Slow,
)
from userspace_proxy.bench.targets.base import Target


class Stage:
    """Where events take place: the backends, the endpoints that the target knows, and the target."""

    def __init__(self, fleet: Fleet, target: Target, endpoints: Iterable[int]) -> None:
        self.fleet, self.target = fleet, target
        self._initial = list(endpoints)
        self.endpoints = list(self._initial)
        self.happened: list[Happened] = []
        self._measure_from = 0.0

    async def play(self, events: Iterable[AnyEvent], measure_from: float, duration_s: float) -> None:
        """Carry out all events, those that last included, and return when the last one is undone."""
        self._measure_from = measure_from
        async with asyncio.TaskGroup() as tasks:
            for event in events:
                tasks.create_task(self._play(event, measure_from + event.at))
        self.happened = _with_ends(sorted(self.happened, key=lambda event: event.at), duration_s)

    async def tidy_up(self) -> None:
        """Bring everything back to how it was before."""
        child = self.target.family()
        if child is not None:
            child.signal_family(signal.SIGCONT)
        await self.fleet.restore()
        if self.endpoints != self._initial:
            self.endpoints = list(self._initial)
            await self._tell()

    async def _play(self, event: AnyEvent, at: float) -> None:
        await _sleep_until(at)
        backend = event.backend if isinstance(event, BackendEvent | Churn) else 0
        await self._do(event)
        lasts = event.lasts if isinstance(event, BackendEvent | FreezeTarget) else None
        if lasts is None:
            return
        await _sleep_until(at + lasts)
        fault = ""
        try:
            await self._undo(event)
        except StartFailed as error:
            fault = str(error)
        self._note(f"after {event.kind}", backend, fault)

    async def _do(self, event: AnyEvent) -> None:
        backend = self.fleet[event.backend] if isinstance(event, BackendEvent) else self.fleet[1]
        number = backend.number if isinstance(event, BackendEvent) else 0
        self._note(event.kind, number)
        match event:
            case Kill():
                await backend.kill()
            case Freeze():
                backend.freeze(frozen=True)
            case Refuse() | Reset() | HalfClose() | Delay() | Slow():
                await backend.behave(_behaviour(event))
            case Remove():
                await self._change(remove=event.backend)
            case Add():
                await self._change(add=event.backend)
            case Churn():
                await self._churn(event)
            case FreezeTarget():
                self._signal_target(signal.SIGSTOP)
            case Run():
                process = await asyncio.create_subprocess_shell(event.command, stdout=asyncio.subprocess.DEVNULL)
                await process.wait()
            case _:
                assert_never(event)

    async def _undo(self, event: AnyEvent) -> None:
        match event:
            case Remove():
                await self._change(add=event.backend)
            case Add():
                await self._change(remove=event.backend)
            case FreezeTarget():
                self._signal_target(signal.SIGCONT)
            case BackendEvent():
                await self.fleet[event.backend].restore()

    async def _churn(self, event: Churn) -> None:
        began = time.monotonic()
        for count in itertools.count(1):
            if count % 2:
                await self._change(remove=event.backend)
            else:
                await self._change(add=event.backend)
            if count / event.rate >= event.lasts:
                break
            await _sleep_until(began + count / event.rate)
        await self._change(add=event.backend)
        self._note("after churn", event.backend)

    async def _change(self, *, add: int = 0, remove: int = 0) -> None:
        before = list(self.endpoints)
        self.endpoints = [number for number in self.endpoints if number != remove]
        if add and add not in self.endpoints:
            self.endpoints.append(add)
        if self.endpoints != before:
            await self._tell()

    async def _tell(self) -> None:
        await self.target.set_endpoints(self.addresses())

    def addresses(self) -> list[Address]:
        """Return the addresses of the endpoints that the target shall know at present."""
        return [self.fleet[number].address for number in self.endpoints]

    def _signal_target(self, number: int) -> None:
        child = self.target.family()
        if child is not None:
            child.signal_family(number)

    def _note(self, kind: str, backend: int, fault: str = "") -> None:
        at = time.monotonic() - self._measure_from
        name = str(backend) if backend else ""
        self.happened.append(Happened(kind, at, at, backend, name, fault))


def _behaviour(event: Refuse | Reset | HalfClose | Delay | Slow) -> Behaviour:
    match event:
        case Refuse():
            return Behaviour(refuse=True)
        case Reset():
            return Behaviour(reset=True)
        case HalfClose():
            return Behaviour(half_close=True)
        case Delay():
            return Behaviour(delay_s=event.by)
        case Slow():
            return Behaviour(per_byte_s=event.per_byte)


def _with_ends(happened: list[Happened], duration_s: float) -> list[Happened]:
    """Return the events, each lasting until the next one, or the end."""
    ends = [*(event.at for event in happened[1:]), max(duration_s, happened[-1].at if happened else 0.0)]
    return [
        Happened(event.kind, event.at, end, event.backend, event.backend_name, event.fault)
        for event, end in zip(happened, ends, strict=True)
    ]


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))


def affected(events: Iterable[AnyEvent]) -> set[int]:
    """Return the backends that events happen to."""
    return {event.backend for event in events if isinstance(event, BackendEvent | Churn)}


def change_endpoints(events: Iterable[AnyEvent]) -> bool:
    """Tell whether the target has to be told of endpoints."""
    return any(isinstance(event, Remove | Add | Churn) for event in events)


def events_as_text(events: Iterable[AnyEvent]) -> str:
    """Return the events in a line."""
    return ", ".join(
        f"{event.kind} {event.backend if isinstance(event, BackendEvent | Churn) else ''}".strip() + f" at {event.at}"
        for event in events
    )
