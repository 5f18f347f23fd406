"""Kubeconfig files -> how to reach an API server and who we are there, by kubectl's rules.

Where several files say something, the first one wins. A relative path counts from the file that says it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Struct, field

from userspace_proxy.core.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Material = bytes | Path
"""A certificate or a key: its PEM text, or the file that has it, which may be rotated."""


class EnvironmentVariable(Struct, frozen=True):
    name: str
    value: str = ""


class ExecEntry(Struct, frozen=True, rename="camel"):
    """A credential plugin, as a kubeconfig describes it. `command` is a path, or a name to look up in PATH."""

    command: str
    api_version: str
    args: tuple[str, ...] | None = None
    env: tuple[EnvironmentVariable, ...] | None = None
    install_hint: str | None = None
    provide_cluster_info: bool = False
    interactive_mode: str | None = None


class _Entry(Struct, frozen=True, rename="kebab"):
    pass


class _Cluster(_Entry, frozen=True):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool | None = None
    proxy_url: str | None = None


class _User(_Entry, frozen=True):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = field(default=None, name="tokenFile")
    username: str | None = None
    password: str | None = None
    exec_plugin: ExecEntry | None = field(default=None, name="exec")
    auth_provider: dict[str, object] | None = None
    impersonate: str | None = field(default=None, name="as")


class _Context(_Entry, frozen=True):
    cluster: str = ""
    user: str | None = None
    namespace: str | None = None


class _NamedCluster(_Entry, frozen=True):
    name: str
    cluster: _Cluster | None = None


class _NamedUser(_Entry, frozen=True):
    name: str
    user: _User | None = None


class _NamedContext(_Entry, frozen=True):
    name: str
    context: _Context | None = None


class _Kubeconfig(_Entry, frozen=True):
    clusters: tuple[_NamedCluster, ...] | None = None
    users: tuple[_NamedUser, ...] | None = None
    contexts: tuple[_NamedContext, ...] | None = None
    current_context: str | None = None


EntryT = TypeVar("EntryT")


@dataclass(frozen=True, slots=True)
class _Found(Generic[EntryT]):
    """An entry, and the file that has it."""

    entry: EntryT
    file: Path

    def path(self, text: str) -> Path:
        return self.file.parent / Path(text).expanduser()


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach an API server, and who we are there.

    `origin` says where that was found, for messages. Without `proxy_url` the environment decides. Of the credentials
    the first in this order counts: `token_file`, `token`, `basic`, `exec_plugin`; client certificates go with any.
    """

    server: str
    origin: str = ""
    namespace: str = "default"
    certificate_authority: Material | None = None
    tls_server_name: str = ""
    skip_tls_verify: bool = False
    proxy_url: str = ""
    client_certificate: Material | None = None
    client_key: Material | None = None
    token: str = ""
    token_file: Path | None = None
    basic: tuple[str, str] | None = None
    exec_plugin: ExecEntry | None = None


def load_access(
    kubeconfig: str = "",
    *,
    context: str = "",
    master: str = "",
    environ: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> Access:
    """Return the access that `kubeconfig` describes, else the files of KUBECONFIG, else ~/.kube/config, else the pod's.

    `master` is the URL of the API server where it is not the kubeconfig's. Without any file it stands alone.
    Raises ConfigError.
    """
    files = _files(kubeconfig, environ)
    if files:
        return _from_files(files, context, master)
    if context:
        raise ConfigError(f"there is no kubeconfig that could have the context {context!r}")
    if master:
        return Access(_server_url(master, is_secure=False, where="--master"), origin="--master")
    if environ.get("KUBERNETES_SERVICE_HOST") and environ.get("KUBERNETES_SERVICE_PORT"):
        return _in_cluster(environ, service_account)
    raise ConfigError("no kubeconfig: give --kubeconfig, or set KUBECONFIG, or run inside a cluster")


def _files(kubeconfig: str, environ: Mapping[str, str]) -> list[Path]:
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    listed = environ.get("KUBECONFIG", "")
    home = environ.get("HOME", "")
    candidates = [Path(each) for each in listed.split(os.pathsep) if each]
    if not candidates and home:
        candidates = [Path(home, ".kube", "config")]
    present = [each for each in candidates if each.exists()]
    if listed and not present:
        raise ConfigError("none of these files exists", where="KUBECONFIG", subject=listed)
    return present


def _from_files(files: Iterable[Path], context: str, master: str) -> Access:
    clusters: dict[str, _Found[_Cluster]] = {}
    users: dict[str, _Found[_User]] = {}
    contexts: dict[str, _Found[_Context]] = {}
    current = context
    for file in files:
        read = _read(file)
        for cluster in read.clusters or ():
            clusters.setdefault(cluster.name, _Found(cluster.cluster or _Cluster(), file))
        for user in read.users or ():
            users.setdefault(user.name, _Found(user.user or _User(), file))
        for each in read.contexts or ():
            contexts.setdefault(each.name, _Found(each.context or _Context(), file))
        current = current or read.current_context or ""
    where = os.pathsep.join(map(str, files))
    chosen = _choose_context(contexts, current, where)
    if chosen.user and chosen.user not in users:
        raise ConfigError(f"there is no user {chosen.user!r}", where=where, subject=f"context {current!r}")
    if chosen.cluster and chosen.cluster not in clusters:
        raise ConfigError(f"there is no cluster {chosen.cluster!r}", where=where, subject=f"context {current!r}")
    origin = f"context {current!r} of {where}" if current else where
    access = Access("", origin=origin, namespace=chosen.namespace or "default")
    access = _with_cluster(access, clusters.get(chosen.cluster), master)
    return _with_user(access, users.get(chosen.user or ""))


def _choose_context(contexts: Mapping[str, _Found[_Context]], name: str, where: str) -> _Context:
    if name in contexts:
        return contexts[name].entry
    if name:
        known = ", ".join(sorted(contexts)) or "none"
        raise ConfigError(f"there is no context {name!r} (there are: {known})", where=where)
    return _Context()


def _read(file: Path) -> _Kubeconfig:
    try:
        document = yaml.load(file.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return msgspec.convert(document if document is not None else {}, _Kubeconfig)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(file)) from error
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"is no kubeconfig: {error}", where=str(file)) from error


