from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.sources.kubeconfig import load_access

NOBODY = {"HOME": "/nonexistent"}


def write(
    path: Path,
    *,
    clusters: dict[str, Any] | None = None,
    users: dict[str, Any] | None = None,
    contexts: dict[str, Any] | None = None,
    current: str | None = None,
) -> str:
    document: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "preferences": {}}
    document["clusters"] = [{"name": name, "cluster": each} for name, each in (clusters or {}).items()]
    document["users"] = [{"name": name, "user": each} for name, each in (users or {}).items()]
    document["contexts"] = [{"name": name, "context": each} for name, each in (contexts or {}).items()]
    if current is not None:
        document["current-context"] = current
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.fixture
def one(tmp_path: Path) -> str:
    return write(
        tmp_path / "one",
        clusters={"c": {"server": "https://one.example:6443/"}, "d": {"server": "https://two.example"}},
        users={"u": {"token": "secret"}},
        contexts={"a": {"cluster": "c", "user": "u"}, "b": {"cluster": "d", "namespace": "shop"}},
        current="a",
    )


def test_the_current_context_is_used(one: str) -> None:
    access = load_access(one, environ=NOBODY)
    assert (access.server, access.token, access.namespace) == ("https://one.example:6443", "secret", "default")
    assert access.origin == f"context 'a' of {one}"


def test_another_context_may_be_asked_for(one: str) -> None:
    access = load_access(one, context="b", environ=NOBODY)
    assert (access.server, access.token, access.namespace) == ("https://two.example", "", "shop")


def test_master_is_in_the_place_of_the_clusters_url_but_not_of_its_credentials(one: str) -> None:
    access = load_access(one, master="http://127.0.0.1:8080", environ=NOBODY)
    assert (access.server, access.token) == ("http://127.0.0.1:8080", "secret")


def test_master_alone_is_enough() -> None:
    assert load_access(master="127.0.0.1:8080", environ=NOBODY).server == "http://127.0.0.1:8080"


def test_the_first_of_several_files_wins_and_missing_ones_do_not_count(tmp_path: Path) -> None:
    first = write(tmp_path / "1" / "config", users={"u": {"token": "first"}}, contexts={"x": {"cluster": "c"}})
    second = write(
        tmp_path / "2" / "config",
        clusters={"c": {"server": "https://c.example", "certificate-authority": "pki/ca.crt"}},
        users={"u": {"token": "second"}, "v": {"tokenFile": "token"}},
        contexts={"x": {"cluster": "other"}, "y": {"cluster": "c", "user": "u"}, "z": {"cluster": "c", "user": "v"}},
        current="y",
    )
    third = write(tmp_path / "3" / "config", current="x")
    environ = {"KUBECONFIG": f"{first}::{tmp_path}/missing:{second}:{third}"}
    access = load_access(environ=environ)
    assert (access.server, access.token) == ("https://c.example", "first")
    assert access.certificate_authority == tmp_path / "2" / "pki" / "ca.crt"
    assert load_access(context="x", environ=environ).token == ""
    assert load_access(context="z", environ=environ).token_file == tmp_path / "2" / "token"


def test_the_file_in_the_home_folder_is_the_default(tmp_path: Path) -> None:
    write(
        tmp_path / ".kube" / "config",
        clusters={"c": {"server": "https://c.example"}},
        contexts={"x": {"cluster": "c"}},
        current="x",
    )
    assert load_access(environ={"HOME": str(tmp_path)}).server == "https://c.example"


def test_certificates_may_stand_in_the_file_and_then_win(tmp_path: Path) -> None:
    pem = base64.b64encode(b"PEM").decode()
    file = write(
        tmp_path / "config",
        clusters={"c": {"server": "c.example", "certificate-authority": "ca", "certificate-authority-data": pem}},
        users={"u": {"client-certificate-data": pem, "client-key": "/pki/key"}},
        contexts={"x": {"cluster": "c", "user": "u"}},
        current="x",
    )
    access = load_access(file, environ=NOBODY)
    assert (access.server, access.certificate_authority) == ("https://c.example", b"PEM")
    assert (access.client_certificate, access.client_key) == (b"PEM", Path("/pki/key"))


