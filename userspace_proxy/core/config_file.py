"""The configuration file: text to document and back.

Decoding follows kube-proxy: strict first; unknown and duplicate fields alone lead to a lenient second reading and one
warning that names them; anything else that is wrong is an error with file, line and field.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import yaml

from userspace_proxy.core.config import (
    API_VERSION,
    DEFAULTS,
    HEALTHZ_PORT,
    KIND,
    METRICS_PORT,
    OWN_KEY,
    KubeProxyConfiguration,
    Section,
    choices_of,
    field_at,
    with_field,
)
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.host_ports import with_port
from userspace_proxy.core.model import IPFamily, family_of
from userspace_proxy.core.yaml_reader import plain_value
from userspace_proxy.core.yaml_tree import Tree, read

RETIRED: Final = frozenset({"resourceContainer", "conntrack.max"})
"""Fields that kube-proxy once had. The warning about unknown fields says so."""

ZERO_MEANS_DEFAULT: Final = (
    "bindAddress",
    "clientConnection.burst",
    "clientConnection.contentType",
    "clientConnection.qps",
    "configSyncPeriod",
    "iptables.minSyncPeriod",
    "iptables.syncPeriod",
    "ipvs.syncPeriod",
    "logging.flushFrequency",
    "logging.format",
    "nftables.minSyncPeriod",
    "nftables.syncPeriod",
    "udpIdleTimeout",
)
"""Fields of a file for which empty and zero are the same as not being there. Source: kube-proxy's SetDefaults."""

UNWRITTEN: Final = (
    "conntrack.tcpBeLiberal",
    "conntrack.udpStreamTimeout",
    "conntrack.udpTimeout",
    "iptables.localhostNodePorts",
    "iptables.snatNodeInternalIP",
    "logging",
    "nftables",
    "windowsRunAsService",
)
"""Fields that kube-proxy 1.25 does not know. They are read, and never written."""

