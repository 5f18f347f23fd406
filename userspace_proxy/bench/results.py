"""What a run has found out, as it is kept in JSON. Counted and merged, but not judged: that is `analysis`.

Latencies are HdrHistograms in their own compressed form, so results of processes, repetitions and files can be added up
without ever averaging a percentile. Times are seconds from the beginning of the measured part.
"""

from __future__ import annotations

from msgspec import Struct, field

SCHEMA_VERSION = 1
UNKNOWN_BACKEND = "?"


class Balance(Struct, kw_only=True):
    """Who was sent where. Only sums, so that repetitions can be added up.

    `eligible` are the endpoints that could be chosen all the time; where their names are not known, `endpoints` says
    how many there should be. Pairs are two connections in succession, of one
    client or of anyone; by chance alone the two meet the same backend with `expected` probability. Cycle violations are
    connections, one after the other, that met another backend than a round robin would have chosen.
    """

    eligible: list[str] = field(default_factory=list)
    endpoints: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    clients: int = 0
    client_pairs: int = 0
    client_pairs_same: int = 0
    serial_pairs: int = 0
    serial_pairs_same: int = 0
    is_sequential: bool = False
    cycle_checked: int = 0
    cycle_violations: int = 0


class Affinity(Struct, kw_only=True):
    """Whether clients stayed where they were. `removed` counts visits to an endpoint that was no longer one."""

    kept_pairs: int = 0
    violations: int = 0
    violating_clients: int = 0
    clients: int = 0
    expired_pairs: int = 0
    expired_same: int = 0
    moved_by_change: int = 0
    pairs_over_change: int = 0
    removed: int = 0


class Stalls(Struct, kw_only=True):
    """Times at which answers took longer than the limit. What the generator itself slept through is left out.

    `held` were overtaken by later requests. `excuse_s` is for how long target and backends had to wait for a CPU, or
    the whole machine for its host: stalls of that order are not the target's own. None where nobody knows.
    """

    limit_s: float
    episodes: list[tuple[float, float, int]] = field(default_factory=list)  # from, longest latency, requests
    slow: int = 0
    held: int = 0
    excuse_s: float | None = None
    unseen: int = 0


class Timeline(Struct, kw_only=True):
    """What happened when, in bins of equal length from the beginning of the measured part."""

    bin_s: float
    completed: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    slowest_s: list[float] = field(default_factory=list)
    moved_bytes: list[float] = field(default_factory=list)
    by_backend: dict[str, list[int]] = field(default_factory=dict)


class Datagrams(Struct, kw_only=True):
    """What became of datagrams. `reached` is what backends counted, so losses have a direction.

    What is counted `in_all`, and by backends, includes the warm-up. `lost_alone` are those of which most neighbours in
    time arrived: a buffer that overflows while a machine stands still loses all that come.
    """

    sent: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    late: int = 0
    duplicates: int = 0
    foreign: int = 0
    damaged: int = 0
    flows: int = 0
    flows_moved: int = 0
    flows_dead: int = 0
    refused: int = 0
    own_drops: int = 0
    lost_alone: int = 0
    sent_in_all: int = 0
    answered_in_all: int = 0
    reached: int | None = None


class Ending(Struct, kw_only=True):
    """How conversations of one kind ended; `outcomes` counts what both sides saw."""

    tried: int = 0
    faithful: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)


class Survival(Struct, kw_only=True):
    """Connections that were to be kept. Those of a backend that we have broken are expected to break."""

    opened: int = 0
    broken: int = 0
    expected: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class EventOutcome(Struct, kw_only=True):
    """What an event did to the clients, up to the next one. `recovered_s` is None where it was not over by then."""

    kind: str
    at: float
    backend: int = 0
    until: float = 0.0
    failures: int = 0
    slow: int = 0
    recovered_s: float | None = None
    first_use_s: float | None = None
    last_use_s: float | None = None
    fault: str = ""


class Cost(Struct, kw_only=True):
    """What the target used while it was measured. Peaks are sampled ten times a second."""

    user_s: float
    system_s: float
    run_s: float
    wait_s: float
    wall_s: float
    voluntary_switches: int
    involuntary_switches: int
    peak_resident_bytes: int
    peak_descriptors: int
    threads: int
    proportional_bytes: int = 0
    base_resident_bytes: int = 0
    base_descriptors: int = 0

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s if self.run_s == 0 else self.run_s


