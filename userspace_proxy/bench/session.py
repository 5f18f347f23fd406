"""What `bench run` does: a scenario becomes a report, whatever happens on the way."""

from __future__ import annotations

import datetime

import msgspec

from userspace_proxy.bench.analysis.verdicts import judge
from userspace_proxy.bench.environment import describe_environment
from userspace_proxy.bench.events import events_as_text
from userspace_proxy.bench.results import Report, TargetRecord, TestRecord
from userspace_proxy.bench.runner import Progress, Runner
from userspace_proxy.bench.scenario import (
    Download,
    Endings,
    Hold,
    Http,
    Load,
    Paced,
    Scenario,
    Test,
    Udp,
    Upload,
    Visits,
)
from userspace_proxy.bench.scenario_file import scenario_as_data
from userspace_proxy.bench.trial import is_open_loop


class Session:
    """One run. `report` is valid at any moment, and partial until the run has ended by itself."""

    def __init__(self, scenario: Scenario, *, command: str, allow_remote: bool, on_progress: Progress) -> None:
        self.scenario = scenario
        self.report = Report(
            name=scenario.name,
            command=command,
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seed=scenario.seed,
            scenario=scenario_as_data(scenario),
            environment=describe_environment(pin=scenario.pin),
            confidence=scenario.confidence,
            margin=scenario.margin,
            partial=True,
            targets=[TargetRecord(name=t.name, kind=t.kind, judged=t.judged) for t in scenario.targets],
            tests=[_record(test) for test in scenario.tests],
        )
        self._runner = Runner(scenario, self.report, allow_remote=allow_remote, on_progress=on_progress)

    @property
    def expected_s(self) -> float:
        return self._runner.expected_s

    async def run(self) -> None:
        """Measure. However it ends, the report is judged with what there is."""
        try:
            await self._runner.run()
            self.report.partial = False
        finally:
            judge(self.report, self.scenario)


def narrowed(scenario: Scenario, tests: tuple[str, ...]) -> Scenario:
    """Return the scenario with only these tests, where any are named."""
    kept = tuple(test for test in scenario.tests if not tests or test.name in tests)
    return msgspec.structs.replace(scenario, tests=kept)


def _record(test: Test) -> TestRecord:
    what = describe_load(test.load)
    if test.background is not None:
        what += f"; meanwhile {describe_load(test.background)}"
    if test.affinity is not None:
        what += f"; affinity {test.affinity}"
    if test.events:
        what += f"; {events_as_text(test.events)}"
    return TestRecord(
        name=test.name, kind=test.load.kind, is_open_loop=is_open_loop(test.load), description=what,
        disturbed=bool(test.events),
    )  # fmt: skip


def describe_load(load: Load) -> str:
    """Return a load in words."""
    match load:
        case Endings():
            return f"TCP conversations that end in every way, {load.each} each"
        case Download() | Upload():
            return f"TCP bulk {'down' if isinstance(load, Download) else 'up'}, {load.streams} streams, {load.engine}"
        case Hold():
            return f"{load.connections} idle TCP connections, each asked once per {load.ping}"
        case Visits():
            return f"TCP, each of {load.clients} clients connects at {', '.join(map(str, load.at))}"
        case Udp():
            loop = f"closed loop, window {load.window}" if load.rate is None else f"open loop at {load.rate}"
            return f"UDP round trips, {loop}, {load.flows} flows"
        case Paced():
            loop = "closed loop" if load.rate is None else f"open loop at {load.rate}, {load.arrivals}"
            what = {"connect": "TCP connect, request, close", "requests": "TCP requests, keep-alive"}
            if isinstance(load, Http):
                what["http"] = f"HTTP/1.1 requests{', keep-alive' if load.keep_alive else ''}, {load.engine}"
            return f"{what[load.kind]}, {loop}, {load.connections} connections"
