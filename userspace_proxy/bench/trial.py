"""One test on one target, once: load, events and cost at the same time, and what remains of them as a `RunResult`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from userspace_proxy.bench import engines
from userspace_proxy.bench.addresses import Address, clients_for
from userspace_proxy.bench.analysis.failover import outcome_of
from userspace_proxy.bench.analysis.reduction import Samples, Setting, reduce_load, samples_of, watch_of
from userspace_proxy.bench.analysis.validity import limits_of
from userspace_proxy.bench.backend.behaviour import BackendReport
from userspace_proxy.bench.cost import CostMeter
from userspace_proxy.bench.crew import Crew
from userspace_proxy.bench.events import Stage, affected
from userspace_proxy.bench.fleet import Fleet
from userspace_proxy.bench.generator.job import Job, OwnBackends, Raw
from userspace_proxy.bench.histograms import merged, percentile_s
from userspace_proxy.bench.processes import StartFailed
from userspace_proxy.bench.results import LoadResult, RunResult
from userspace_proxy.bench.scenario import Address as AddressSpec
from userspace_proxy.bench.scenario import (
    Connect,
    Direct,
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
from userspace_proxy.bench.scenario import Target as TargetSpec
from userspace_proxy.bench.targets.base import Target, Unsupported

LEAD_S = 0.05
_HOLD_OPENS_PER_S = 1000
_MIN_HOLD_WARM_UP_S = 0.5
_AFTER_LAST_VISIT_S = 0.2
_ENDINGS_S = 0.1  # they take the time that they take; that much of it is watched


@dataclass(frozen=True, slots=True)
class Hall:
    """What all trials of a run share."""

    scenario: Scenario
    fleet: Fleet
    crew: Crew
    background_crew: Crew
    endpoints: Sequence[int]
    processes: int
    harness_cpus: Sequence[int]

    def addresses(self) -> list[Address]:
        """Return where the initial endpoints are."""
        return [self.fleet[number].address for number in self.endpoints]


class Trial:
    """One test on one target that runs."""

    def __init__(self, hall: Hall, test: Test, spec: TargetSpec, target: Target, repetition: int) -> None:
        self._hall, self._test, self._spec, self._target, self._repetition = hall, test, spec, target, repetition
        self._stage = Stage(hall.fleet, target, hall.endpoints)
        self._warm_up_s, self._duration_s = times_of(test, hall.scenario)
        self._measure_from = 0.0

    async def run(self) -> RunResult:
        """Return what was found out. Raises StartFailed when the target cannot do what it is asked for."""
        await self._hall.fleet.reports(start_over=True)
        meter, backends_meter = CostMeter(self._target.pids), CostMeter(self._hall.fleet.pids)
        result = RunResult(
            target=self._spec.name,
            test=self._test.name,
            repetition=self._repetition,
            duration_s=self._duration_s,
            load=LoadResult(kind=self._test.load.kind),
        )
        if engines.is_foreign(self._test.load):
            result.load = await self._run_foreign(meter)
        else:
            raws, held = await self._run_ours(meter, backends_meter)
            reports = await self._hall.fleet.reports(start_over=True)
            self._fill_in(result, raws, reports, meter, backends_meter)
            if self._test.background is not None:
                setting = self._setting(self._test.background, ())
                result.background = reduce_load(held, samples_of(held, setting), setting)
        result.cost = meter.cost()
        return result

    async def _run_ours(self, meter: CostMeter, backends_meter: CostMeter) -> tuple[list[Raw], list[Raw]]:
        """Let our generators make the load, and in the background hold connections where the test says so."""
        test, hall = self._test, self._hall
        start_at = time.monotonic() + LEAD_S
        from_ = self._measure_from = start_at + self._warm_up_s
        to = from_ + self._duration_s
        held: asyncio.Task[list[Raw]] | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                main = tasks.create_task(hall.crew.carry_out(self._jobs(test.load, start_at, hall.processes)))
                if test.background is not None:
                    jobs = self._jobs(test.background, start_at, 1)
                    held = tasks.create_task(hall.background_crew.carry_out(jobs))
                tasks.create_task(meter.measure(from_, to))
                tasks.create_task(backends_meter.measure(from_, to))
                if test.events:
                    tasks.create_task(self._stage.play(test.events, from_, self._duration_s))
        except* (StartFailed, Unsupported) as group:
            raise StartFailed("; ".join(str(error) for error in _leaves(group))) from None
        finally:
            if test.events:
                with contextlib.suppress(StartFailed, Unsupported):
                    await self._stage.tidy_up()
        return main.result(), held.result() if held is not None else []

    async def _run_foreign(self, meter: CostMeter) -> LoadResult:
        """Let another program make the load."""
        hall, now = self._hall, time.monotonic()
        address = self._target.addresses(hall.addresses(), udp=False)[0]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(meter.measure(now, now + self._duration_s))
            load = tasks.create_task(
                engines.run(
                    self._test.load, address, self._duration_s, hall.harness_cpus, hall.fleet, self._target,
                    hall.endpoints,
                )
            )  # fmt: skip
        return load.result()

    def _fill_in(
        self, result: RunResult, raws: list[Raw], reports: list[BackendReport], meter: CostMeter, backends: CostMeter
    ) -> None:
        """Reduce what the generators saw, and say where the harness was the limit."""
        setting = self._setting(self._test.load, reports)
        samples = samples_of(raws, setting)
        result.load = load = reduce_load(raws, samples, setting)
        if load.datagrams is not None and not has_own_backends(self._spec):
            load.datagrams.reached = sum(report.datagrams for report in reports)
        result.events = [
            outcome_of(event, *_troubles(samples, setting), samples.assignments) for event in self._stage.happened
        ]
        result.watch = watch = watch_of(raws)
        watch.target_busy, watch.target_starved = meter.busy, meter.starved
        watch.backends_busy = backends.busy or 0.0
        limits = limits_of(
            watch,
            is_open_loop=setting.is_open_loop,
            is_bulk=isinstance(self._test.load, Download | Upload | Endings),
            latency_p99_s=percentile_s(merged([load.histogram]), 99.0),
            duration_s=self._duration_s,
            datagrams=load.datagrams,
            has_target=not isinstance(self._spec, Direct),
        )
        result.limits = list(limits)
        if watch.target_starved is not None:
            waited = watch.target_starved + (backends.starved or 0.0)
            load.stalls.excuse_s = waited * self._duration_s + meter.stolen_s

    def _jobs(self, load: Load, start_at: float, processes: int) -> list[Job]:
        """Return the jobs of all processes; no more of them than there are connections to share."""
        targets = self._target.addresses(self._hall.addresses(), udp=isinstance(load, Udp))
        processes = min(processes, _shareable(load))
        seed = 1000 * self._hall.scenario.seed + self._repetition  # the same for all targets, another one each round
        own = None
        if isinstance(self._spec, AddressSpec) and self._spec.own_backends:
            spec = self._spec
            own = OwnBackends(request=spec.request, reply_ends=spec.reply_ends, identify=spec.identify)
        return [
            Job(
                load=load,
                targets=targets,
                clients=clients_for(targets[0][0], load.clients),
                start_at=start_at,
                warm_up_s=self._warm_up_s,
                duration_s=self._duration_s,
                seed=seed,
                process=process,
                processes=processes,
                own_backends=own,
            )
            for process in range(processes)
        ]

    def _setting(self, load: Load, reports: Sequence[BackendReport]) -> Setting:
        """Return what has to be known to understand the samples of a load."""
        test, own = self._test, has_own_backends(self._spec)
        undisturbed = [number for number in self._hall.endpoints if number not in affected(test.events)]
        return Setting(
            kind=load.kind,
            measure_from=self._measure_from,
            duration_s=self._duration_s,
            backend_names={backend.number: str(backend.number) for backend in self._hall.fleet.backends},
            eligible=[] if own else [str(number) for number in undisturbed],
            affinity_s=test.affinity,
            is_sequential=isinstance(load, Connect) and load.connections == 1 and not test.events,
            is_open_loop=is_open_loop(load),
            own_endpoints=self._spec.endpoints if isinstance(self._spec, AddressSpec) else 0,
            stall_limit_s=test.checks.stall_limit,
            streams=load.streams if isinstance(load, Download | Upload) else 0,
            events=self._stage.happened,
            journals=reports,
        )


def times_of(test: Test, scenario: Scenario) -> tuple[float, float]:
    """Return the seconds of warm-up and of measuring."""
    load = test.load
    warm_up_s = float(scenario.warm_up if load.warm_up is None else load.warm_up)
    duration_s = float(scenario.duration if load.duration is None else load.duration)
    if isinstance(load, Visits):
        return 0.0, max(duration_s, max(load.at) + _AFTER_LAST_VISIT_S)
    if isinstance(load, Endings):
        return 0.0, _ENDINGS_S
    for held in (load, test.background):
        if isinstance(held, Hold):  # long enough to open all connections
            warm_up_s = max(warm_up_s, _MIN_HOLD_WARM_UP_S, held.connections / _HOLD_OPENS_PER_S)
    return warm_up_s, duration_s


def is_open_loop(load: Load) -> bool:
    """Tell whether requests are due at times of their own."""
    return isinstance(load, Hold | Visits) or (isinstance(load, Paced | Udp) and load.rate is not None)


def has_own_backends(spec: TargetSpec) -> bool:
    """Tell whether the target balances over backends that are not ours."""
    return isinstance(spec, AddressSpec) and spec.own_backends


def _troubles(samples: Samples, setting: Setting) -> tuple[list[float], list[float]]:
    """Return when requests were due that failed, and when those that took too long."""
    failed = [due for _, due, kind in samples.failures if kind != "lost"]
    waits = zip(samples.latencies, samples.ends, strict=True)
    return failed, [end - latency for latency, end in waits if latency > setting.stall_limit_s]


def _shareable(load: Load) -> int:
    """Return how many processes can share a load at most."""
    match load:
        case Endings() | Visits():
            return 1
        case Download() | Upload():
            return load.streams
        case Udp():
            return load.flows
        case Paced() | Hold():
            return load.connections


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
