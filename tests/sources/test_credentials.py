"""Tokens, token files and credential plugins against a server that demands them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, service
from tests.sources.following import eventually, following, services_of
from userspace_proxy.core.errors import ApiRefused, CredentialsFailed
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.credentials import ExecPlugin, Identity, TokenFile, credentials_for
from userspace_proxy.sources.kubeconfig import Access, EnvironmentVariable, ExecEntry

API_VERSION = "client.authentication.k8s.io/v1"

PLUGIN = """#!{python}
import json, os, pathlib, sys
folder = pathlib.Path({folder!r})
runs = folder / "runs"
runs.write_text(str(int(runs.read_text() or 0) + 1) if runs.exists() else "1")
(folder / "told").write_text(os.environ["KUBERNETES_EXEC_INFO"])
(folder / "environment").write_text(os.environ.get("FLAVOUR", "") + " " + " ".join(sys.argv[1:]))
if (folder / "fail").exists():
    sys.exit("the identity provider is down")
print((folder / "answer").read_text())
"""


class Plugin:
    """A credential plugin that counts its runs and prints what the test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "plugin"
        self.path.write_text(PLUGIN.format(python=sys.executable, folder=str(folder)))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        self.answer(token="first")

    @property
    def entry(self) -> ExecEntry:
        return ExecEntry(command=str(self.path), api_version=API_VERSION, provide_cluster_info=True)

    @property
    def runs(self) -> int:
        return int((self.folder / "runs").read_text())

    @property
    def told(self) -> object:
        return json.loads((self.folder / "told").read_text())

    def answer(self, *, expires_at: float | None = None, api_version: str = API_VERSION, **status: str) -> None:
        if expires_at is not None:
            status["expirationTimestamp"] = datetime.fromtimestamp(expires_at, UTC).isoformat().replace("+00:00", "Z")
        self.print(json.dumps({"apiVersion": api_version, "kind": "ExecCredential", "status": status}))

    def print(self, text: str) -> None:
        (self.folder / "answer").write_text(text)

    def fail(self) -> None:
        (self.folder / "fail").touch()


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


async def list_services(connection: ApiConnection) -> None:
    async with connection.request("list", "services", "/api/v1/services", silence_s=5) as response:
        await response.read()


def accepted(api: ApiServer) -> list[str]:
    return [each.headers.get("Authorization", "") for each in api.requests]


async def test_a_token_is_shown_with_every_request() -> None:
    async with ApiServer(tokens={"secret"}) as api:
        api.put(service("web"))
        async with following(api, access=Access(api.url, token="secret")) as followed:
            assert services_of(await followed.first()) == {"default/web"}
    assert set(accepted(api)) == {"Bearer secret"}


async def test_a_name_and_a_password_make_a_basic_authorization() -> None:
    credentials = credentials_for(Access("https://127.0.0.1", basic=("user", "pass")))
    assert (await credentials.current()).authorization == "Basic dXNlcjpwYXNz"


async def test_a_token_file_that_rotates_is_used_at_the_next_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    async with ApiServer(tokens={"old"}) as api:
        api.put(service("web"))
        async with following(api, access=Access(api.url, token_file=file)) as followed:
            await followed.first()
            api.tokens = {"new"}
            file.write_text("new\n")
            api.end_watches()
            api.put(service("second"))
            await followed.until_services("default/web", "default/second")
    assert "401" not in caplog.text


async def test_a_token_file_that_is_away_for_a_moment_leaves_the_last_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("token")
    credentials = TokenFile(file)
    await credentials.current()
    file.unlink()
    assert (await credentials.current()).authorization == "Bearer token"


