"""The data path as the reconciler sees it: carries out plans, reports counters, drains."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from userspace_proxy.core.balancer import Balancer
from userspace_proxy.core.counters import Counters, LiveCounters, add_up
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePort, ServicePortName
from userspace_proxy.core.plan import Listening, Plan
from userspace_proxy.dataplane.backends import Backends
from userspace_proxy.dataplane.engine import Engine, OnDialFailure
from userspace_proxy.dataplane.listener import TcpListener
from userspace_proxy.dataplane.past import Past
from userspace_proxy.dataplane.ports import bind
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.dataplane.udp import Sessions, UdpListener

_STEPS_PER_TURN = 64
_DRAIN_POLL_S = 0.02
_MAX_SESSIONS = 10_000


@dataclass(slots=True)
class Applied:
    """What has become of a plan so far. `bound` has the real addresses of all listeners that it opened."""

    bound: dict[Listening, ListenAddress] = field(default_factory=dict)
    failures: dict[ServicePortName, tuple[ListenFailed, ...]] = field(default_factory=dict)


class DataPlane:
    """Listeners, connections and sessions in this process. Use it from the thread of its event loop."""

    def __init__(
        self,
        settings: DataPlaneSettings,
        *,
        make_balancer: Callable[[], Balancer],
        on_dial_failure: OnDialFailure = lambda name, endpoint: None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._engine = Engine(loop, settings, on_dial_failure)
        self._sessions = Sessions(
            loop, idle_timeout_s=settings.udp_idle_timeout_s, capacity=settings.max_sessions or default_max_sessions()
        )
        self._make_balancer = make_balancer
        self._backends: dict[ServicePortName, Backends] = {}
        self._past = Past()
        self._listeners: dict[Listening, TcpListener | UdpListener] = {}

    async def apply(self, plan: Plan, applied: Applied) -> None:
        """Carry out a plan and fill in `applied`. What cannot be listened on is reported; the rest is done.

        A service port is listened on at all of its new addresses or at none. Lets other work of the loop go on between
        service ports. Cancelled, it does the rest in one go first, so that what runs is always what `applied` says.
        Plans must not overlap in time.
        """
        steps = self._carry_out(plan, applied)
        try:
            for number, _ in enumerate(steps):
                if number % _STEPS_PER_TURN == _STEPS_PER_TURN - 1:
                    await asyncio.sleep(0)
        finally:
            for _ in steps:
                pass

    def _carry_out(self, plan: Plan, applied: Applied) -> Iterator[None]:
        for listening in plan.release:
            self._close(listening)
        for service_port in plan.update:
            self._update(service_port)
            yield
        for name, addresses in _by_name(plan.open).items():
            opened, refused = self._open(name, addresses)
            applied.bound.update(opened)
            if refused:
                applied.failures[name] = refused
            yield
        for listening in plan.close:
            self._close(listening)
            yield
        for name in plan.remove:
            self._backends.pop(name).hand_over(self._past)
            self._engine.forget(name)

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        """Use other time-outs and limits from now on."""
        self._engine.reconfigure(settings)
        self._sessions.reconfigure(
            idle_timeout_s=settings.udp_idle_timeout_s, capacity=settings.max_sessions or default_max_sessions()
        )

    def counters(self) -> Counters:
        """Return a reading of all counters. Takes about 3 µs for each endpoint: for many, see `live_counters`."""
        service_ports = {name: backends.total() for name, backends in self._backends.items()}
        return Counters(
            endpoints={name: backends.counters() for name, backends in self._backends.items()},
            service_ports=service_ports,
            total=add_up((self._past.total(), *service_ports.values())),
            open_connections=len(self._engine.relay),
            open_sessions=len(self._sessions),
            accept_errors=self._engine.accept_error_count,
            dropped_datagrams=self._engine.dropped_datagrams,
            evicted_sessions=self._sessions.evicted,
        )

    def live_counters(self) -> LiveCounters:
        """Return the counters for reading one service port after the other."""
        return LiveCounters(
            service_ports=tuple(self._backends.values()),
            gone=self._past.total(),
            open_connections=len(self._engine.relay),
            open_sessions=len(self._sessions),
            accept_errors=self._engine.accept_error_count,
            dropped_datagrams=self._engine.dropped_datagrams,
            evicted_sessions=self._sessions.evicted,
        )

    async def drain(self, timeout_s: float) -> None:
        """Stop listening at once, then wait for the open connections to end, at most `timeout_s` seconds."""
        for listening in list(self._listeners):
            self._close(listening)
        give_up_at = self._engine.loop.time() + timeout_s
        while len(self._engine.relay) or self._engine.dials:
            if self._engine.loop.time() >= give_up_at:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    def close(self) -> None:
        """Close all that is open, at once."""
        for listening in list(self._listeners):
            self._close(listening)
        self._sessions.end_all()
        self._engine.close()

    def _update(self, service_port: ServicePort) -> None:
        name = service_port.name
        backends = self._backends.get(name)
        if backends is None:
            backends = Backends(name, self._make_balancer, cross_family=self._engine.settings.cross_family)
            self._backends[name] = backends
        backends.update(service_port)
        for address in service_port.listen:
            listener = self._listeners.get((name, address))
            if isinstance(listener, UdpListener):
                listener.end_sessions_of_removed_endpoints()

    def _open(
        self, name: ServicePortName, addresses: Iterable[ListenAddress]
    ) -> tuple[dict[Listening, ListenAddress], tuple[ListenFailed, ...]]:
        """Listen at all of the addresses or at none; held ones are added, each for itself."""
        addresses = list(addresses)
        opened, refused = self._open_each(name, [address for address in addresses if not address.is_held])
        if refused:
            for listening in opened:
                self._close(listening)
            return {}, tuple(refused)
        held, refused = self._open_each(name, [address for address in addresses if address.is_held])
        return {**opened, **held}, tuple(refused)

    def _open_each(
        self, name: ServicePortName, addresses: Iterable[ListenAddress]
    ) -> tuple[dict[Listening, ListenAddress], list[ListenFailed]]:
        opened: dict[Listening, ListenAddress] = {}
        refused: list[ListenFailed] = []
        for address in addresses:
            try:
                listener = self._listen(name, address)
            except ListenFailed as error:
                in_use = error.errno_name == "EADDRINUSE"
                refused.append(self._name_the_owner(name, address, error) if in_use else error)
            else:
                self._listeners[name, address] = listener
                opened[name, address] = listener.address
        return opened, refused

    def _listen(self, name: ServicePortName, address: ListenAddress) -> TcpListener | UdpListener:
        sock = bind(address, name.protocol, self._engine.settings.proxy_ports)
        backends = self._backends[name]
        if name.protocol is L4Protocol.TCP:
            return TcpListener(self._engine, backends, address, sock)
        return UdpListener(self._engine, self._sessions, backends, address, sock)

    def _name_the_owner(self, name: ServicePortName, address: ListenAddress, error: ListenFailed) -> ListenFailed:
        """Return an error that names the other service port, where it is one of ours that has the address."""
        for (owner, _), listener in self._listeners.items():
            if owner.protocol is name.protocol and listener.address.excludes(address):
                return ListenFailed(str(address), f"in use by {owner}", error.errno_name)
        return error

    def _close(self, listening: Listening) -> None:
        listener = self._listeners.pop(listening, None)
        if listener is not None:
            listener.close()


def default_max_sessions() -> int:
    """Return min(10,000, a quarter of RLIMIT_NOFILE): each session costs a descriptor and a port."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_SESSIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_SESSIONS, soft // 4))


def _by_name(listenings: Iterable[Listening]) -> dict[ServicePortName, list[ListenAddress]]:
    grouped: dict[ServicePortName, list[ListenAddress]] = {}
    for name, address in listenings:
        grouped.setdefault(name, []).append(address)
    return grouped
