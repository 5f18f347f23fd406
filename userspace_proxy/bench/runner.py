"""The run: rounds over all targets, tests one after the other, and what each of them costs.

    for each round: for each target: start it; for each test: load, events, cost -> RunResult

Rounds are interleaved so that what changes on the machine meanwhile changes for all targets alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from userspace_proxy.bench import engines
from userspace_proxy.bench.addresses import Address, clients_for, parse_address, require_loopback
from userspace_proxy.bench.analysis.failover import outcome_of
from userspace_proxy.bench.analysis.reduction import Samples, Setting, reduce_load, samples_of, watch_of
from userspace_proxy.bench.analysis.validity import limits_of
from userspace_proxy.bench.backend.behaviour import BackendReport
from userspace_proxy.bench.cost import CostMeter
from userspace_proxy.bench.crew import Crew
from userspace_proxy.bench.environment import version_of
from userspace_proxy.bench.events import Stage, affected, change_endpoints
from userspace_proxy.bench.fleet import Fleet
from userspace_proxy.bench.generator.job import Job, OwnBackends, Raw
from userspace_proxy.bench.histograms import merged, percentile_s
from userspace_proxy.bench.processes import StartFailed, on_cpus, split_cpus
from userspace_proxy.bench.results import Report, RunResult, TargetRecord
from userspace_proxy.bench.scenario import (
    Address as AddressSpec,
)
from userspace_proxy.bench.scenario import (
    Connect,
    Download,
    Endings,
    Hold,
    Load,
    Paced,
    Scenario,
    Test,
    Udp,
    Upload,
    Visits,
)
from userspace_proxy.bench.targets.base import Target, Unsupported
from userspace_proxy.bench.targets.make import make_target

_LEAD_S = 0.05
_HOLD_OPENS_PER_S = 1000
_MIN_HOLD_WARM_UP_S = 0.5
_SETTLE_S = 0.03
_ENDINGS_S = 0.1

Progress = Callable[[float, str], None]
"""Told of the seconds that a step is expected to have taken, and what comes next."""


@dataclass(slots=True)
class Running:
    """A target that runs, as it was started."""

    target: Target
    record: TargetRecord
    spec: object
    affinity_s: float | None = None
    is_up: bool = False
    version: str = ""
    base: CostMeter | None = None
    disturbed: bool = field(default=False)


class Runner:
    """Carries out a scenario into a report. What is in the report is complete at any moment."""

    def __init__(self, scenario: Scenario, report: Report, *, allow_remote: bool, on_progress: Progress) -> None:
        self._scenario, self._report = scenario, report
        self._allow_remote, self._on_progress = allow_remote, on_progress
        self._harness_cpus, self._target_cpus = split_cpus(pin=scenario.pin)
        backends = scenario.backends
        number = backends.count + backends.spare
        self._backend_addresses = backends.addresses or tuple(f"127.0.1.{index}:0" for index in range(1, number + 1))
        if not allow_remote:
            require_loopback(parse_address_of_any_port(text) for text in self._backend_addresses)
        self._endpoints = list(range(1, backends.count + 1))
        self._processes = scenario.processes or max(1, len(self._harness_cpus))

    @property
    def expected_s(self) -> float:
        """Seconds that the run is expected to take."""
        tests = sum(self._expected_s(test) for test in self._scenario.tests)
        return tests * len(self._scenario.targets) * self._scenario.repetitions

    async def run(self) -> None:
        """Measure everything. Raises StartFailed when the harness itself cannot be started."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="userspace-proxy-bench-") as name, on_cpus(self._harness_cpus):
            directory = Path(name)
            specs = self._scenario.targets
            targets = [
                make_target(spec, directory=directory, cpus=self._target_cpus, allow_remote=self._allow_remote)
                for spec in specs
            ]
            self._runnings = [
                Running(target, record, spec)
                for target, record, spec in zip(targets, self._report.targets, specs, strict=True)
            ]
            for running in self._runnings:
                running.record.failed = running.target.missing() or ""
            try:
                await self._run_rounds(directory)
            finally:
                self._report.took_s = time.monotonic() - began
                for running in self._runnings:
                    await running.target.stop()

    async def _run_rounds(self, directory: Path) -> None:
        cpus = self._harness_cpus
        async with (
            Fleet(self._backend_addresses, cpus=cpus, directory=directory) as fleet,
            Crew(self._processes, cpus=cpus, directory=directory) as crew,
            Crew(1, cpus=cpus, directory=directory) as background,
        ):
            self._fleet, self._crew, self._background = fleet, crew, background
            for repetition in range(self._scenario.repetitions):
                for running in self._runnings:
                    await self._run_round(running, repetition)

    async def _run_round(self, running: Running, repetition: int) -> None:
        """Run all tests on one target; it is stopped afterwards, so that it does not disturb the others."""
        try:
            for test in self._scenario.tests:
                self._on_progress(
                    0.0, f"round {repetition + 1} of {self._scenario.repetitions} · {running.record.name} · {test.name}"
                )
                if not running.record.failed and self._takes_part(running, test):
                    await self._ensure_up(running, test)
                    await self._run_test(running, test, repetition)
                self._on_progress(self._expected_s(test), "")
        except StartFailed as error:
            running.record.failed = str(error)
        finally:
            running.is_up = False
            await running.target.stop()
            await self._fleet.restore()

    def _takes_part(self, running: Running, test: Test) -> bool:
        """Tell whether the target can take part in the test, and note why not."""
        reason = running.target.why_not(
            udp=isinstance(test.load, Udp),
            affinity=test.affinity is not None,
            endpoints_change=change_endpoints(test.events),
        ) or engines.why_not(test.load)
        if reason:
            record = next(record for record in self._report.tests if record.name == test.name)
            record.skipped[running.record.name] = reason
        return reason is None

    async def _ensure_up(self, running: Running, test: Test) -> None:
        """Have the target run as the test needs it, fresh after one that has disturbed it."""
        if running.is_up and running.affinity_s == test.affinity and not running.disturbed:
            return
        await running.target.stop()
        await self._fleet.restore()
        needs_udp = any(isinstance(t.load, Udp) for t in self._scenario.tests)
        needs_tcp = any(not isinstance(t.load, Udp) for t in self._scenario.tests)
        can_udp = running.target.why_not(udp=True, affinity=False, endpoints_change=False) is None
        running.affinity_s, running.disturbed = test.affinity, False
        await running.target.start(self._addresses(), test.affinity, tcp=needs_tcp, udp=needs_udp and can_udp)
        running.is_up = True
        running.base = CostMeter(running.target.pids)
        running.record.command, running.record.configuration = running.target.description()
        running.record.version = running.record.version or await version_of(running.spec)

    async def _run_test(self, running: Running, test: Test, repetition: int) -> None:
        target, load = running.target, test.load
        duration_s = float(_or(load.duration, self._scenario.duration))
        warm_up_s = _warm_up_s(test, float(_or(load.warm_up, self._scenario.warm_up)))
        if isinstance(load, Visits):
            duration_s, warm_up_s = max(duration_s, max(load.at) + 0.2), 0.0
        if isinstance(load, Endings):
            duration_s, warm_up_s = _ENDINGS_S, 0.0  # they take the time that they take
        stage = Stage(self._fleet, target, self._endpoints)
        await self._fleet.reports(start_over=True)
        start_at = time.monotonic() + _LEAD_S
        measure_from = start_at + warm_up_s
        meter, harness = CostMeter(target.pids), CostMeter(self._fleet.pids)
        if engines.is_foreign(load):
            await self._run_foreign(running, test, repetition, meter, duration_s)
            return
        jobs = self._jobs(running, test, load, start_at, warm_up_s, duration_s)
        held: list[Raw] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                main = tasks.create_task(self._crew.carry_out(jobs))
                if test.background is not None:
                    held_jobs = self._jobs(running, test, test.background, start_at, warm_up_s, duration_s)[:1]
                    other = tasks.create_task(self._background.carry_out(held_jobs))
                tasks.create_task(meter.measure(measure_from, measure_from + duration_s))
                tasks.create_task(harness.measure(measure_from, measure_from + duration_s))
                if test.events:
                    tasks.create_task(stage.play(test.events, measure_from, duration_s))
            raws = main.result()
            held = other.result() if test.background is not None else []
        except* (StartFailed, Unsupported) as group:
            raise StartFailed("; ".join(map(str, _leaves(group)))) from None
        finally:
            if test.events:
                running.disturbed = True
                with contextlib.suppress(StartFailed, Unsupported):
                    await stage.tidy_up()
        reports = await self._fleet.reports(start_over=True)
        self._report.runs.append(
            self._result(
                running, test, repetition, measure_from, duration_s, raws, held, stage, reports, meter, harness
            )
        )
        await asyncio.sleep(_SETTLE_S)

    def _result(
        self, running: Running, test: Test, repetition: int, measure_from: float, duration_s: float, raws: list[Raw],
        held: list[Raw], stage: Stage, reports: list[BackendReport], meter: CostMeter, harness: CostMeter,
    ) -> RunResult:  # fmt: skip
        """Return what is kept of one test on one target."""
        setting = self._setting(running, test, test.load, measure_from, duration_s, stage, reports)
        samples = samples_of(raws, setting)
        load = reduce_load(raws, samples, setting)
        if load.datagrams is not None and not _has_own_backends(running):
            load.datagrams.reached = sum(report.datagrams for report in reports)
        watch = watch_of(raws)
        watch.target_busy, watch.target_starved = meter.busy, meter.starved
        watch.backends_busy = harness.busy or 0.0
        histogram = merged([load.histogram])
        limits = limits_of(
            watch,
            is_open_loop=setting.is_open_loop,
            is_bulk=isinstance(test.load, Download | Upload | Endings),
            latency_p99_s=percentile_s(histogram, 99.0),
            duration_s=duration_s,
            datagrams=load.datagrams,
            has_target=running.record.kind != "direct",
        )
        background = None
        if test.background is not None:
            held_setting = self._setting(running, test, test.background, measure_from, duration_s, stage, ())
            background = reduce_load(held, samples_of(held, held_setting), held_setting)
        return RunResult(
            target=running.record.name,
            test=test.name,
            repetition=repetition,
            duration_s=duration_s,
            load=load,
            background=background,
            events=[outcome_of(e, *_troubles(samples, setting), samples.assignments) for e in stage.happened],
            cost=meter.cost(running.base),
            watch=watch,
            limits=list(limits),
        )

    async def _run_foreign(
        self, running: Running, test: Test, repetition: int, meter: CostMeter, duration_s: float
    ) -> None:
        """Let another program make the load."""
        address = running.target.addresses(self._addresses(), udp=False)[0]
        now = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(meter.measure(now, now + duration_s))
            running_load = tasks.create_task(
                engines.run(
                    test.load, address, duration_s, self._harness_cpus, self._fleet, running.target, self._endpoints
                )
            )
        self._report.runs.append(
            RunResult(
                target=running.record.name, test=test.name, repetition=repetition, duration_s=duration_s,
                load=running_load.result(), cost=meter.cost(running.base),
            )
        )  # fmt: skip

    def _jobs(
        self, running: Running, test: Test, load: Load, start_at: float, warm_up_s: float, duration_s: float
    ) -> list[Job]:
        """Return the jobs of all processes; no more of them than there are connections to share."""
        targets = running.target.addresses(self._addresses(), udp=isinstance(load, Udp))
        processes = min(self._processes, _shareable(load))
        own = None
        if isinstance(running.spec, AddressSpec) and running.spec.own_backends:
            spec = running.spec
            own = OwnBackends(request=spec.request, reply_ends=spec.reply_ends, identify=spec.identify)
        return [
            Job(
                load=load,
                targets=targets,
                clients=clients_for(targets[0][0], load.clients),
                start_at=start_at,
                warm_up_s=warm_up_s,
                duration_s=duration_s,
                seed=self._scenario.seed,
                process=process,
                processes=processes,
                own_backends=own,
            )
            for process in range(processes)
        ]

    def _setting(
        self, running: Running, test: Test, load: Load, measure_from: float, duration_s: float, stage: Stage,
        reports: list[BackendReport] | tuple[BackendReport, ...],
    ) -> Setting:  # fmt: skip
        undisturbed = [number for number in self._endpoints if number not in affected(test.events)]
        return Setting(
            kind=load.kind,
            measure_from=measure_from,
            duration_s=duration_s,
            backend_names={number: str(number) for number in range(1, len(self._fleet.backends) + 1)},
            eligible=[] if _has_own_backends(running) else [str(number) for number in undisturbed],
            affinity_s=test.affinity,
            is_sequential=isinstance(load, Connect) and load.connections == 1 and not test.events,
            is_open_loop=is_open_loop(load),
            own_endpoints=running.spec.endpoints if isinstance(running.spec, AddressSpec) else 0,
            stall_limit_s=test.checks.stall_limit,
            streams=load.streams if isinstance(load, Download | Upload) else 0,
            events=stage.happened,
            journals=reports,
        )

    def _addresses(self) -> list[Address]:
        return [self._fleet[number].address for number in self._endpoints]

    def _expected_s(self, test: Test) -> float:
        """Return about how many seconds a test takes on one target."""
        duration_s = float(_or(test.load.duration, self._scenario.duration))
        warm_up_s = _warm_up_s(test, float(_or(test.load.warm_up, self._scenario.warm_up)))
        return duration_s + warm_up_s + _LEAD_S + _SETTLE_S + 0.2 if test.load.kind != "endings" else 0.5


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def is_open_loop(load: Load) -> bool:
    """Tell whether requests are due at times of their own."""
    return isinstance(load, Hold | Visits) or (isinstance(load, Paced | Udp) and load.rate is not None)


