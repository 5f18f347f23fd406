"""Health checks of services with `externalTrafficPolicy: Local`: one small server per `healthCheckNodePort`.

They answer at every path, as kube-proxy's do: clouds probe different ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from userspace_proxy.admin.server import Site, json_response, new_application
from userspace_proxy.core.errors import ListenFailed
from userspace_proxy.core.health import ServiceHealthCheck, ServiceKey, service_health_answer
from userspace_proxy.core.model import ListenAddress

EVENT_REASON = "FailedToStartServiceHealthcheck"

_MOST_CONNECTIONS = 16

_log = logging.getLogger(__name__)

OnFailure = Callable[[ServiceKey, int, ListenFailed], None]
"""Told of a service, its port, and why its check cannot be served."""


class ServiceHealthServers:
    """The health checks that were last applied, at each of `addresses`.

    `is_proxy_healthy` is asked at each request. `on_failure` is told once of each port that cannot be listened on.
    """

    def __init__(
        self,
        is_proxy_healthy: Callable[[], bool],
        *,
        addresses: Sequence[str] = ("0.0.0.0",),
        on_failure: OnFailure = lambda key, port, failure: None,
    ) -> None:
        self._is_proxy_healthy = is_proxy_healthy
        self._addresses = addresses
        self._on_failure = on_failure
        self._checks: Mapping[ServiceKey, ServiceHealthCheck] = {}
        self._open: dict[ServiceKey, tuple[int, list[Site]]] = {}
        self._failed: dict[ServiceKey, int] = {}

    async def apply(self, checks: Mapping[ServiceKey, ServiceHealthCheck]) -> None:
        """Serve these checks and no others. Ports that cannot be listened on are tried again at the next call."""
        self._checks = dict(checks)
        for key, (port, sites) in list(self._open.items()):
            if key not in checks or checks[key].port != port:
                del self._open[key]
                await _stop(sites)
        self._failed = {key: port for key, port in self._failed.items() if key in checks and checks[key].port == port}
        for key, check in checks.items():
            if key not in self._open:
                await self._start(key, check.port)

    async def close(self) -> None:
        """Serve no checks."""
        await self.apply({})

    async def _start(self, key: ServiceKey, port: int) -> None:
        sites: list[Site] = []
        try:
            for address in self._addresses:
                sites.append(Site(self._application(key), most_connections=_MOST_CONNECTIONS))
                await sites[-1].start(ListenAddress(address, port))
        except ListenFailed as failure:
            await _stop(sites)
            if self._failed.get(key) != port:
                self._failed[key] = port
                _log.error("%s/%s: its health check cannot be served: %s", *key, failure)
                self._on_failure(key, port, failure)
            return
        self._failed.pop(key, None)
        self._open[key] = (port, sites)
        _log.info("%s/%s: health check on port %d", *key, port)

    def _application(self, key: ServiceKey) -> web.Application:
        async def check(request: web.Request) -> web.Response:
            known = self._checks.get(key)
            local_endpoints = known.local_endpoints if known else 0
            answer = service_health_answer(key, local_endpoints, is_proxy_healthy=self._is_proxy_healthy())
            response = json_response(answer.document, status=answer.status)
            response.headers["X-Load-Balancing-Endpoint-Weight"] = str(local_endpoints)
            return response

        app = new_application()
        app.router.add_get("/{path:.*}", check)
        return app


async def _stop(sites: list[Site]) -> None:
    for site in sites:
        await site.stop()
