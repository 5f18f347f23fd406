"""Snapshot -> plan -> data path: brings what runs to what is wanted, and keeps trying what could not be done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.plan import Listening, Plan, diff
from userspace_proxy.dataplane.interface import Applied, DataPath, Found

EndpointFilter = Callable[[ServicePortName, Endpoint], bool]
"""Tells whether an endpoint may be used."""

Redirect = Callable[[Snapshot, Mapping[Listening, ListenAddress]], Awaitable[None]]
"""Leads traffic to the listeners, which are given with their real ports. Called once all that is wanted listens, and
before anything that is not is closed. Must not raise."""

Failures = Mapping[ServicePortName, tuple[ListenFailed, ...]]

OnFailures = Callable[[Failures], None]
"""Told of all that cannot be listened on, whenever something was tried."""

_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Reconciler:
    """Holds the snapshot that runs and the one that is wanted.

    What `found` says is served already: listeners that are still wanted stay, the others go when something is applied.
    """

    def __init__(
        self,
        data_path: DataPath,
        endpoint_filter: EndpointFilter | None = None,
        redirect: Redirect | None = None,
        on_failures: OnFailures = lambda failures: None,
        *,
        found: Found = MappingProxyType({}),
    ) -> None:
        self._data_path = data_path
        self._endpoint_filter = endpoint_filter
        self._redirect = redirect
        self._on_failures = on_failures
        self._running = Snapshot.of(*(ServicePort(name, 0, listen=tuple(asked)) for name, asked in found.items()))
        self._desired = Snapshot()
        self._bound: dict[Listening, ListenAddress] = {
            (name, asked): bound for name, listeners in found.items() for asked, bound in listeners.items()
        }
        self._failures: dict[ServicePortName, tuple[ListenFailed, ...]] = {}
        self._lock = asyncio.Lock()
        self._has_stopped = False

    def addresses(self, name: ServicePortName) -> tuple[ListenAddress, ...]:
        """Return where the data path listens for a service port, with real port numbers, in the order asked for."""
        service_port = self._running.service_ports.get(name)
        return tuple(self._bound[name, address] for address in service_port.listen) if service_port else ()

    async def apply(self, desired: Snapshot, *, quiet: bool = False) -> Failures:
        """Bring the data path to `desired`. Return the service ports that could not be listened on, and why.

        Those are tried again by `retry_forever`. `quiet` leaves it to the caller to tell people. When the endpoint
        filter raises, nothing is changed. Raises RuntimeError after `stop`.
        """
        desired = self._filtered(desired)
        async with self._lock:
            if self._has_stopped:
                raise RuntimeError("the proxy was left, so nothing can be applied any more")
            self._desired = desired
            await self._reconcile(quiet=quiet)
            return dict(self._failures)

    async def retry_forever(self) -> None:
        """Try each second what failed before, until cancelled."""
        while True:
            await asyncio.sleep(_RETRY_S)
            async with self._lock:
                if not self._failures:
                    continue
                try:
                    await self._reconcile(quiet=False)
                except Exception:
                    _log.exception("what had failed before has failed otherwise now; trying again")

    async def stop(self) -> None:
        """Wait until what is being applied stands, and let nothing more be applied."""
        self._has_stopped = True
        async with self._lock:
            pass

    async def _reconcile(self, *, quiet: bool) -> None:
        plan = diff(self._running, self._desired)
        applied = Applied()
        try:
            await self._data_path.apply(plan.making, applied)
            if self._redirect is not None:
                await self._redirect(self._desired, MappingProxyType({**self._bound, **applied.bound}))
        finally:  # also when it was cancelled: then the plan is carried out all the same
            await self._data_path.apply(plan.breaking, applied)
            self._note(plan, applied, quiet=quiet)

    def _note(self, plan: Plan, applied: Applied, *, quiet: bool) -> None:
        """Record what runs now. A service port that failed keeps only the listeners that it had and still wants."""
        for listening in (*plan.release, *plan.close):
            self._bound.pop(listening, None)
        self._bound.update(applied.bound)
        before, self._running = self._running, self._desired
        if applied.failures:
            running = dict(self._desired.service_ports)
            for name in applied.failures:
                kept = tuple(address for address in running[name].listen if (name, address) in self._bound)
                running[name] = replace(running[name], listen=kept)
            self._running = Snapshot(MappingProxyType(running))
        known, self._failures = self._failures, dict(applied.failures)
        if not quiet:
            self._log_changes(plan, before, known)
        self._on_failures(MappingProxyType(self._failures))

    def _log_changes(self, plan: Plan, before: Snapshot, known: Failures) -> None:
        for name, failures in self._failures.items():
            if [str(failure) for failure in failures] != [str(failure) for failure in known.get(name, ())]:
                _log.error("%s (%s): %s; trying again", name, name.protocol, "; ".join(map(str, failures)))
        for service_port in plan.update:
            name = service_port.name
            if name not in self._failures and (name in known or before.service_ports.get(name) != service_port):
                _log.info("%s (%s): %s", name, name.protocol, self._describe(service_port))
        for name in plan.remove:
            _log.info("%s (%s): no longer served", name, name.protocol)

    def _describe(self, service_port: ServicePort) -> str:
        addresses = [str(self._bound[service_port.name, address]) for address in service_port.listen]
        endpoints = [str(endpoint) for endpoint in service_port.endpoints]
        none = "waits for pods" if service_port.is_idled else "no endpoints"
        return f"{', '.join(addresses) or 'not listening'} -> {', '.join(endpoints) or none}"

    def _filtered(self, snapshot: Snapshot) -> Snapshot:
        allows = self._endpoint_filter
        if allows is None:
            return snapshot

        def allowed(name: ServicePortName, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
            return tuple(endpoint for endpoint in endpoints if allows(name, endpoint))

        service_ports = {}
        for name, port in snapshot.service_ports.items():
            external = port.external_endpoints
            service_ports[name] = replace(
                port,
                endpoints=allowed(name, port.endpoints),
                external_endpoints=None if external is None else allowed(name, external),
            )
        return Snapshot(MappingProxyType(service_ports))
