"""Arguments and configuration file to one `Config`, in the order in which kube-proxy takes them.

Without a file, flags change the defaults. With one, the file counts, and of the flags only those that outrank it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from userspace_proxy.cli.flags import FLAGS, Unused
from userspace_proxy.cli.pflag import parse
from userspace_proxy.core.config import DEFAULTS, Action, Config, KubeProxyConfiguration, field_at, with_field
from userspace_proxy.core.config_addresses import refuse_localhost
from userspace_proxy.core.config_file import Decoded, decode, with_default_addresses
from userspace_proxy.core.config_validation import Problem, problems, unused_settings
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.host_ports import with_port

_SERVERS = (("healthz-bind-address", "healthz-port"), ("metrics-bind-address", "metrics-port"))


def load_config(arguments: Sequence[str]) -> Config:
    """Return what the arguments, and the file that they name, ask for. Raises ConfigError, with the place.

    `--help` and `--version` are passed over. To read a changed file again, call it again.
    """
    values = parse(arguments)
    path = values.get("config", "")
    decoded = _decode_file(path) if path else None
    document = _from_file(decoded.document, values) if decoded else _from_flags(values)
    document = _with_host_name(document, values.get("hostname-override", ""))
    _refuse(list(problems(document)), values, decoded)
    action = _action(values)
    if action is Action.RUN:
        refuse_localhost(document.bind_address)
    return Config(
        document=document,
        action=action,
        config_file=path,
        write_config_to=values.get("write-config-to", ""),
        master=values.get("master", ""),
        warnings=(*(decoded.warnings if decoded else ()), *_warnings(document, values, path)),
    )


def _decode_file(path: str) -> Decoded:
    try:
        return decode(Path(path).read_bytes().decode(), path)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=path, subject="cannot be read") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError("failed to decode: no valid UTF-8", where=f"{path}:{line}") from error


def _from_file(document: KubeProxyConfiguration, values: Mapping[str, Any]) -> KubeProxyConfiguration:
    for name, value in values.items():
        flag = FLAGS[name]
        if flag.path and flag.outranks_file:
            added = field_at(document, flag.path) if name == "vmodule" else ()
            document = with_field(document, flag.path, (*value, *added) if added else value)
    return document


def _from_flags(values: Mapping[str, Any]) -> KubeProxyConfiguration:
    document = with_field(with_field(DEFAULTS, "healthzBindAddress", ""), "metricsBindAddress", "")
    for name, value in values.items():
        flag = FLAGS[name]
        if flag.path and not (name == "bind-address" and not value):
            document = with_field(document, flag.path, value)
    for address, port in _SERVERS:
        path, number = FLAGS[address].path, values.get(port)
        if number:
            document = with_field(document, path, with_port(field_at(document, path), number))
    document = with_default_addresses(document)
    for address, port in _SERVERS:
        if values.get(address) == "" or values.get(port) == 0:
            document = with_field(document, FLAGS[address].path, "")
    return document


def _with_host_name(document: KubeProxyConfiguration, override: str) -> KubeProxyConfiguration:
    if not override:
        return document
    if not override.strip():
        raise ConfigError("empty hostname-override is invalid", where="--hostname-override")
    return with_field(document, "hostnameOverride", override.strip().lower())


def _action(values: Mapping[str, Any]) -> Action:
    if values.get("write-config-to"):
        return Action.WRITE_CONFIG
    if values.get("cleanup"):
        return Action.CLEANUP
    return Action.INIT_ONLY if values.get("init-only") else Action.RUN


def _refuse(found: Sequence[Problem], values: Mapping[str, Any], decoded: Decoded | None) -> None:
    """Raise ConfigError for problems, each with the flag or the line of the file that causes it."""
    texts = []
    for problem in found:
        setting = problem.path.partition("[")[0]
        flags = [flag for name in values if (flag := FLAGS[name]).path == setting]
        if decoded and not (flags and flags[0].outranks_file):
            place = decoded.tree.where(problem.path)
        else:
            place = flags[0].spelled if flags else setting
        texts.append(f"{problem} ({place})")
    if texts:
        raise ConfigError(
            "failed validate: " + texts[0] if len(texts) == 1 else "\n  ".join(["failed validate:", *texts])
        )


def _warnings(document: KubeProxyConfiguration, values: Mapping[str, Any], path: str) -> list[str]:
    given = [FLAGS[name] for name in values]
    warnings = [f"{flag.spelled} is deprecated: {flag.deprecated}" for flag in given if flag.deprecated]
    for reason in Unused:
        if names := [flag.spelled for flag in given if flag.unused is reason]:
            warnings.append(f"accepted without effect, as they {reason.value}: {', '.join(names)}")
    if not path:
        return warnings
    ignored = [flag for flag in given if flag.deprecated or not flag.outranks_file]
    if names := [flag.spelled for flag in ignored if not flag.unused]:
        warnings.append(f"without effect, as the configuration comes from {path} (--config): {', '.join(names)}")
    if settings := unused_settings(document, DEFAULTS):
        warnings.append(f"{path}: accepted without effect, as they {Unused.OTHER_MODES.value}: {', '.join(settings)}")
    return warnings
