"""How a backend behaves, and what it reports: the two messages of its control channel."""

from __future__ import annotations

from msgspec import Struct, field


class Behaviour(Struct, frozen=True, kw_only=True):
    """What a backend does at present, beyond answering. The default is to be a good one."""

    refuse: bool = False
    reset: bool = False
    half_close: bool = False
    delay_s: float = 0.0
    per_byte_s: float = 0.0


class Command(Struct, kw_only=True):
    """What a backend is told: how to behave, or to report (and whether to count from 0 again)."""

    behave: Behaviour | None = None
    report: bool = False
    start_over: bool = False


class BackendReport(Struct, kw_only=True):
    """What a backend has seen since it last started over. `datagrams_dropped` were lost in its own receive buffer."""

    backend: int
    address: str
    connections: int = 0
    open_connections: int = 0
    requests: int = 0
    datagrams: int = 0
    datagrams_dropped: int = 0
    journal: dict[int, str] = field(default_factory=dict)
