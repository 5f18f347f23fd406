"""What can be set about the data path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DIAL_LADDER_S = (0.25, 0.5, 1.0, 2.0)
"""Time limits of the successive attempts to reach an endpoint. Source: kube-proxy 1.25, userspace mode."""


@dataclass(frozen=True, slots=True)
class DataPlaneSettings:
    """Limits and time-outs of the data path. Times are seconds.

    `max_sessions` None means min(10,000, a quarter of RLIMIT_NOFILE). `half_close_timeout_s` ends half-closed
    connections on which nothing moves. With `unidling`, at most `max_held` clients wait at each idled service port,
    each for `hold_timeout_s` at most. `cross_family` lets clients of one address family reach endpoints of the other
    where there are none of theirs. `proxy_ports` are what a listener at port 0 gets one of; None means any free port.
    `poller` is `auto` (epoll where there is one), `epoll` or `loop` (the event loop's own readers, for systems without
    epoll). `use_splice` False copies all bytes.
    """

    udp_idle_timeout_s: float = 0.25
    max_sessions: int | None = None
    dial_ladder_s: tuple[float, ...] = DIAL_LADDER_S
    half_close_timeout_s: float = 3600.0
    unidling: bool = True
    hold_timeout_s: float = 120.0
    max_held: int = 16
    cross_family: bool = True
    proxy_ports: range | None = None
    poller: Literal["auto", "epoll", "loop"] = "auto"
    use_splice: bool = True
    pipe_pool_bytes: int = 32 << 20
