"""The services of a cluster, or of plain files, on this machine: wires source, placement and proxy together."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from userspace_proxy.core.desired import DesiredState
from userspace_proxy.core.errors import ConfigError, ListenFailed, PortsRefused
from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.objects import Endpoints, EndpointSlice, KubernetesObject, Service
from userspace_proxy.core.placement import (
    HostPort,
    PortReference,
    place,
    select,
    unmatched,
    with_endpoints,
    with_services,
)
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.dataplane.sockets import bind_udp, listen_tcp
from userspace_proxy.garbage import keep_out_of_collections
from userspace_proxy.proxy import Proxy
from userspace_proxy.reconciler import Failures
from userspace_proxy.sources.hostnames import HostNames
from userspace_proxy.sources.static import StaticFiles

_PRIVILEGED_BELOW = 1024
_ABOVE_PRIVILEGED = 8000  # 80 becomes 8080, 443 becomes 8443
_AUTO_PORT_ATTEMPTS = 3
_MOVABLE = frozenset({"EADDRINUSE", "EACCES"})
"""Why an address cannot be listened on where another port of it may do."""

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What `userspace-proxy local` was asked for."""

    listen_addresses: tuple[str, ...] = ("127.0.0.1",)
    port_map: Mapping[PortReference, int] = field(default_factory=dict)
    services: Mapping[ServicePort, tuple[HostPort, ...]] = field(default_factory=dict)
    endpoints: Mapping[PortReference, tuple[HostPort, ...]] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    auto_ports: bool = False
    keep_going: bool = False
    drain_timeout_s: float = 5.0
    settings: DataPlaneSettings = field(default_factory=lambda: DataPlaneSettings(udp_idle_timeout_s=60.0))


class SnapshotSource(Protocol):
    """Where service ports come from."""

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the service ports as they are now, and again whenever they have changed. May raise ConfigError."""

    async def run(self) -> None:
        """Do what has to be done meanwhile."""

    def needs_pods(self, name: ServicePortName) -> None:
        """Ask for pods for an idled service port, as a client waits for them."""


class NoSource:
    """All that is served stands on the command line."""

    async def run(self) -> None:
        """Return at once."""

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield one snapshot without service ports."""
        yield Snapshot()

    def needs_pods(self, name: ServicePortName) -> None:
        """Do nothing: none of them is ever idled."""


class FileSource:
    """The services of manifests, which are read again when they change."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = StaticFiles(paths, stdin=io.FileIO(sys.stdin.fileno(), closefd=False) if sys.stdin else None)
        self._state = DesiredState(serve_without_cluster_ip=True, unidling=True)

    async def run(self) -> None:
        """Return at once."""

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the services as they are now, and again whenever they change. Raises ConfigError for the first reading.

        A later fault is logged, and the next snapshot is that of the mended files.
        """
        yield self._snapshot(await _in_abandonable_thread(self._files.read))
        async for objects in self._files.changes():
            if isinstance(objects, ConfigError):
                _log.error("%s; the services stay as they were", objects)
            else:
                yield self._snapshot(objects)

    def needs_pods(self, name: ServicePortName) -> None:
        """Say that a client waits: there is nobody else to tell."""
        _log.info("%s (%s): idled, and a client waits for the files to have endpoints", name, name.protocol)

    def _snapshot(self, objects: Sequence[KubernetesObject]) -> Snapshot:
        self._state.replace(Service, [each for each in objects if isinstance(each, Service)])
        self._state.replace(EndpointSlice, [each for each in objects if isinstance(each, EndpointSlice)])
        self._state.replace(Endpoints, [each for each in objects if isinstance(each, Endpoints)])
        snapshot = self._state.snapshot()
        for notice in self._state.take_notices():
            _log.warning("%s", notice)
        return snapshot