_NULL_WHEN_EMPTY = ("ipvs.excludeCIDRs", "nodePortAddresses")
_TYPE_ERROR = re.compile(r"(?P<reason>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)


class _Dumper(yaml.SafeDumper):
    """Quotes text as kube-proxy does: what is empty, and what would be read as something else."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    needs_quotes = not text or not isinstance(plain_value(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if needs_quotes else None)


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A document that was read. `tree` knows the lines of its fields."""

    document: KubeProxyConfiguration
    warnings: tuple[str, ...]
    tree: Tree


def decode(text: str, origin: str) -> Decoded:
    """Return the document that a file holds, completed with the defaults. Raises ConfigError.

    `origin` is the file's name. Values that have the right type but make no sense are left to `validation`.
    """
    tree = read(text, origin)
    data = _of_our_kind(tree)
    warnings = [_lenience(tree, unknown)] if (unknown := list(_unknown(data, KubeProxyConfiguration))) else []
    if not unknown and tree.duplicates:
        warnings.append(_lenience(tree, []))
    if tree.has_more:
        warnings.append(f"{origin} has several documents, of which only the first is read")
    data = {"healthzBindAddress": "", "metricsBindAddress": "", **_with_text_durations(data)}
    try:
        document = msgspec.convert(data, KubeProxyConfiguration, dec_hook=_decode_special)
    except msgspec.ValidationError as error:
        raise _type_error(error, tree) from None
    return Decoded(_completed(document), tuple(warnings), tree)


def encode(document: KubeProxyConfiguration) -> str:
    """Return the document as kube-proxy 1.25 writes it, so that it reads it back.

    Our own settings are written only where they are not the defaults, as kube-proxy would warn about them.
    """
    data = as_mapping(document)
    for path in UNWRITTEN:
        _remove(data, path)
    for path in _NULL_WHEN_EMPTY:
        if not field_at(document, path):
            _put(data, path, None)
    if not data["featureGates"]:
        del data["featureGates"]
    defaults = as_mapping(DEFAULTS)[OWN_KEY]
    data[OWN_KEY] = {name: value for name, value in data[OWN_KEY].items() if value != defaults[name]}
    if not data[OWN_KEY]:
        del data[OWN_KEY]
    return yaml.dump(data, Dumper=_Dumper, default_flow_style=False, width=2**31)


def as_mapping(document: KubeProxyConfiguration) -> dict[str, Any]:
    """Return every field as a file or `/configz` has it: names in camel case, durations as text."""
    data: dict[str, Any] = msgspec.to_builtins(document, enc_hook=str)
    if isinstance(data["clientConnection"]["qps"], float) and data["clientConnection"]["qps"].is_integer():
        data["clientConnection"]["qps"] = int(data["clientConnection"]["qps"])
    return {**_plain(data), "apiVersion": API_VERSION, "kind": KIND}


def with_default_addresses(document: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Return the document with health and metrics addresses where there are none, and ports where they lack.

    The family is that of the bind address.
    """
    is_v6 = family_of(document.bind_address) is IPFamily.IPV6
    health, metrics = ("[::]", "[::1]") if is_v6 else ("0.0.0.0", "127.0.0.1")
    return msgspec.structs.replace(
        document,
        healthz_bind_address=with_port(document.healthz_bind_address or f"{health}:{HEALTHZ_PORT}", HEALTHZ_PORT),
        metrics_bind_address=with_port(document.metrics_bind_address or f"{metrics}:{METRICS_PORT}", METRICS_PORT),
    )


def _of_our_kind(tree: Tree) -> dict[str, Any]:
    """Return the fields of a KubeProxyConfiguration v1alpha1 without its type. Raises ConfigError for anything else."""
    if tree.value is None:
        raise ConfigError(f"the file is empty: a {KIND} is needed", where=tree.origin)
    if not isinstance(tree.value, dict):
        raise ConfigError(f"failed to decode: the file is no mapping of fields, as a {KIND} is", where=tree.where())
    data = dict(tree.value)
    api_version, kind = data.pop("apiVersion", None), data.pop("kind", None)
    for name, value in (("kind", kind), ("apiVersion", api_version)):
        if not value or not isinstance(value, str):
            reason = f"failed to decode: Object '{name.capitalize() if name == 'kind' else name}' is missing"
            raise ConfigError(reason, where=tree.where(name), field=name)
    if (api_version, kind) != (API_VERSION, KIND):
        field = "kind" if kind != KIND else "apiVersion"
        reason = f"got unexpected config type: {api_version}, Kind={kind}; it must be {API_VERSION}, Kind={KIND}"
        raise ConfigError(reason, where=tree.where(field), field=field)
    return data


def _unknown(data: dict[str, Any], section: type[Section], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each field that there is no such, with the names that were perhaps meant."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(section)}
    for name, value in data.items():
        if name not in fields:
            yield prefix + name, difflib.get_close_matches(name, fields, n=1)
        elif isinstance(value, dict) and isinstance(fields[name], type) and issubclass(fields[name], Section):
            yield from _unknown(value, fields[name], f"{prefix}{name}.")


def _lenience(tree: Tree, unknown: list[tuple[str, list[str]]]) -> str:
    parts = []
    for path, meant in unknown:
        hint = "no longer in use" if path in RETIRED else f"did you mean {meant[0]}?" if meant else ""
        parts.append(f'unknown field "{path}" at {tree.where(path)}' + (f" ({hint})" if hint else ""))
    for path in dict.fromkeys(tree.duplicates):
        parts.append(f'duplicate field "{path}" at {tree.where(path)} (the last one counts)')
    return "Using lenient decoding as strict decoding failed: " + ", ".join(parts)


def _with_text_durations(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with `logging.flushFrequency` as text: it is the one duration that may be nanoseconds."""
    logging = data.get("logging")
    if not isinstance(logging, dict) or type(logging.get("flushFrequency")) is not int:
        return data
    return {**data, "logging": {**logging, "flushFrequency": f"{logging['flushFrequency']}ns"}}


def _decode_special(wanted: type, value: object) -> object:
    if wanted is not Duration:  # pragma: no cover (a mistake in config.py)
        raise NotImplementedError(wanted)
    if not isinstance(value, str):
        raise ValueError(f"Expected a duration such as `30s`, got `{type(value).__name__}`")
    try:
        return Duration.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _type_error(error: msgspec.ValidationError, tree: Tree) -> ConfigError:
    found = _TYPE_ERROR.fullmatch(str(error))
    reason, path = (found["reason"], found["path"] or "") if found else (str(error), "")
    path = path.replace("[...]", "")
    reason = reason[:1].lower() + reason[1:].replace("`", "")
    if choices := choices_of(path):
        reason += f", it must be one of {', '.join(choices)}"
    return ConfigError(f"failed to decode: {reason}", where=tree.where(path), field=path)


def _completed(document: KubeProxyConfiguration) -> KubeProxyConfiguration:
    for path in ZERO_MEANS_DEFAULT:
        if not field_at(document, path):
            document = with_field(document, path, field_at(DEFAULTS, path))
    return with_default_addresses(document)


def _plain(value: Any) -> Any:
    """Return lists for tuples, which YAML has no plain form for."""
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value


def _remove(data: dict[str, Any], path: str) -> None:
    *outer, last = path.split(".")
    for name in outer:
        data = data[name]
    del data[last]


def _put(data: dict[str, Any], path: str, value: object) -> None:
    *outer, last = path.split(".")
    for name in outer:
        data = data[name]
    data[last] = value