def _with_cluster(access: Access, found: _Found[_Cluster] | None, master: str) -> Access:
    if found is None:
        if not master:
            raise ConfigError("no cluster is chosen: set current-context, or give --context", where=access.origin)
        return replace(access, server=_server_url(master, is_secure=False, where="--master"))
    cluster = found.entry
    authority = _material(found, cluster.certificate_authority_data, cluster.certificate_authority)
    where = "--master" if master else access.origin
    if cluster.proxy_url and not _is_http_url(cluster.proxy_url):
        raise ConfigError("only http and https proxies are supported", where=access.origin, field="proxy-url")
    return replace(
        access,
        server=_server_url(master or cluster.server, is_secure=authority is not None, where=where),
        certificate_authority=authority,
        tls_server_name=cluster.tls_server_name or "",
        skip_tls_verify=cluster.insecure_skip_tls_verify is True,
        proxy_url=cluster.proxy_url or "",
    )


def _with_user(access: Access, found: _Found[_User] | None) -> Access:
    if found is None:
        return access
    user = found.entry
    if user.auth_provider is not None:
        name = user.auth_provider.get("name")
        reason = f"the auth provider {name!r} is not supported; use a credential plugin (exec)"
        raise ConfigError(reason, where=access.origin, field="auth-provider")
    if user.impersonate:
        raise ConfigError("impersonation is not supported", where=access.origin, field="as")
    certificate = _material(found, user.client_certificate_data, user.client_certificate)
    key = _material(found, user.client_key_data, user.client_key)
    if (certificate is None) != (key is None):
        raise ConfigError("client-certificate and client-key go together: one is missing", where=access.origin)
    return replace(
        access,
        client_certificate=certificate,
        client_key=key,
        token=(user.token or "").strip(),
        token_file=found.path(user.token_file) if user.token_file else None,
        basic=(user.username, user.password or "") if user.username else None,
        exec_plugin=_resolved(found, user.exec_plugin) if user.exec_plugin else None,
    )


def _resolved(found: _Found[_User], plugin: ExecEntry) -> ExecEntry:
    """Return the plugin with its command made absolute, if it is a path and not a name."""
    if plugin.interactive_mode == "Always":
        reason = f"the credential plugin {plugin.command} wants a person at a terminal"
        raise ConfigError(reason, where=str(found.file), field="exec.interactiveMode")
    if os.sep in plugin.command:
        return msgspec.structs.replace(plugin, command=str(found.path(plugin.command).absolute()))
    return plugin


def _material(found: _Found[_Cluster] | _Found[_User], data: str | None, file: str | None) -> Material | None:
    if data:
        try:
            return base64.b64decode("".join(data.split()), validate=True)
        except ValueError as error:
            raise ConfigError(f"a certificate or key is no base64: {error}", where=str(found.file)) from error
    return found.path(file) if file else None


def _in_cluster(environ: Mapping[str, str], service_account: Path) -> Access:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
    token, namespace = service_account / "token", service_account / "namespace"
    if not token.exists():
        raise ConfigError("this pod has no service account token", where=str(token))
    return Access(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        origin=f"the pod's service account in {service_account}",
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        certificate_authority=service_account / "ca.crt",
        token_file=token,
    )


def _server_url(text: str, *, is_secure: bool, where: str) -> str:
    """Return the URL without a slash at its end. One without scheme is https where a CA is known, as in kubectl."""
    url = text if "://" in text else f"{'https' if is_secure else 'http'}://{text}"
    if not _is_http_url(url):
        raise ConfigError(f"{text!r} is no URL of an API server", where=where)
    return url.rstrip("/")


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port number, or brackets without their pair
        return False
