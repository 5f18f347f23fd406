"""Requests to one API server: credentials, TLS, proxy, request rate, and errors in the words of this package.

The HTTP client is that of `kubernetes.aio`. Responses are handed out as they are: reading is for the caller.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration

from userspace_proxy.core.errors import ApiRefused, ApiUnreachable, CredentialsFailed
from userspace_proxy.sources.credentials import Credentials, Identity, credentials_for
from userspace_proxy.sources.kubeconfig import Access, Material
from userspace_proxy.sources.pace import RateLimit
from userspace_proxy.sources.proxy_url import proxy_for

JSON = "application/json"

_METHODS = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "update": "PUT", "patch": "PATCH"}
_CONNECT_TIMEOUT_S = 30.0
_READ_BUFFER = 1 << 20
_MOST_OF_AN_ERROR = 1 << 16

_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

_Fingerprint = tuple[object, ...]

OnAnswer = Callable[[str, str, int | None, float], None]


class Status(msgspec.Struct, frozen=True):
    """The API's own account of an error, as a body or inside a watch."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None


class ApiConnection:
    """An API server as one client sees it. Use it as a context manager.

    `answer_timeout_s` limits the wait for the beginning of an answer, in seconds. `on_answer` is told of each request:
    its method, the server, the status (None: no answer came) and how long the beginning of the answer took.
    """

    def __init__(
        self,
        access: Access,
        *,
        qps: float = 5.0,
        burst: int = 10,
        answer_timeout_s: float = 30.0,
        environ: Mapping[str, str] = os.environ,
        credentials: Credentials | None = None,
        on_answer: OnAnswer = lambda method, host, status, duration_s: None,
    ) -> None:
        self.access = access
        self._on_answer = on_answer
        self._answer_timeout_s = answer_timeout_s
        self._credentials = credentials or credentials_for(access)
        self._proxy = access.proxy_url or proxy_for(access.server, environ)
        self._limit = RateLimit(qps, burst)
        self._client: ApiClient | None = None
        self._retired: ApiClient | None = None
        self._fingerprint: _Fingerprint = ()
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections to the server."""
        clients, self._client, self._retired = (self._client, self._retired), None, None
        for client in clients:
            if client is not None:
                await client.close()  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def request(
        self,
        verb: str,
        resource: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        silence_s: float,
        body: object = None,
        accept: str = JSON,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to a request, with its status checked and its body still to be read.

        `silence_s` limits the time between two pieces of the body. `resource` names what is asked for, as RBAC does,
        for messages. `accept` is the form that the answer is to have. When the server does not accept our credentials,
        they are renewed and it is asked once more.
        Raises ApiRefused, ApiUnreachable and CredentialsFailed, also while the body is read.
        """
        url = f"{self.access.server}{path}" + (f"?{urlencode(query)}" if query else "")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=silence_s)
        identity = await self._credentials.current()
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._send(verb, url, identity, timeout, body, accept)
            if response.status == 401:
                renewed = await self._credentials.renewed(identity)
                if renewed != identity:
                    response.close()
                    response = await self._send(verb, url, renewed, timeout, body, accept)
            if response.status >= 300:
                raise await _refusal(verb, resource, response)
            yield response
        except aiohttp.ClientConnectorCertificateError as error:
            reason = f"its certificate is not accepted: {error.certificate_error}"
            raise ApiUnreachable(self.access.server, reason) from error
        except (aiohttp.SocketTimeoutError, TimeoutError) as error:
            raise ApiUnreachable(self.access.server, "no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiUnreachable(self.access.server, str(error) or type(error).__name__) from error
        finally:
            if response is not None:
                response.close()

    async def _send(
        self, verb: str, url: str, identity: Identity, timeout: aiohttp.ClientTimeout, body: object, accept: str
    ) -> aiohttp.ClientResponse:
        await self._limit.wait()
        client = await self._client_for(identity)
        headers = {"Accept": accept, "Accept-Encoding": "identity", "User-Agent": "userspace-proxy"}
        if identity.authorization:
            if not identity.authorization.isprintable():
                raise CredentialsFailed("the token or the password has characters that no header may have")
            headers["Authorization"] = identity.authorization
        method, began = _METHODS[verb], time.monotonic()
        status: int | None = None
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                answer = await client.call_api(method, url, headers, body, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            status = response.status
        finally:
            self._on_answer(method, urlsplit(self.access.server).netloc, status, time.monotonic() - began)
        _probe_while_silent(response)
        return response

    async def _client_for(self, identity: Identity) -> ApiClient:
        """Return the HTTP client; a new one when certificates have changed. What runs over the old one goes on."""
        async with self._lock:
            fingerprint = self._take_fingerprint(identity)
            if self._client is None or fingerprint != self._fingerprint:
                made = await asyncio.to_thread(_make_client, self.access, identity, self._proxy)
                if self._retired is not None:
                    await self._retired.close()  # type: ignore[no-untyped-call]
                self._client, self._retired, self._fingerprint = made, self._client, fingerprint
            return self._client

    def _take_fingerprint(self, identity: Identity) -> _Fingerprint:
        access = self.access
        materials = (access.certificate_authority, access.client_certificate, access.client_key)
        return (identity.certificate, identity.key, *map(_version_of, materials))


def _version_of(material: Material | None) -> object:
    """Return something that differs when the content of a file does."""
    if isinstance(material, Path):
        with suppress(OSError):
            facts = material.stat()
            return facts.st_mtime_ns, facts.st_size, facts.st_ino
    return None


def _make_client(access: Access, identity: Identity, proxy: str | None) -> ApiClient:
    """Return a client with certificates loaded. Raises CredentialsFailed."""
    configuration = Configuration(
        host=access.server,
        verify_ssl=not access.skip_tls_verify,
        tls_server_name=access.tls_server_name or None,
        proxy=proxy,
        # The proxy is already known, and a .netrc must never stand in for the kubeconfig's credentials.
        client_session_kwargs={"trust_env": False, "read_bufsize": _READ_BUFFER},
    )
    # Many cluster authorities lack extensions that Python 3.13 and later insist on; other clients do not.
    configuration.disable_strict_ssl_verification = True
    authority = access.certificate_authority
    if isinstance(authority, bytes):
        configuration.ca_cert_data = authority.decode(errors="replace")
    elif authority is not None and not access.skip_tls_verify:
        configuration.ssl_ca_cert = str(authority)
    certificate = identity.certificate or access.client_certificate
    key = identity.key or access.client_key
    with tempfile.TemporaryDirectory(prefix="userspace-proxy-") as folder:
        try:
            if certificate and key:
                configuration.cert_file = _as_file(certificate, Path(folder, "certificate"))
                configuration.key_file = _as_file(key, Path(folder, "key"))
            return ApiClient(configuration)
        except (OSError, ValueError) as error:
            files = [str(each) for each in (authority, certificate, key) if isinstance(each, Path)]
            raise CredentialsFailed(f"cannot use the certificates ({', '.join(files) or 'inline'}): {error}") from error


def _as_file(material: Material, path: Path) -> str:
    """Return a file that has the material: TLS libraries read certificates and keys from files only."""
    if isinstance(material, Path):
        return str(material)
    path.touch(mode=0o600)
    path.write_bytes(material)
    return str(path)


def _probe_while_silent(response: aiohttp.ClientResponse) -> None:
    """Let the kernel find out within a minute that the server's machine is gone: a watch may be silent for long."""
    transport = response.connection.transport if response.connection else None
    connected = transport.get_extra_info("socket") if transport else None
    if connected is not None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _refusal(verb: str, resource: str, response: aiohttp.ClientResponse) -> ApiRefused:
    body = await response.content.read(_MOST_OF_AN_ERROR)
    message = ""
    with suppress(msgspec.DecodeError):
        message = msgspec.json.decode(body, type=Status).message or ""
    if not message and not body.lstrip().startswith((b"{", b"<")):
        message = body.decode(errors="replace").strip()[:200]
    retry_after = response.headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
    return ApiRefused(verb, resource, response.status, message or response.reason or "", retry_after_s=retry_after_s)
