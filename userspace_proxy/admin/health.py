"""The health server: /healthz for load balancers, /livez for the kubelet."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import Counter

from userspace_proxy.admin.server import RETRY_S, HttpServer, json_response, new_application
from userspace_proxy.core.health import HealthAnswer, ProxyHealth
from userspace_proxy.core.model import ListenAddress
from userspace_proxy.metrics import Metrics

EVENT_REASON = "FailedToStartProxierHealthcheck"

Clock = Callable[[], float]


def health_server(
    address: ListenAddress,
    health: ProxyHealth,
    metrics: Metrics,
    *,
    hard_fail: bool = False,
    advice: str = "",
    retry_s: float = RETRY_S,
) -> HttpServer:
    """Return the server of /healthz and /livez, to be run."""
    return HttpServer(
        "health server",
        address,
        health_application(health, metrics),
        event_reason=EVENT_REASON,
        hard_fail=hard_fail,
        advice=advice,
        retry_s=retry_s,
    )


def health_application(
    health: ProxyHealth, metrics: Metrics, *, clock: Clock = time.monotonic, wall_clock: Clock = time.time
) -> web.Application:
    """Return the application; `clock` is the one that `health` is told the time by."""
    counted = metrics.kube_proxy

    async def healthz(request: web.Request) -> web.Response:
        return _respond(health.healthz(now=clock(), wall_now=wall_clock()), counted.proxy_healthz_total)

    async def livez(request: web.Request) -> web.Response:
        return _respond(health.livez(now=clock(), wall_now=wall_clock()), counted.proxy_livez_total)

    app = new_application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/livez", livez)
    return app


def _respond(answer: HealthAnswer, counter: Counter) -> web.Response:
    counter.labels(str(answer.status)).inc()
    return json_response(answer.document, status=answer.status)