async def _in_abandonable_thread(function: Callable[[], Result]) -> Result:
    """Return what the function returns, or raise what it raises. Cancelled, do not wait for it.

    Nor does the end of the process, unlike with `asyncio.to_thread`: standard input and pipes may never end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[..., None], outcome: object) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            result = function()
        except Exception as error:
            outcome: tuple[Callable[..., None], object] = (done.set_exception, error)
        else:
            outcome = (done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return await done


@dataclass(frozen=True, slots=True)
class Row:
    """A service port as it is shown to people."""

    service_port: ServicePort
    addresses: tuple[ListenAddress, ...]
    failures: tuple[ListenFailed, ...] = ()


class LocalProxy:
    """Serves the snapshots of a source on this machine until it is cancelled."""

    def __init__(self, options: LocalOptions, source: SnapshotSource) -> None:
        self._options = options
        self._source = source
        given = [host for hosts in (*options.services.values(), *options.endpoints.values()) for host in hosts]
        self._names = HostNames(given)
        self._from_source = Snapshot()
        self._chosen_ports: dict[ServicePortName, int] = {}
        self._proxy = Proxy(
            options.settings,
            on_dial_failure=lambda name, endpoint: self._names.note_unreachable(endpoint),
            needs_pods=source.needs_pods,
            drain_timeout_s=options.drain_timeout_s,
        )

    async def run(self, on_started: Callable[[Sequence[Row]], None]) -> None:
        """Serve, and call `on_started` with what is served as soon as it is.

        Raises ConfigError when there is nothing to serve or an option fits nothing, and PortsRefused when there are
        ports that cannot be listened on, unless `keep_going`.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._source.run())
            await self._serve(on_started)

    async def _serve(self, on_started: Callable[[Sequence[Row]], None]) -> None:
        snapshots = self._source.snapshots()
        self._from_source = await anext(snapshots)
        await self._names.resolve()
        self._check(self._wanted())
        async with self._proxy:
            on_started(await self._start())
            keep_out_of_collections()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_source(snapshots))
                tasks.create_task(self._follow_names())

    async def _start(self) -> list[Row]:
        failures = await self._apply(quiet=True)
        if failures and not self._options.keep_going:
            raise PortsRefused(failures, self._suggestions(failures))
        return [
            Row(port, self._proxy.addresses(name), failures.get(name, ()))
            for name, port in self._wanted().service_ports.items()
        ]

    async def _follow_source(self, snapshots: AsyncIterator[Snapshot]) -> None:
        async for self._from_source in snapshots:
            await self._apply(quiet=False)

    async def _follow_names(self) -> None:
        while True:
            await self._names.changed()
            await self._apply(quiet=False)

    async def _apply(self, *, quiet: bool) -> Failures:
        """Serve what is wanted; with `auto_ports`, on other ports where those asked for cannot be had."""
        options = self._options
        for _ in range(_AUTO_PORT_ATTEMPTS if options.auto_ports else 1):
            snapshot = place(
                self._wanted(),
                listen_addresses=options.listen_addresses,
                port_map=options.port_map,
                chosen_ports=self._chosen_ports,
            )
            failures = await self._proxy.apply(snapshot, quiet=quiet)
            if not failures:
                break
            if options.auto_ports:
                self._chosen_ports.update(self._free_ports(failures))
        return failures

    def _wanted(self) -> Snapshot:
        options, names = self._options, self._names
        services = [replace(port, endpoints=names.endpoints(hosts)) for port, hosts in options.services.items()]
        snapshot = select(self._from_source, namespaces=options.namespaces, only=options.only)
        endpoints = {reference: names.endpoints(hosts) for reference, hosts in options.endpoints.items()}
        return with_endpoints(with_services(snapshot, services), endpoints)

    def _check(self, snapshot: Snapshot) -> None:
        for flag, references in (("--port-map", self._options.port_map), ("--endpoints", self._options.endpoints)):
            for reference, reason in unmatched(snapshot, references):
                raise ConfigError(reason, where=flag, subject=str(reference))
        names = self._from_source.service_ports
        for service in self._options.only:
            if not any(name.service_name == service for name in names):
                raise ConfigError("there is no such service that could be proxied", where="--only", subject=service)
        if not snapshot.service_ports:
            where = f" in {', '.join(self._options.namespaces)}" if self._options.namespaces else ""
            raise ConfigError(f"there is nothing to serve: no Service that could be proxied was found{where}")

    def _free_ports(self, failures: Failures) -> dict[ServicePortName, int]:
        """Return a free local port for each service port that failed, as easy to remember as possible.

        None for one whose address is at fault, whatever the port.
        """
        wanted = self._wanted().service_ports
        taken = {(name.protocol, port.port) for name, port in wanted.items()}
        taken |= {(name.protocol, port) for name, port in self._chosen_ports.items()}
        found: dict[ServicePortName, int] = {}
        for name, of_port in failures.items():
            if any(failure.errno_name not in _MOVABLE for failure in of_port):
                continue
            first = wanted[name].port + (_ABOVE_PRIVILEGED if wanted[name].port < _PRIVILEGED_BELOW else 1)
            for port in (*range(first, 65536), *range(_PRIVILEGED_BELOW, first)):
                if (name.protocol, port) not in taken and self._is_free(name.protocol, port):
                    found[name] = port
                    taken.add((name.protocol, port))
                    break
        return found

    def _suggestions(self, failures: Failures) -> list[str]:
        """Return the `--port-map` values that would have helped."""
        wanted = self._wanted().service_ports
        return [f"{PortReference.to(wanted[name])}={port}" for name, port in self._free_ports(failures).items()]

    def _is_free(self, protocol: L4Protocol, port: int) -> bool:
        try:
            for address in self._options.listen_addresses:
                listen = listen_tcp if protocol is L4Protocol.TCP else bind_udp
                listen(ListenAddress(address, port)).close()
        except ListenFailed:
            return False
        return True
