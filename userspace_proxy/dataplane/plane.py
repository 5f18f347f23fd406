"""The data path in this process: carries out plans, reports counters, drains."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

from userspace_proxy.core.balancer import Balancer, RoundRobin
from userspace_proxy.core.counters import Counters, LiveCounters, add_up
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePort, ServicePortName
from userspace_proxy.core.plan import Listening, Plan
from userspace_proxy.dataplane.backends import Backends, Origin
from userspace_proxy.dataplane.dial import Dial
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.interface import Applied, Found, Notices
from userspace_proxy.dataplane.listener import TcpListener
from userspace_proxy.dataplane.opening import Opened, OpenSockets, by_name, open_sockets
from userspace_proxy.dataplane.past import Past
from userspace_proxy.dataplane.remote_datagrams import RemoteListener
from userspace_proxy.dataplane.settings import DataPlaneSettings, default_max_sessions
from userspace_proxy.dataplane.udp import Sessions, UdpListener
from userspace_proxy.dataplane.workers import CountersT, Workers

_STEPS_PER_TURN = 64
_DRAIN_POLL_S = 0.02


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
        self._workers = Workers(self._engine, settings.workers) if settings.workers > 1 else None
        self._serve = self._workers.serve if self._workers is not None else self._dial
        # A balancer of the user's own cannot cross to another process, and datagrams are balanced where they arrive.
        self._datagrams = self._workers.datagrams if self._workers and make_balancer is RoundRobin else None
        self._make_balancer = make_balancer
        self._open_sockets = open_sockets or self._bind
        self._backends: dict[ServicePortName, Backends] = {}
        self._past = Past()
        self._listeners: dict[Listening, TcpListener | UdpListener | RemoteListener] = {}
        self._bound: dict[Listening, ListenAddress] = {}

    async def found(self) -> Found:
        """Return nothing: all that this serves was asked of it."""
        return {}

    async def apply(self, plan: Plan, applied: Applied) -> None:
        """Carry out a plan and fill in `applied`. Lets other work of the loop go on between service ports."""
        steps = self._carry_out(plan, applied)
        try:
            for listening in plan.release:
                self._close(listening)
            await self._settle_datagrams()
            for number, _ in enumerate(steps):
                if number % _STEPS_PER_TURN == _STEPS_PER_TURN - 1:
                    await asyncio.sleep(0)
            await self._settle_datagrams()
        finally:
            for _ in steps:
                pass

    def _carry_out(self, plan: Plan, applied: Applied) -> Iterator[None]:
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
            if self._datagrams is not None:
                self._datagrams.forget(name)

    def _dial(self, backends: Backends, origin: Origin, client_fd: int, client: str) -> None:
        """Send an accepted client on its way in this process."""
        Dial(self._engine, backends, origin, client_fd, client).start()

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        """Use other time-outs and limits from now on."""
        self._engine.reconfigure(settings)
        if self._workers is not None:
            self._workers.reconfigure()
        for listener in self._listeners.values():
            if isinstance(listener, TcpListener):
                listener.reconfigure()
        self._sessions.reconfigure(
            idle_timeout_s=settings.udp_idle_timeout_s, capacity=settings.max_sessions or default_max_sessions()
        )

    async def counters(self) -> Counters:
        """Return a reading of all counters. Takes about 3 µs for each endpoint: for many, see `live_counters`."""
        await self._settle()
        service_ports = {name: backends.total() for name, backends in self._backends.items()}
        return self._with_workers(
            Counters(
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
        )

    async def live_counters(self) -> LiveCounters:
        """Return the counters for reading one service port after the other."""
        await self._settle()
        return self._with_workers(
            LiveCounters(
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
        )

    async def drain(self, timeout_s: float) -> None:
        """Stop listening at once, then wait for the open connections to end, at most `timeout_s` seconds.

        Clients that wait for endpoints are sent away at once: none will come.
        """
        self._engine.waiting.close()
        for listening in list(self._listeners):
            self._close(listening)
        give_up_at = self._engine.loop.time() + timeout_s
        while len(self._engine.relay) or self._engine.dials or (self._workers is not None and self._workers.clients):
            if self._engine.loop.time() >= give_up_at:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _settle_datagrams(self) -> None:
        if self._workers is not None:
            await self._workers.settle_datagrams()

    async def _settle(self) -> None:
        if self._workers is not None:
            await self._workers.settle()

    def _with_workers(self, counters: CountersT) -> CountersT:
        return counters if self._workers is None else self._workers.with_workers(counters)

    def close(self) -> None:
        """Close all that is open, at once."""
        for listening in list(self._listeners):
            self._close(listening)
        self._sessions.end_all()
        if self._workers is not None:
            self._workers.close()
        self._engine.close()

    def names(self) -> tuple[ServicePortName, ...]:
        """Return the service ports that there are."""
        return tuple(self._backends)

    def waited_at(self) -> list[ServicePortName]:
        """Return the idled service ports at which clients wait for pods."""
        return self._engine.waiting.waited_at()

    def listeners(self) -> Mapping[Listening, TcpListener | UdpListener | RemoteListener]:
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
        if self._datagrams is not None and name.protocol is L4Protocol.UDP:
            self._datagrams.update(service_port, backends)
        for address in service_port.listen:
            listener = self._listeners.get((name, address))
            if isinstance(listener, UdpListener):
                listener.end_sessions_of_removed_endpoints()
        self._engine.waiting.update(service_port)

    def _listen(self, name: ServicePortName, asked: ListenAddress, sock: socket.socket) -> ListenAddress:
        """Serve the clients of a socket that is bound. Return where that is."""
        backends = self._backends[name]
        listener: TcpListener | UdpListener | RemoteListener
        if name.protocol is L4Protocol.TCP:
            listener = TcpListener(self._engine, self._serve, backends, asked, sock)
        elif self._datagrams is not None:
            listener = self._datagrams.listen(name, asked, sock)
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
