"""The run: rounds over all targets, and in each the tests one after the other.

    for each round: for each target: start it; for each test: Trial -> RunResult

Rounds are interleaved so that what changes on the machine meanwhile changes for all targets alike.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from userspace_proxy.bench import engines
from userspace_proxy.bench.addresses import parse_address, require_loopback
from userspace_proxy.bench.crew import Crew
from userspace_proxy.bench.environment import version_of
from userspace_proxy.bench.events import change_endpoints
from userspace_proxy.bench.fleet import Fleet
from userspace_proxy.bench.processes import StartFailed, on_cpus, split_cpus
from userspace_proxy.bench.results import Report, TargetRecord
from userspace_proxy.bench.scenario import Download, Endings, Scenario, Test, Udp, Upload
from userspace_proxy.bench.scenario import Target as TargetSpec
from userspace_proxy.bench.targets.base import Target
from userspace_proxy.bench.targets.make import make_target
from userspace_proxy.bench.trial import LEAD_S, Hall, Trial, has_own_backends, times_of

_ABOUT_A_TEST_S = 0.2

Progress = Callable[[float, str], None]
"""Told of the seconds that a step is expected to have taken, and what comes next."""


@dataclass(slots=True)
class Running:
    """A target, and how it was started, if it was."""

    target: Target
    record: TargetRecord
    spec: TargetSpec
    affinity_s: float | None = None
    is_up: bool = False
    is_disturbed: bool = False


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
            require_loopback(parse_address(text)[0] for text in backends.addresses)

    @property
    def expected_s(self) -> float:
        """Seconds that the run is expected to take."""
        tests = sum(self._expected_s(test) for test in self._scenario.tests)
        return tests * len(self._scenario.targets) * self._scenario.repetitions

    async def run(self) -> None:
        """Measure everything. Raises ConfigError for an address that must not be used, ProxyError when we fail."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="userspace-proxy-bench-") as name, on_cpus(self._harness_cpus):
            runnings = self._make_targets(Path(name))
            try:
                await self._run_rounds(runnings, Path(name))
            finally:
                self._report.took_s = time.monotonic() - began
                for running in runnings:
                    await running.target.stop()

    def _make_targets(self, directory: Path) -> list[Running]:
        runnings = []
        for spec, record in zip(self._scenario.targets, self._report.targets, strict=True):
            target = make_target(spec, directory=directory, cpus=self._target_cpus, allow_remote=self._allow_remote)
            record.failed = target.missing() or ""
            runnings.append(Running(target, record, spec))
        return runnings

    async def _run_rounds(self, runnings: list[Running], directory: Path) -> None:
        cpus, scenario = self._harness_cpus, self._scenario
        processes = scenario.processes or max(1, len(cpus))
        endpoints = range(1, scenario.backends.count + 1)
        async with (
            Fleet(self._backend_addresses, cpus=cpus, directory=directory) as fleet,
            Crew(processes, cpus=cpus, directory=directory) as crew,
            Crew(1, cpus=cpus, directory=directory) as background,
        ):
            hall = Hall(scenario, fleet, crew, background, endpoints, processes, cpus)
            for repetition in range(scenario.repetitions):
                for running in runnings:
                    await self._run_round(hall, running, repetition)

    async def _run_round(self, hall: Hall, running: Running, repetition: int) -> None:
        """Run all tests on one target; it is stopped afterwards, so that it does not disturb the others."""
        try:
            for test in self._scenario.tests:
                place = f"round {repetition + 1} of {self._scenario.repetitions} · {running.record.name} · {test.name}"
                self._on_progress(0.0, place)
                if not running.record.failed and self._takes_part(running, test):
                    await self._ensure_up(hall, running, test)
                    if self._takes_part(running, test):  # it may have turned out only now that it has no UDP
                        await self._run_test(hall, running, test, repetition)
                self._on_progress(self._expected_s(test), "")
        except StartFailed as error:
            running.record.failed = str(error)
        finally:
            running.is_up = False
            await running.target.stop()
            await hall.fleet.restore()

    async def _run_test(self, hall: Hall, running: Running, test: Test, repetition: int) -> None:
        running.is_disturbed = bool(test.events)
        trial = Trial(hall, test, running.spec, running.target, repetition)
        self._report.runs.append(await trial.run())
        child = running.target.family()
        if child is not None and not child.is_running:
            raise StartFailed(f"it ended during the test {test.name!r}. {child.complaints()}")

    async def _ensure_up(self, hall: Hall, running: Running, test: Test) -> None:
        """Have the target run as the test needs it, fresh after one that has disturbed it."""
        if running.is_up and running.affinity_s == test.affinity and not running.is_disturbed:
            return
        target, tests = running.target, self._scenario.tests
        await target.stop()
        await hall.fleet.restore()
        needs_udp = any(isinstance(each.load, Udp) for each in tests)
        needs_tcp = any(not isinstance(each.load, Udp) for each in tests)
        can_udp = target.why_not(udp=True, affinity=False, endpoints_change=False) is None
        running.affinity_s, running.is_disturbed = test.affinity, False
        await target.start(hall.addresses(), test.affinity, tcp=needs_tcp, udp=needs_udp and can_udp)
        running.is_up = True
        record = running.record
        record.command, record.configuration = target.description()
        record.version = record.version or await version_of(running.spec)

    def _takes_part(self, running: Running, test: Test) -> bool:
        """Tell whether the target can take part in the test, and note why not."""
        reason = running.target.why_not(
            udp=isinstance(test.load, Udp),
            affinity=test.affinity is not None,
            endpoints_change=change_endpoints(test.events),
        )
        if has_own_backends(running.spec) and isinstance(test.load, Download | Upload | Endings):
            reason = "it has backends of its own, which need not know this kind of load"
        reason = reason or engines.why_not(test.load)
        if reason:
            record = next(record for record in self._report.tests if record.name == test.name)
            record.skipped[running.record.name] = reason
        return reason is None

    def _expected_s(self, test: Test) -> float:
        """Return about how many seconds a test takes on one target."""
        return sum(times_of(test, self._scenario)) + LEAD_S + _ABOUT_A_TEST_S
