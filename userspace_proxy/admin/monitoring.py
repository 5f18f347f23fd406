"""The metrics server: what this proxy counts, how it is configured, and what it is doing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from userspace_proxy.admin.profiling import add_profiling
from userspace_proxy.admin.scrape import Scrape
from userspace_proxy.admin.server import RETRY_S, HttpServer, json_response, new_application
from userspace_proxy.core.model import ListenAddress
from userspace_proxy.metrics import Metrics

EVENT_REASON = "FailedToStartMetricServer"
CONFIG_NAME = "kubeproxy.config.k8s.io"

_SECRET_KEY = re.compile(r"token|password|secret|credential|private|-data$", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")

ConfigReader = Callable[[], Mapping[str, object]]
"""Returns the configuration in force, as the file has it."""

VerbositySetter = Callable[[int], None]


def metrics_server(
    address: ListenAddress,
    metrics: Metrics,
    read_config: ConfigReader,
    *,
    set_verbosity: VerbositySetter | None = None,
    hard_fail: bool = False,
    advice: str = "",
    retry_s: float = RETRY_S,
) -> HttpServer:
    """Return the server of /metrics and all that goes with it, to be run. Given `set_verbosity`, it can profile."""
    return HttpServer(
        "metrics server",
        address,
        metrics_application(metrics, read_config, set_verbosity=set_verbosity),
        event_reason=EVENT_REASON,
        hard_fail=hard_fail,
        advice=advice,
        retry_s=retry_s,
    )


def metrics_application(
    metrics: Metrics, read_config: ConfigReader, *, set_verbosity: VerbositySetter | None = None
) -> web.Application:
    async def healthz(request: web.Request) -> web.Response:
        metrics.health_checks.succeeded("ping", "healthz")
        return web.Response(text="[+]ping ok\nhealthz check passed\n" if "verbose" in request.query else "ok")

    async def proxy_mode(request: web.Request) -> web.Response:
        return web.Response(text="userspace")

    async def configz(request: web.Request) -> web.Response:
        return json_response({CONFIG_NAME: without_secrets(read_config())})

    app = new_application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/healthz/ping", healthz)
    app.router.add_get("/proxyMode", proxy_mode)
    app.router.add_get("/configz", configz)
    app.router.add_get("/metrics", Scrape(metrics.scrape).answer)
    app.router.add_get("/metrics/slis", Scrape(metrics.scrape_slis).answer)
    if set_verbosity is not None:
        add_profiling(app, set_verbosity)
    return app


def without_secrets(value: object) -> object:
    """Return a document with everything hidden that might let its reader in somewhere."""
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if item and _SECRET_KEY.search(str(key)) else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return _USER_IN_URL.sub("(hidden)@", value)
    if isinstance(value, Sequence):
        return [without_secrets(item) for item in value]
    return value