def parse_address_of_any_port(text: str) -> str:
    """Return the host of an address whose port may be 0."""
    host, _, port = text.rpartition(":")
    return parse_address(f"{host}:{port}")[0] if port != "0" else host


def _troubles(samples: Samples, setting: Setting) -> tuple[list[float], list[float]]:
    """Return when requests were due that failed, and when those that took too long."""
    failed = [due for _, due, kind in samples.failures if kind != "lost"]
    waits = zip(samples.latencies, samples.ends, strict=True)
    return failed, [end - latency for latency, end in waits if latency > setting.stall_limit_s]


def _has_own_backends(running: Running) -> bool:
    return isinstance(running.spec, AddressSpec) and running.spec.own_backends


def _shareable(load: Load) -> int:
    match load:
        case Endings():
            return 1
        case Download() | Upload():
            return load.streams
        case Udp():
            return load.flows
        case Visits():
            return 1
        case Paced() | Hold():
            return load.connections


def _warm_up_s(test: Test, asked_s: float) -> float:
    """Return the warm-up, long enough to open connections that are held."""
    for load in (test.load, test.background):
        if isinstance(load, Hold):
            asked_s = max(asked_s, _MIN_HOLD_WARM_UP_S, load.connections / _HOLD_OPENS_PER_S)
    return asked_s


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