class SelfWatch(Struct, kw_only=True):
    """What the harness saw of itself. A busy share is the part of the time in which it ran or waited for a CPU."""

    lag_p50_s: float = 0.0
    lag_p99_s: float = 0.0
    lag_max_s: float = 0.0
    generator_busy: float = 0.0
    generator_starved: float = 0.0
    backends_busy: float = 0.0
    target_busy: float | None = None
    target_starved: float | None = None
    blind_s: float = 0.0
    unsent: int = 0
    own_failures: dict[str, int] = field(default_factory=dict)


class Limit(Struct, kw_only=True):
    """Why some of the numbers of a run are the harness' own and not the target's.

    `affects` is latency, throughput, loss or all.
    """

    affects: str
    reason: str


class LoadResult(Struct, kw_only=True):
    """What one load met, over all generator processes.

    A coarse histogram was made of a few percentiles that another program has printed; nothing beyond them is known.
    """

    kind: str
    sent: int = 0
    completed: int = 0
    rate: float = 0.0
    histogram: str = ""
    is_coarse: bool = False
    failures: dict[str, int] = field(default_factory=dict)
    moved_bytes: float = 0.0
    streams: list[float] = field(default_factory=list)
    timeline: Timeline = field(default_factory=lambda: Timeline(bin_s=0.1))
    stalls: Stalls = field(default_factory=lambda: Stalls(limit_s=0.1))
    balance: Balance | None = None
    affinity: Affinity | None = None
    datagrams: Datagrams | None = None
    endings: dict[str, Ending] = field(default_factory=dict)
    survival: Survival | None = None

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


class RunResult(Struct, kw_only=True):
    """One test on one target, once."""

    target: str
    test: str
    repetition: int
    duration_s: float
    load: LoadResult
    background: LoadResult | None = None
    events: list[EventOutcome] = field(default_factory=list)
    cost: Cost | None = None
    watch: SelfWatch = field(default_factory=SelfWatch)
    limits: list[Limit] = field(default_factory=list)


class TargetRecord(Struct, kw_only=True):
    """What a target was. `failed` says why it could not be measured."""

    name: str
    kind: str
    judged: bool
    command: str = ""
    configuration: str = ""
    version: str = ""
    failed: str = ""


class TestRecord(Struct, kw_only=True):
    """What a test was, as far as its results need it to be understood. `skipped` says why, by target."""

    name: str
    kind: str
    is_open_loop: bool
    description: str
    disturbed: bool = False
    skipped: dict[str, str] = field(default_factory=dict)


class Finding(Struct, kw_only=True):
    """What a check says of a target in one test. `status` is fault, suspect, good, unknown."""

    check: str
    target: str
    test: str
    status: str
    text: str
    judged: bool = True


class ThresholdOutcome(Struct, kw_only=True):
    """Whether a threshold of the scenario was met. `status` is met, missed, invalid, unknown."""

    text: str
    target: str
    test: str
    status: str
    measured: float | None = None
    judged: bool = True


class Environment(Struct, kw_only=True):
    """The machine and the programs."""

    versions: dict[str, str] = field(default_factory=dict)
    kernel: str = ""
    cpu: str = ""
    cpus: int = 0
    memory_bytes: int = 0
    load_average: float = 0.0
    sysctls: dict[str, str] = field(default_factory=dict)
    descriptor_limit: int = 0
    cpus_of_harness: list[int] = field(default_factory=list)
    cpus_of_targets: list[int] = field(default_factory=list)


class Report(Struct, kw_only=True):
    """A whole result file. `partial` runs were ended early; what they had found out until then is all there."""

    schema_version: int = SCHEMA_VERSION
    name: str
    command: str
    started: str
    seed: int
    scenario: dict[str, object]
    environment: Environment
    confidence: float = 0.95
    margin: float = 0.05
    partial: bool = False
    took_s: float = 0.0
    targets: list[TargetRecord] = field(default_factory=list)
    tests: list[TestRecord] = field(default_factory=list)
    runs: list[RunResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    thresholds: list[ThresholdOutcome] = field(default_factory=list)

    def of(self, target: str, test: str) -> list[RunResult]:
        """Return the repetitions of a test on a target."""
        return [run for run in self.runs if run.target == target and run.test == test]
