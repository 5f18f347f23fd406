"""Certificates and proxies against real TLS and a real proxy."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, service
from tests.sources.certificates import Authority, server_context
from tests.sources.following import eventually, following, services_of
from userspace_proxy.core.errors import ApiUnreachable, CredentialsFailed
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.kubeconfig import Access, ExecEntry


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def list_services(access: Access, environ: dict[str, str] | None = None) -> None:
    async with (
        ApiConnection(access, environ=environ or {}) as connection,
        connection.request("list", "services", "/api/v1/services", silence_s=5) as response,
    ):
        await response.read()


async def test_the_servers_certificate_is_verified_with_the_kubeconfigs_authority(authority: Authority) -> None:
    pair = authority.issue("server", ips=("127.0.0.1",))
    async with ApiServer(tls=server_context(pair)) as api:
        await list_services(Access(api.url, certificate_authority=authority.file))
        await list_services(Access(api.url, certificate_authority=authority.certificate))
        with pytest.raises(ApiUnreachable, match="its certificate is not accepted"):
            await list_services(Access(api.url))


async def test_a_certificate_for_another_name_needs_tls_server_name(authority: Authority) -> None:
    pair = authority.issue("server", dns=("kubernetes.example",))
    async with ApiServer(tls=server_context(pair)) as api:
        access = Access(api.url, certificate_authority=authority.file)
        with pytest.raises(ApiUnreachable, match="its certificate is not accepted"):
            await list_services(access)
        await list_services(replace(access, tls_server_name="kubernetes.example"))


async def test_verification_can_be_skipped(authority: Authority) -> None:
    async with ApiServer(tls=server_context(authority.issue("server", dns=("elsewhere",)))) as api:
        await list_services(Access(api.url, skip_tls_verify=True))


async def test_a_client_certificate_opens_a_server_that_demands_one(authority: Authority) -> None:
    tls = server_context(authority.issue("server", ips=("127.0.0.1",)), clients_of=authority)
    client = authority.issue("client")
    async with ApiServer(tls=tls) as api:
        access = Access(api.url, certificate_authority=authority.file)
        with pytest.raises(ApiUnreachable):
            await list_services(access)
        files = (client.certificate_file, client.key_file)
        await list_services(replace(access, client_certificate=files[0], client_key=files[1]))
        await list_services(replace(access, client_certificate=client.certificate, client_key=client.key))


async def test_a_plugin_may_give_a_client_certificate(authority: Authority, tmp_path: Path) -> None:
    tls = server_context(authority.issue("server", ips=("127.0.0.1",)), clients_of=authority)
    client = authority.issue("client")
    status = {"clientCertificateData": client.certificate.decode(), "clientKeyData": client.key.decode()}
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    plugin = ExecEntry(
        command=sys.executable,
        api_version="client.authentication.k8s.io/v1",
        args=("-c", f"print({json.dumps(answer)!r})"),
    )
    async with ApiServer(tls=tls) as api:
        await list_services(Access(api.url, certificate_authority=authority.file, exec_plugin=plugin))


async def test_rotated_certificate_files_are_used_without_a_restart(authority: Authority) -> None:
    pair = authority.issue("server", ips=("127.0.0.1",))
    async with ApiServer(tls=server_context(pair)) as api:
        api.put(service("web"))
        wrong = Authority(authority.file.parent, "wrong")
        file = authority.file.parent / "rotating.crt"
        file.write_bytes(wrong.certificate)
        async with following(api, access=Access(api.url, certificate_authority=file)) as followed:
            waiting = asyncio.create_task(followed.first())
            await eventually(followed.source.watches)
            assert not waiting.done()
            file.write_bytes(authority.certificate)
            os.utime(file, (1, 1))
            assert services_of(await waiting) == {"default/web"}


async def test_a_rotated_client_certificate_leaves_the_watches_that_run(authority: Authority) -> None:
    tls = server_context(authority.issue("server", ips=("127.0.0.1",)), clients_of=authority)
    client = authority.issue("client")
    async with ApiServer(tls=tls) as api:
        api.put(service("web"))
        access = Access(
            api.url,
            certificate_authority=authority.file,
            client_certificate=client.certificate_file,
            client_key=client.key_file,
        )
        async with following(api, access=access) as followed:
            await followed.first()
            await api.until(lambda: len(api.open_watches()) == 2)
            authority.issue("client")
            api.end_watches("services")
            await api.until_requested("watch", "services", times=2)
            api.put(service("second"))
            await followed.until_services("default/web", "default/second")
            assert api.count("watch", "endpointslices") == 1


async def test_a_server_whose_machine_is_gone_is_found_out_by_the_kernel(api: ApiServer) -> None:
    async with (
        ApiConnection(Access(api.url), environ={}) as connection,
        connection.request("watch", "services", "/api/v1/services", {"watch": "true"}, silence_s=5) as response,
    ):
        assert response.connection is not None
        assert response.connection.transport is not None
        connected = response.connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20


async def test_certificates_that_are_none_are_told(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text("no certificate")
    with pytest.raises(CredentialsFailed, match=r"cannot use the certificates .*ca\.crt"):
        await list_services(Access("https://127.0.0.1:1", certificate_authority=file))


# Proxies


class HttpProxy:
    """An HTTP proxy that tunnels to wherever it is told, and writes down where."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n")[0].decode().split()
        self.asked.append(f"{method} {target}")
        host, _, port = target.removeprefix("http://").partition("/")[0].rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            upstream_writer.write(head)
        with suppress(ConnectionError):
            await asyncio.gather(self.copy(reader, upstream_writer), self.copy(upstream_reader, writer))

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def http_proxy() -> AsyncIterator[HttpProxy]:
    proxy = HttpProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy


async def test_the_kubeconfigs_proxy_is_used_and_keeps_tls_server_name(authority: Authority) -> None:
    pair = authority.issue("server", dns=("kubernetes.example",))
    async with ApiServer(tls=server_context(pair)) as api, http_proxy() as proxy:
        access = Access(
            api.url,
            certificate_authority=authority.file,
            tls_server_name="kubernetes.example",
            proxy_url=proxy.url,
        )
        await list_services(access, {"NO_PROXY": "*"})
        assert proxy.asked == [f"CONNECT 127.0.0.1:{api.port}"]


async def test_a_server_on_loopback_never_has_the_environments_proxy(api: ApiServer) -> None:
    await list_services(Access(api.url), {"HTTP_PROXY": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1"})
