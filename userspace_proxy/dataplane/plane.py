"""The data path in this process: carries out plans, reports counters, drains."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

from userspace_proxy.core.balancer import Balancer
from userspace_proxy.core.counters import Counters, LiveCounters, add_up
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePort, ServicePortName
from userspace_proxy.core.plan import Listening, Plan
from userspace_proxy.dataplane.backends import Backends
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.interface import Applied, Found, Notices
from userspace_proxy.dataplane.listener import TcpListener
from userspace_proxy.dataplane.opening import Opened, OpenSockets, by_name, open_sockets
from userspace_proxy.dataplane.past import Past
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.dataplane.udp import Sessions, UdpListener

_STEPS_PER_TURN = 64
_DRAIN_POLL_S = 0.02
_MAX_SESSIONS = 10_000


class DataPlane:
    """Listeners, connections and sessions in this process: a `DataPath`. Use it from the thread of its event loop.

    `open_sockets` gives the sockets to listen on, where this process does not bind them itself.
    """

    def __init__(
        self,
        settings: DataPlaneSettings,
        *,
        make_balancer: Callable[[], Balancer],
        notices: Notices = Notices(),  # noqa: B008  # it is frozen
        open_sockets: OpenSockets | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._engine = Engine(loop, settings, notices)
        self._sessions = Sessions(
            loop, idle_timeout_s=settings.udp_idle_timeout_s, capacity=settings.max_sessions or default_max_sessions()
        )
        self._make_balancer = make_balancer
        self._open_sockets = open_sockets or self._bind
        self._backends: dict[ServicePortName, Backends] = {}
        self._past = Past()
        self._listeners: dict[Listening, TcpListener | UdpListener] = {}
        self._bound: dict[Listening, ListenAddress] = {}

    async def found(self) -> Found:
        """Return nothing: all that this serves was asked of it."""
        return {}

    async def apply(self, plan: Plan, applied: Applied) -> None:
        """Carry out a plan and fill in `applied`. Lets other work of the loop go on between service ports."""
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
        for name, addresses in by_name(plan.open):
            opened, refused = self._open_sockets(name, addresses)
            for address, sock in opened.items():
                applied.bound[name, address] = self._listen(name, address, sock)
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
        for listener in self._listeners.values():
            if isinstance(listener, TcpListener):
                listener.reconfigure()
        self._sessions.reconfigure(
            idle_timeout_s=settings.udp_idle_timeout_s, capacity=settings.max_sessions or default_max_sessions()
        )

    async def counters(self) -> Counters:
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
            limits=self._engine.limits(),
            waking=self._engine.waiting.counters(),
        )

    async def live_counters(self) -> LiveCounters:
        """Return the counters for reading one service port after the other."""
        return LiveCounters(
            service_ports=tuple(self._backends.values()),
            gone=self._past.total(),
            open_connections=len(self._engine.relay),
            open_sessions=len(self._sessions),
            accept_errors=self._engine.accept_error_count,
            dropped_datagrams=self._engine.dropped_datagrams,
            evicted_sessions=self._sessions.evicted,
            limits=self._engine.limits(),
            waking=self._engine.waiting.counters(),
        )

    async def drain(self, timeout_s: float) -> None:
        """Stop listening at once, then wait for the open connections to end, at most `timeout_s` seconds.

        Clients that wait for endpoints are sent away at once: none will come.
        """
        self._engine.waiting.close()
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

    def names(self) -> tuple[ServicePortName, ...]:
        """Return the service ports that there are."""
        return tuple(self._backends)

    def waited_at(self) -> list[ServicePortName]:
        """Return the idled service ports at which clients wait for pods."""
        return self._engine.waiting.waited_at()

    def listeners(self) -> Mapping[Listening, TcpListener | UdpListener]:
        """Return the listeners by what was asked for."""
        return self._listeners

    def _bind(
        self, name: ServicePortName, addresses: Iterable[ListenAddress]
    ) -> tuple[Opened, tuple[ListenFailed, ...]]:
        return open_sockets(name, addresses, proxy_ports=self._engine.settings.proxy_ports, bound=self._bound)

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
        self._engine.waiting.update(service_port)

    def _listen(self, name: ServicePortName, asked: ListenAddress, sock: socket.socket) -> ListenAddress:
        """Serve the clients of a socket that is bound. Return where that is."""
        backends = self._backends[name]
        listener: TcpListener | UdpListener
        if name.protocol is L4Protocol.TCP:
            listener = TcpListener(self._engine, backends, asked, sock)
        else:
            listener = UdpListener(self._engine, self._sessions, backends, asked, sock)
        self._listeners[name, asked] = listener
        self._bound[name, asked] = listener.address
        return listener.address

    def _close(self, listening: Listening) -> None:
        listener = self._listeners.pop(listening, None)
        self._bound.pop(listening, None)
        if listener is not None:
            listener.close()


def default_max_sessions() -> int:
    """Return min(10,000, a quarter of RLIMIT_NOFILE): each session costs a descriptor and a port."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_SESSIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_SESSIONS, soft // 4))
