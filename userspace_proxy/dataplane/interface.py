"""A data path as the rest of the program sees it, in this process or in another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from userspace_proxy.core.balancer import Balancer
from userspace_proxy.core.counters import Counters, LiveCounters
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePortName
from userspace_proxy.core.plan import Listening, Plan
from userspace_proxy.dataplane.settings import DataPlaneSettings


@dataclass(slots=True)
class Applied:
    """What has become of a plan so far. `bound` has the real addresses of all listeners that it opened."""

    bound: dict[Listening, ListenAddress] = field(default_factory=dict)
    failures: dict[ServicePortName, tuple[ListenFailed, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Notices:
    """What a data path tells while it runs. None of these may block; what one raises is logged and ends nothing.

    `dial_failed`: an endpoint could not be reached. `needs_pods`: a client waits at a service port that is idled; told
    once per wake-up.
    """

    dial_failed: Callable[[ServicePortName, Endpoint], None] = lambda name, endpoint: None
    needs_pods: Callable[[ServicePortName], None] = lambda name: None


Found = Mapping[ServicePortName, Mapping[ListenAddress, ListenAddress]]
"""The listeners of each service port: what was asked for, and where that really is."""


class DataPath(Protocol):
    """Carries out plans, counts, drains."""

    async def found(self) -> Found:
        """Return what is served already, on behalf of a former process. It is part of what plans begin with."""

    async def apply(self, plan: Plan, applied: Applied) -> None:
        """Carry out a plan and fill in `applied`. What cannot be listened on is reported; the rest is done.

        A service port is listened on at all of its new addresses or at none. Cancelled, the rest is done all the same
        before this returns, so that what runs is always what `applied` says. Plans must not overlap in time.
        """

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        """Use other time-outs and limits from now on."""

    async def counters(self) -> Counters:
        """Return a reading of all counters. Takes about 3 µs for each endpoint: for many, see `live_counters`."""

    async def live_counters(self) -> LiveCounters:
        """Return the counters for reading one service port after the other."""

    async def drain(self, timeout_s: float) -> None:
        """Stop listening at once, then wait for the open connections to end, at most `timeout_s` seconds."""

    def close(self) -> None:
        """Close all that is open, at once."""


MakeDataPath = Callable[[DataPlaneSettings, Callable[[], Balancer], Notices], DataPath]
"""Makes a data path. The second argument makes the balancer of each service port and address family."""
