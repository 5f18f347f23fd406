"""Who we are to the API server: tokens, token files that rotate, and credential plugins that are run again in time."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

import msgspec

from userspace_proxy.core.errors import CredentialsFailed
from userspace_proxy.sources.kubeconfig import Access, ExecEntry, Material

PLUGIN_TIMEOUT_S = 60.0
_MARGIN_S = 60.0
_MARGIN_PART = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request shows: the value of the header `Authorization`, and a client certificate with its key, in PEM."""

    authorization: str = ""
    certificate: bytes = b""
    key: bytes = b""


class Credentials(Protocol):
    """Gives the identity of the next request. Both methods raise CredentialsFailed."""

    async def current(self) -> Identity:
        """Return an identity that should be accepted."""

    async def renewed(self, refused: Identity) -> Identity:
        """Return an identity to try after the API server has refused one; the same when there is no other."""


def credentials_for(access: Access) -> Credentials:
    """Return the credentials that an access describes."""
    if access.token_file:
        return TokenFile(access.token_file, access.token)
    if access.token:
        return Fixed(Identity(f"Bearer {access.token}"))
    if access.basic:
        text = ":".join(access.basic).encode()
        return Fixed(Identity(f"Basic {base64.b64encode(text).decode()}"))
    if access.exec_plugin:
        return ExecPlugin(access.exec_plugin, _cluster_description(access))
    return Fixed(Identity())


class Fixed:
    """Credentials that never change."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def current(self) -> Identity:
        return self._identity

    async def renewed(self, refused: Identity) -> Identity:
        return self._identity


class TokenFile:
    """A token in a file that others rotate. It is read for each request; requests are rare, and so it is never stale.

    `token` counts until the file could be read once. While it cannot be read, the last one read counts.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self._path = path
        self._token = token

    async def current(self) -> Identity:
        reason = "it is empty"
        try:
            self._token = self._path.read_text(encoding="utf-8").strip() or self._token
        except (OSError, UnicodeDecodeError) as error:
            reason = str(error)
        if not self._token:
            raise CredentialsFailed(f"cannot read the token file {self._path}: {reason}")
        return Identity(f"Bearer {self._token}")

    async def renewed(self, refused: Identity) -> Identity:
        return await self.current()


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: str | None = None


class _ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    status: _Status | None = None


class ExecPlugin:
    """A program that prints credentials: run for the first request, before they expire, and once when they are refused.

    `cluster` is what the plugin is told of the cluster, if it asks. `now` is seconds since the epoch.
    """

    def __init__(
        self, entry: ExecEntry, cluster: Mapping[str, object] | None = None, *, now: Callable[[], float] = time.time
    ) -> None:
        self._entry = entry
        self._cluster = cluster
        self._now = now
        self._identity: Identity | None = None
        self._renew_at = self._expires_at = float("inf")
        self._lock = asyncio.Lock()

    async def current(self) -> Identity:
        async with self._lock:
            if self._identity is None or self._now() >= self._renew_at:
                return await self._run_or_keep()
            return self._identity

    async def renewed(self, refused: Identity) -> Identity:
        async with self._lock:
            if self._identity is None or self._identity == refused:
                return await self._run()
            return self._identity

    async def _run_or_keep(self) -> Identity:
        """Run the plugin; when it fails, the credentials that have not expired yet are still good."""
        try:
            return await self._run()
        except CredentialsFailed as failure:
            if self._identity is None or self._now() >= self._expires_at:
                raise
            _log.warning("%s; the credentials at hand are valid for another %d s", failure, self._remaining_s())
            self._renew_at = self._now() + self._remaining_s() / 2
            return self._identity

    def _remaining_s(self) -> float:
        return max(0.0, self._expires_at - self._now())

    async def _run(self) -> Identity:
        status = self._parse(await self._output())
        self._expires_at = self._epoch(status.expiration_timestamp) if status.expiration_timestamp else float("inf")
        self._renew_at = self._expires_at - min(_MARGIN_S, self._remaining_s() * _MARGIN_PART)
        self._identity = Identity(
            f"Bearer {status.token.strip()}" if status.token else "",
            (status.client_certificate_data or "").encode(),
            (status.client_key_data or "").encode(),
        )
        return self._identity

    async def _output(self) -> bytes:
        entry = self._entry
        spec: dict[str, object] = {"interactive": False}
        if entry.provide_cluster_info and self._cluster is not None:
            spec["cluster"] = self._cluster
        about = {"apiVersion": entry.api_version, "kind": "ExecCredential", "spec": spec}
        environ = {**os.environ, **{each.name: each.value for each in entry.env or ()}}
        environ["KUBERNETES_EXEC_INFO"] = json.dumps(about)
        try:
            process = await asyncio.create_subprocess_exec(
                entry.command,
                *(entry.args or ()),
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # so that what a script has started ends with it
            )
        except OSError as error:
            hint = f"; {entry.install_hint.strip()}" if entry.install_hint else ""
            raise self._failed(f"cannot be run: {error.strerror}{hint}") from error
        return await self._collect(process)

    async def _collect(self, process: asyncio.subprocess.Process) -> bytes:
        try:
            async with asyncio.timeout(PLUGIN_TIMEOUT_S):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            raise self._failed(f"did not end within {PLUGIN_TIMEOUT_S:g} s") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            said = stderr.decode(errors="replace").strip()[-500:]
            raise self._failed(f"ended with exit code {process.returncode}: {said or 'it said nothing'}")
        return stdout

    def _parse(self, output: bytes) -> _Status:
        try:
            answer = msgspec.json.decode(output, type=_ExecCredential)
        except msgspec.DecodeError as error:
            raise self._failed(f"printed no ExecCredential: {error}") from error
        if answer.kind != "ExecCredential" or answer.api_version != self._entry.api_version:
            reason = (
                f"printed a {answer.kind} of {answer.api_version}, not an ExecCredential of {self._entry.api_version}"
            )
            raise self._failed(reason)
        status = answer.status or _Status()
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise self._failed("printed a certificate without its key, or a key without its certificate")
        if not (status.token or status.client_certificate_data):
            raise self._failed("printed neither a token nor a client certificate")
        return status

    def _epoch(self, text: str) -> float:
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError as error:
            raise self._failed(f"printed an expirationTimestamp that is no time: {text!r}") from error

    def _failed(self, reason: str) -> CredentialsFailed:
        return CredentialsFailed(f"the credential plugin {self._entry.command} {reason}")


def _cluster_description(access: Access) -> dict[str, object]:
    description: dict[str, object] = {"server": access.server}
    authority = access.certificate_authority
    if authority is not None and not access.skip_tls_verify:
        description["certificate-authority-data"] = base64.b64encode(_pem(authority)).decode()
    if access.tls_server_name:
        description["tls-server-name"] = access.tls_server_name
    if access.skip_tls_verify:
        description["insecure-skip-tls-verify"] = True
    if access.proxy_url:
        description["proxy-url"] = access.proxy_url
    return description


def _pem(material: Material) -> bytes:
    if isinstance(material, bytes):
        return material
    try:
        return material.read_bytes()
    except OSError as error:
        raise CredentialsFailed(f"cannot read {material}: {error.strerror}") from error
