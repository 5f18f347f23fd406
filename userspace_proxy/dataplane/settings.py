"""What can be set about the data path."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Literal

from userspace_proxy.core.limits import MAX_BACKLOG, MAX_USER_TIMEOUT_S

DIAL_LADDER_S = (0.25, 0.5, 1.0, 2.0)
"""Time limits of the successive attempts to reach an endpoint. Source: kube-proxy 1.25, userspace mode."""

_MAX_SESSIONS = 10_000


@dataclass(frozen=True, slots=True)
class DataPlaneSettings:
    """Limits and time-outs of the data path. Times are seconds.

    `max_sessions` None means min(10,000, a quarter of RLIMIT_NOFILE). `half_close_timeout_s` ends half-closed
    connections on which nothing moves, `tcp_idle_timeout_s` all others, and `tcp_user_timeout_s` those whose peer
    acknowledges or takes nothing. Zero means no limit for the latter two, for `max_connections` in total and for
    `max_connections_per_service_port`. `listen_backlog` clients of a listener may wait to be accepted. With
    `unidling`, `max_held` clients may wait at each idled service port, each for `hold_timeout_s`. `cross_family` lets
    clients of one address family reach endpoints of the other where there are none of theirs. `proxy_ports` are what a
    listener at port 0 gets one of; None means any free port. `poller` is `auto` (epoll where there is one), `epoll` or
    `loop` (the event loop's own readers, for systems without epoll). `use_splice` False copies all bytes. `use_mmsg`
    False receives and sends each datagram by itself, even where there are many. With more than one of
    `workers` so many processes move the bytes, and this one accepts and chooses.
    """

    udp_idle_timeout_s: float = 0.25
    max_sessions: int | None = None
    dial_ladder_s: tuple[float, ...] = DIAL_LADDER_S
    half_close_timeout_s: float = 3600.0
    tcp_idle_timeout_s: float = 0.0
    tcp_user_timeout_s: float = 0.0
    max_connections: int = 0
    max_connections_per_service_port: int = 0
    listen_backlog: int = 4096
    unidling: bool = True
    hold_timeout_s: float = 120.0
    max_held: int = 16
    cross_family: bool = True
    proxy_ports: range | None = None
    poller: Literal["auto", "epoll", "loop"] = "auto"
    use_splice: bool = True
    use_mmsg: bool = True
    pipe_pool_bytes: int = 32 << 20
    workers: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a limit that makes no sense, naming it."""
        if not self.dial_ladder_s:
            raise ValueError("dial_ladder_s is empty: it must have one time limit at least")
        positive = {name: getattr(self, name) for name in ("half_close_timeout_s", "hold_timeout_s", "max_held")}
        positive |= {f"dial_ladder_s[{index}]": limit_s for index, limit_s in enumerate(self.dial_ladder_s)}
        for name, limit in positive.items():
            if limit <= 0:
                raise ValueError(f"{name} is {limit:g}: it must be greater than 0")
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}: there must be one at least")
        for name in ("max_connections", "max_connections_per_service_port", "tcp_idle_timeout_s", "tcp_user_timeout_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name):g}: it must not be negative")
        if self.tcp_user_timeout_s > MAX_USER_TIMEOUT_S:
            raise ValueError(
                f"tcp_user_timeout_s is {self.tcp_user_timeout_s:g}: it can be {MAX_USER_TIMEOUT_S:g} at most"
            )
        if not 1 <= self.listen_backlog <= MAX_BACKLOG:
            raise ValueError(f"listen_backlog is {self.listen_backlog}: it must be within the range [1, {MAX_BACKLOG}]")


def default_max_sessions() -> int:
    """Return min(10,000, a quarter of RLIMIT_NOFILE): each session costs a descriptor and a port."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_SESSIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_SESSIONS, soft // 4))
