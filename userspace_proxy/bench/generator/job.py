"""The two messages between runner and generator: what to do, and what was seen."""

from __future__ import annotations

from msgspec import Struct, field

from userspace_proxy.bench.scenario import Load


class OwnBackends(Struct, kw_only=True):
    """How to talk to backends that are not ours."""

    request: str
    reply_ends: str
    identify: str


class Job(Struct, kw_only=True):
    """One load for one process out of `processes`. Times are monotonic seconds, which all processes share.

    What was due from `start_at + warm_up_s` on counts, for `duration_s` seconds.
    """

    load: Load
    targets: list[tuple[str, int]]
    clients: list[str]
    start_at: float
    warm_up_s: float
    duration_s: float
    seed: int
    process: int = 0
    processes: int = 1
    own_backends: OwnBackends | None = None

    @property
    def measure_from(self) -> float:
        return self.start_at + self.warm_up_s

    @property
    def measure_to(self) -> float:
        return self.measure_from + self.duration_s

    def share(self, total: int) -> int:
        """Return this process' part of so many connections or flows."""
        return total // self.processes + (self.process < total % self.processes)


class Failure(Struct, array_like=True):
    """A request that got no proper answer. `client` is an index, `backend` a number or 0 where nobody knows."""

    at: float
    due: float
    kind: str
    backend: int
    client: int


class Break(Struct, array_like=True):
    """A connection that ended although it was to be kept."""

    at: float
    opened: float
    kind: str
    backend: int


class DatagramCounts(Struct, kw_only=True):
    """What became of datagrams. Sizes are keys. `own_drops` were lost in the generator's own receive buffers."""

    sent: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    sent_in_all: int = 0
    answered_in_all: int = 0
    late: int = 0
    duplicates: int = 0
    foreign: int = 0
    damaged: int = 0
    flows: int = 0
    flows_moved: int = 0
    flows_dead: int = 0
    refused: int = 0
    own_drops: int = 0


class EndingSeen(Struct, kw_only=True):
    """How one conversation looked from the client. `sequence` is its name in the journal of a backend."""

    probe: str
    sequence: int
    outcome: str


class Watch(Struct, kw_only=True):
    """What the generator saw of itself while it measured. `wait_s` is time it was ready to run but had no CPU.

    `blind` are stretches in which it did not look: nothing that seems to have happened then is the target's.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    blind: list[tuple[float, float]] = field(default_factory=list)


class Raw(Struct, kw_only=True):
    """All that one process saw. Columns of numbers are the bytes of arrays of doubles (or of ints, for who)."""

    sent: int = 0
    unsent: int = 0
    latencies: bytes = b""
    ends: bytes = b""
    lags: bytes = b""
    assigned_at: bytes = b""
    assigned_client: bytes = b""
    assigned_backend: bytes = b""
    moved_at: bytes = b""
    moved_bytes: bytes = b""
    moved_stream: bytes = b""
    names: dict[int, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    own_failures: dict[str, int] = field(default_factory=dict)
    opened: int = 0
    kept: int = 0
    datagrams: DatagramCounts | None = None
    endings: list[EndingSeen] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)
    fault: str = ""