async def test_a_token_file_that_never_was_is_told(
    api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(service("web"))
    async with following(api, access=Access(api.url, token_file=tmp_path / "token")) as followed:
        await eventually(lambda: sum(each.failures for each in followed.source.watches()) >= 4)
        (tmp_path / "token").write_text("there")
        await followed.first()
    assert sum("cannot read the token file" in each for each in caplog.messages) == 2  # services and slices


async def test_a_plugin_is_run_once_for_many_requests(plugin: Plugin) -> None:
    async with ApiServer(tokens={"first"}) as api:
        api.put(service("web"))
        async with following(api, access=Access(api.url, exec_plugin=plugin.entry)) as followed:
            await followed.first()
            await api.until_requested("watch", times=2)
        assert plugin.runs == 1
        assert plugin.told == {
            "apiVersion": API_VERSION,
            "kind": "ExecCredential",
            "spec": {"interactive": False, "cluster": {"server": api.url}},
        }


async def test_a_plugin_gets_its_arguments_and_environment(plugin: Plugin) -> None:
    flavour = EnvironmentVariable("FLAVOUR", "vanilla")
    entry = ExecEntry(command=str(plugin.path), api_version=API_VERSION, args=("get", "token"), env=(flavour,))
    await ExecPlugin(entry).current()
    assert (plugin.folder / "environment").read_text() == "vanilla get token"


async def test_a_plugin_is_run_again_before_its_credentials_expire(plugin: Plugin) -> None:
    now = 1_000_000.0
    credentials = ExecPlugin(plugin.entry, now=lambda: now)
    plugin.answer(token="first", expires_at=now + 600)
    assert await credentials.current() == Identity("Bearer first")
    plugin.answer(token="second", expires_at=now + 1200)
    now += 500
    assert await credentials.current() == Identity("Bearer first")
    now += 50
    assert await credentials.current() == Identity("Bearer second")
    assert plugin.runs == 2


async def test_credentials_that_have_not_expired_outlive_a_plugin_that_fails(
    plugin: Plugin, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1_000_000.0
    credentials = ExecPlugin(plugin.entry, now=lambda: now)
    plugin.answer(token="first", expires_at=now + 600)
    await credentials.current()
    plugin.fail()
    now += 590
    assert await credentials.current() == Identity("Bearer first")
    assert "the identity provider is down" in caplog.text
    now += 20
    with pytest.raises(CredentialsFailed, match="the identity provider is down"):
        await credentials.current()


async def test_a_renewal_that_is_wrong_does_not_lengthen_the_life_of_the_credentials(plugin: Plugin) -> None:
    now = 1_000_000.0
    credentials = ExecPlugin(plugin.entry, now=lambda: now)
    plugin.answer(token="first", expires_at=now + 600)
    await credentials.current()
    plugin.answer(token="second", expirationTimestamp="tomorrow")
    now += 590
    assert await credentials.current() == Identity("Bearer first")
    now += 20
    with pytest.raises(CredentialsFailed, match="is no time"):
        await credentials.current()


async def test_a_plugin_is_run_once_more_when_its_token_is_refused(plugin: Plugin) -> None:
    async with ApiServer(tokens={"first"}) as api:
        access = Access(api.url, exec_plugin=plugin.entry)
        async with ApiConnection(access, qps=0, environ={}) as connection:
            await list_services(connection)
            api.tokens = {"second"}
            plugin.answer(token="second")
            await asyncio.gather(*(list_services(connection) for _ in range(3)))
            assert plugin.runs == 2
            api.tokens = set()
            with pytest.raises(ApiRefused, match="cannot list services: 401"):
                await list_services(connection)
            assert plugin.runs == 3


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "printed no ExecCredential"),
        ("not JSON", "printed no ExecCredential"),
        ('{"apiVersion": "v1", "kind": "Secret"}', "printed a Secret of v1"),
        ({}, "printed neither a token nor a client certificate"),
        ({"clientCertificateData": "PEM"}, "a certificate without its key"),
        ({"token": "x", "expirationTimestamp": "tomorrow"}, "is no time: 'tomorrow'"),
    ],
)
async def test_what_a_plugin_prints_wrong_is_told(plugin: Plugin, output: str | dict[str, str], reason: str) -> None:
    if isinstance(output, str):
        plugin.print(output)
    else:
        plugin.answer(**output)
    with pytest.raises(CredentialsFailed, match=reason):
        await ExecPlugin(plugin.entry).current()


async def test_a_plugin_that_is_not_installed_comes_with_its_hint() -> None:
    entry = ExecEntry(command="no-such-plugin", api_version=API_VERSION, install_hint="get it at the shop")
    with pytest.raises(CredentialsFailed, match="cannot be run: No such file or directory; get it at the shop"):
        await ExecPlugin(entry).current()


async def test_a_plugin_that_does_not_end_is_killed(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("userspace_proxy.sources.credentials.PLUGIN_TIMEOUT_S", 0.3)
    plugin.path.write_text(f"#!/bin/sh\necho $$ > {plugin.folder}/pid\nexec sleep 60\n")
    with pytest.raises(CredentialsFailed, match="did not end within"):
        await ExecPlugin(plugin.entry).current()
    with pytest.raises(ProcessLookupError):
        os.kill(int((plugin.folder / "pid").read_text()), 0)


async def test_a_plugin_that_does_not_end_takes_what_it_has_started_with_it(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("userspace_proxy.sources.credentials.PLUGIN_TIMEOUT_S", 0.3)
    plugin.path.write_text("#!/bin/sh\nsleep 20\necho done\n")
    async with asyncio.timeout(5):
        with pytest.raises(CredentialsFailed, match="did not end within"):
            await ExecPlugin(plugin.entry).current()


async def test_a_token_that_fits_in_no_header_is_told(api: ApiServer, plugin: Plugin) -> None:
    plugin.answer(token="two\nlines")
    async with ApiConnection(Access(api.url, exec_plugin=plugin.entry), environ={}) as connection:
        with pytest.raises(CredentialsFailed, match="characters that no header may have"):
            await list_services(connection)


async def test_a_plugin_that_fails_is_told_and_tried_again(
    api: ApiServer, plugin: Plugin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    api.put(service("web"))
    plugin.fail()
    async with following(api, access=Access(api.url, exec_plugin=plugin.entry, origin="the test")) as followed:
        await eventually(lambda: sum(each.failures for each in followed.source.watches()) >= 3)
        (plugin.folder / "fail").unlink()
        await followed.first()
    assert "ended with exit code 1: the identity provider is down (the test); trying again" in caplog.text
