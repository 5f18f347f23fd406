"""HTTP servers beside the data path: they bind when they can, and take little of it whoever asks.

A server has few connections at a time: when one too many comes, the oldest one ends. So nobody who opens many can take
the descriptors of the data path, or keep a probe out.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from userspace_proxy.core.errors import ListenFailed, ServerFailed
from userspace_proxy.core.model import WILDCARDS, ListenAddress
from userspace_proxy.dataplane.sockets import SOCKET_FAMILY, bound_address, listen_failed

RETRY_S = 5.0
"""Source: kube-proxy."""

MOST_CONNECTIONS = 64

_BACKLOG = 128
_SHUTDOWN_S = 0.5
_IDLE_S = 90.0  # longer than the interval of most scrapes
_LINGER_S = 1.0
_LARGEST_BODY = 1024
_REMIND_EVERY = 12  # attempts to bind: once a minute
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})

_log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")


class Site:
    """One application on one address, from `start` to `stop`."""

    def __init__(self, app: web.Application, *, most_connections: int = MOST_CONNECTIONS) -> None:
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=_IDLE_S,
            lingering_time=_LINGER_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._most_connections = most_connections
        self._listener: asyncio.Server | None = None

    async def start(self, address: ListenAddress) -> ListenAddress:
        """Listen, and return where, with the real port. Raises ListenFailed, after which it may be tried again."""
        sock = listen(address)
        bound = bound_address(sock, address)
        if self._runner.server is None:
            await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(self._new_connection, sock=sock)
        return bound

    async def stop(self) -> None:
        """Stop listening and end all connections; requests under way get half a second."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _new_connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        connections = server.connections
        if len(connections) >= self._most_connections:
            connections[0].force_close()
        return server()


class HttpServer:
    """Keeps an application served while `run` runs. `title` names it in the log.

    `bound` says where, once it is. While the address is taken it is tried each `retry_s` seconds; with `hard_fail` the
    first failure is final, and `event_reason` is what the cluster should be told. `advice` is what the operator can do.
    """

    def __init__(
        self,
        title: str,
        address: ListenAddress,
        app: web.Application,
        *,
        event_reason: str,
        hard_fail: bool = False,
        advice: str = "",
        retry_s: float = RETRY_S,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.bound: ListenAddress | None = None
        self._title = title
        self._address = address
        self._site = Site(app, most_connections=most_connections)
        self._event_reason = event_reason
        self._hard_fail = hard_fail
        self._advice = f" ({advice})" if advice else ""
        self._retry_s = retry_s
        self._has_bound = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled. Raises ServerFailed with `hard_fail`."""
        try:
            self.bound = await self._bind()
            self._has_bound.set()
            _log.info("%s: listening on %s", self._title, self.bound)
            await asyncio.get_running_loop().create_future()
        finally:
            await self._site.stop()

    async def until_bound(self) -> ListenAddress:
        """Return where it listens, as soon as it does."""
        await self._has_bound.wait()
        assert self.bound is not None
        return self.bound

    async def _bind(self) -> ListenAddress:
        attempts = 0
        while True:
            try:
                return await self._site.start(self._address)
            except ListenFailed as failure:
                if self._hard_fail:
                    raise ServerFailed(self._title, self._event_reason, failure) from failure
                if attempts % _REMIND_EVERY == 0:
                    _log.error("%s: %s; trying again each %g s%s", self._title, failure, self._retry_s, self._advice)
            attempts += 1
            await asyncio.sleep(self._retry_s)


def new_application() -> web.Application:
    """Return an application whose answers are taken for nothing else than they say, and tell nothing of the program."""
    app = web.Application(client_max_size=_LARGEST_BODY)
    app.on_response_prepare.append(_set_headers)
    return app


def json_response(document: Mapping[str, object], *, status: int = 200) -> web.Response:
    """Return a JSON document with the very content type that Go's servers give it."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, content_type="application/json")


def listen(address: ListenAddress) -> socket.socket:
    """Return a listening socket. A wildcard address has both families, as in Go. Raises ListenFailed."""
    if address.address in WILDCARDS:
        try:
            return _listen(socket.AF_INET6, ListenAddress("::", address.port), dual_stack=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise listen_failed(address, error) from error
            address = ListenAddress("0.0.0.0", address.port)
    try:
        return _listen(SOCKET_FAMILY[address.family], address, dual_stack=False)
    except OSError as error:
        raise listen_failed(address, error) from error


def _listen(family: socket.AddressFamily, address: ListenAddress, *, dual_stack: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
        sock.bind((address.address, address.port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.pop("Server", None)


class _OnlyOurFaults(logging.Filter):
    """Keeps what is no HTTP from filling the log: anyone may send it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        _log.debug("a request was refused: %s", error)
        return False


_http_log.addFilter(_OnlyOurFaults())