def test_all_that_a_cluster_may_say_about_tls_and_proxies_is_read(tmp_path: Path) -> None:
    cluster = {
        "server": "https://c.example",
        "tls-server-name": "kubernetes",
        "insecure-skip-tls-verify": True,
        "proxy-url": "http://proxy.example:3128",
    }
    file = write(tmp_path / "config", clusters={"c": cluster}, contexts={"x": {"cluster": "c"}}, current="x")
    access = load_access(file, environ=NOBODY)
    assert (access.tls_server_name, access.skip_tls_verify) == ("kubernetes", True)
    assert access.proxy_url == "http://proxy.example:3128"


def test_a_plugin_that_is_a_path_counts_from_its_file(tmp_path: Path) -> None:
    def access_with(command: str) -> str:
        plugin = {"command": command, "apiVersion": "client.authentication.k8s.io/v1"}
        file = write(
            tmp_path / "config",
            clusters={"c": {"server": "https://c.example"}},
            users={"u": {"exec": {**plugin, "args": None, "env": [{"name": "A", "value": "b"}]}}},
            contexts={"x": {"cluster": "c", "user": "u"}},
            current="x",
        )
        entry = load_access(file, environ=NOBODY).exec_plugin
        assert entry is not None
        return entry.command

    assert access_with("./bin/plugin") == str(tmp_path / "bin" / "plugin")
    assert access_with("plugin") == "plugin"


def test_a_pod_uses_its_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "namespace").write_text("kube-system\n")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    access = load_access(environ=environ, service_account=tmp_path)
    assert (access.server, access.namespace) == ("https://[fd00::1]:443", "kube-system")
    assert (access.token_file, access.certificate_authority) == (tmp_path / "token", tmp_path / "ca.crt")


def broken(tmp_path: Path, **changes: Any) -> str:
    user = {**changes.pop("user", {})}
    cluster = {"server": "https://c.example", **changes.pop("cluster", {})}
    return write(
        tmp_path / "config",
        clusters={"c": cluster},
        users={"u": user},
        contexts={"x": {"cluster": "c", "user": "u"}, "loose": {"cluster": "nowhere"}, "alone": {"user": "nobody"}},
        current=changes.pop("current", "x"),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"current": "y"}, r"there is no context 'y' \(there are: alone, loose, x\)"),
        ({"current": "loose"}, "context 'loose': there is no cluster 'nowhere'"),
        ({"current": "alone"}, "context 'alone': there is no user 'nobody'"),
        ({"current": ""}, "no cluster is chosen"),
        ({"cluster": {"server": "ftp://c.example"}}, "'ftp://c.example' is no URL of an API server"),
        ({"cluster": {"server": "https://[fd00::1:6443"}}, "is no URL of an API server"),
        ({"cluster": {"server": "https://c.example:99999"}}, "is no URL of an API server"),
        ({"cluster": {"proxy-url": "http://[fd00::1:3128"}}, "proxy-url: only http and https proxies are supported"),
        ({"cluster": {"server": 3}}, r"is no kubeconfig: .*\$.clusters\[0\].cluster.server"),
        ({"cluster": {"proxy-url": "socks5://p"}}, "proxy-url: only http and https proxies are supported"),
        ({"user": {"auth-provider": {"name": "gcp"}}}, "the auth provider 'gcp' is not supported"),
        ({"user": {"as": "root"}}, "impersonation is not supported"),
        ({"user": {"client-certificate": "crt"}}, "one is missing"),
        ({"user": {"client-certificate-data": "*", "client-key-data": "abc"}}, "no base64"),
        ({"user": {"client-certificate-data": "!!!", "client-key-data": "!!!"}}, "no base64"),
        ({"cluster": {"certificate-authority-data": "???"}}, "no base64"),
        ({"user": {"exec": {"command": "x", "apiVersion": "v", "interactiveMode": "Always"}}}, "at a terminal"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_place(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    file = broken(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_access(file, environ=NOBODY)
    assert file in str(caught.value)


def test_missing_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing: No such file"):
        load_access(str(tmp_path / "missing"), environ=NOBODY)
    with pytest.raises(ConfigError, match="KUBECONFIG: /missing: none of these files exists"):
        load_access(environ={"KUBECONFIG": "/missing"})
    with pytest.raises(ConfigError, match="no kubeconfig: give --kubeconfig"):
        load_access(environ=NOBODY)


def test_a_file_that_is_no_yaml_is_told(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is no kubeconfig"):
        load_access(str(file), environ=NOBODY)
