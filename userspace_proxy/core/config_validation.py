"""Whether a configuration makes sense: each rule of kube-proxy 1.25, in its order and its words, and those for ours.

A rule is a few lines of `problems`. Rules for other modes are left out, as those modes are refused anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from userspace_proxy.core.config import (
    KIND,
    Conntrack,
    IPTables,
    KubeProxyConfiguration,
    OwnSettings,
)
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.host_ports import (
    PRIMARY,
    family_of_cidr,
    is_address,
    parse_port_range,
    split_host_port,
)
from userspace_proxy.core.limits import MAX_BACKLOG, MAX_USER_TIMEOUT_S

OTHER_MODES: Final = {
    "iptables": "run kube-proxy itself",
    "ipvs": "run kube-proxy itself, where it still has that mode",
    "nftables": "run kube-proxy 1.29 or later",
    "kernelspace": "run kube-proxy for Windows",
}
"""The modes of kube-proxy that this proxy does not have, and what to do for them."""

_POSITIVE = "must be greater than 0"
_NOT_NEGATIVE = "must be greater than or equal to 0"
_LOCAL_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", "")


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting that makes no sense.

    `path` is where it stands in the file, such as `iptables.syncPeriod`; `subject` is kube-proxy's name for it,
    without the leading `KubeProxyConfiguration`.
    """

    path: str
    subject: str
    value: object
    detail: str
    kind: str = "Invalid value"

    def __str__(self) -> str:
        return f"{KIND}.{self.subject}: {self.kind}: {_as_go_prints(self.value)}: {self.detail}"


def problems(document: KubeProxyConfiguration) -> Iterator[Problem]:
    """Yield all that is wrong with the document, in kube-proxy's order."""
    yield from _iptables(document.iptables)
    yield from _conntrack(document.conntrack)
    yield from _mode(document.mode)
    connection = document.client_connection
    if connection.burst < 0:
        yield Problem("clientConnection.burst", "ClientConnection.Burst", connection.burst, _NOT_NEGATIVE)
    if not -1000 <= document.oom_score_adj <= 1000:
        detail = "must be within the range [-1000, 1000]"
        yield Problem("oomScoreAdj", "OOMScoreAdj", document.oom_score_adj, detail)
    if document.udp_idle_timeout <= 0:
        yield Problem("udpIdleTimeout", "UDPIdleTimeout", document.udp_idle_timeout, _POSITIVE)
    if document.config_sync_period <= 0:
        yield Problem("configSyncPeriod", "ConfigSyncPeriod", document.config_sync_period, _POSITIVE)
    if not is_address(document.bind_address):
        detail = "not a valid textual representation of an IP address"
        yield Problem("bindAddress", "BindAddress", document.bind_address, detail)
    yield from _host_port("healthzBindAddress", "HealthzBindAddress", document.healthz_bind_address)
    yield from _host_port("metricsBindAddress", "MetricsBindAddress", document.metrics_bind_address)
    yield from _cluster_cidr(document.cluster_cidr)
    try:
        parse_port_range(document.port_range)
    except ValueError:
        detail = "must be a valid port range (e.g. 300-2000)"
        yield Problem("portRange", "PortRange", document.port_range, detail)
    yield from _node_port_addresses(document.node_port_addresses)
    yield from _detect_local(document)
    if document.logging.format not in ("text", "json"):
        yield Problem("logging.format", "logging.format", document.logging.format, "Unsupported log format")
    yield from _own(document.userspace_proxy)


def unused_settings(document: KubeProxyConfiguration, defaults: KubeProxyConfiguration) -> list[str]:
    """Return the paths of what was set for other modes, and has no effect in this one."""
    sections = ("ipvs", "nftables", "winkernel", "detect_local")
    paths = [section for section in sections if getattr(document, section) != getattr(defaults, section)]
    for name, path in (("masquerade_all", "iptables.masqueradeAll"), ("masquerade_bit", "iptables.masqueradeBit")):
        if getattr(document.iptables, name) != getattr(defaults.iptables, name):
            paths.append(path)
    return sorted([*paths, *(["detectLocalMode"] if document.detect_local_mode else [])])


def _iptables(iptables: IPTables) -> Iterator[Problem]:
    subject = "KubeProxyIPTablesConfiguration"
    if not 0 <= iptables.masquerade_bit <= 31:
        detail = "must be within the range [0, 31]"
        yield Problem("iptables.masqueradeBit", f"{subject}.MasqueradeBit", iptables.masquerade_bit, detail)
    if iptables.sync_period <= 0:
        yield Problem("iptables.syncPeriod", f"{subject}.SyncPeriod", iptables.sync_period, _POSITIVE)
    if iptables.min_sync_period < 0:
        yield Problem("iptables.minSyncPeriod", f"{subject}.MinSyncPeriod", iptables.min_sync_period, _NOT_NEGATIVE)
    if iptables.min_sync_period > iptables.sync_period:
        detail = f"must be greater than or equal to {KIND}.{subject}.MinSyncPeriod"
        yield Problem("iptables.syncPeriod", f"{subject}.SyncPeriod", iptables.min_sync_period, detail)


def _conntrack(conntrack: Conntrack) -> Iterator[Problem]:
    for name, capital, value in (
        ("maxPerCore", "MaxPerCore", conntrack.max_per_core),
        ("min", "Min", conntrack.min),
        ("tcpEstablishedTimeout", "TCPEstablishedTimeout", conntrack.tcp_established_timeout),
        ("tcpCloseWaitTimeout", "TCPCloseWaitTimeout", conntrack.tcp_close_wait_timeout),
        ("udpTimeout", "UDPTimeout", conntrack.udp_timeout),
        ("udpStreamTimeout", "UDPStreamTimeout", conntrack.udp_stream_timeout),
    ):
        if value < 0:
            yield Problem(f"conntrack.{name}", f"KubeProxyConntrackConfiguration.{capital}", value, _NOT_NEGATIVE)


def _mode(mode: str) -> Iterator[Problem]:
    if mode in OTHER_MODES:
        detail = f"this proxy has the userspace mode alone; for {mode}, {OTHER_MODES[mode]}"
        yield Problem("mode", "Mode.ProxyMode", mode, detail)
    elif mode not in ("", "userspace"):
        yield Problem("mode", "Mode.ProxyMode", mode, "must be userspace or blank (blank means userspace)")


def _host_port(path: str, subject: str, text: str) -> Iterator[Problem]:
    try:
        if text:
            split_host_port(text)
    except ValueError as error:
        detail, value = error.args
        yield Problem(path, subject, value, detail)


def _cluster_cidr(text: str) -> Iterator[Problem]:
    """Source: kube-proxy 1.25, which has dual stack always on."""
    families = [family_of_cidr(cidr) for cidr in text.split(",")] if text else []
    if len(families) > 2:
        detail = "only one CIDR allowed or a valid DualStack CIDR (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)"
    elif len(families) == 2 and (None in families or len(set(families)) < 2):
        detail = "must be a valid DualStack CIDR (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)"
    elif families == [None]:
        detail = "must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"
    else:
        return
    yield Problem("clusterCIDR", "ClusterCIDR", text, detail)


def _node_port_addresses(addresses: tuple[str, ...]) -> Iterator[Problem]:
    """Source: kube-proxy 1.31, as 1.25 does not know `primary`."""
    for index, address in enumerate(addresses):
        path, subject = f"nodePortAddresses[{index}]", f"NodePortAddresses[{index}]"
        if address == PRIMARY:
            if len(addresses) > 1:
                yield Problem(path, subject, address, "can't use both 'primary' and CIDRs")
            break
        if family_of_cidr(address) is None:
            yield Problem(path, subject, address, "must be a valid CIDR")


def _detect_local(document: KubeProxyConfiguration) -> Iterator[Problem]:
    mode, local = document.detect_local_mode, document.detect_local
    if mode not in _LOCAL_MODES:
        detail = "supported values: " + ", ".join(json.dumps(mode) for mode in sorted(_LOCAL_MODES))
        yield Problem("detectLocalMode", "DetectLocalMode", mode, detail, "Unsupported value")
    if mode == "BridgeInterface" and not local.bridge_interface:
        yield Problem("detectLocal.bridgeInterface", "InterfaceName", local.bridge_interface, "must not be empty")
    if mode == "InterfaceNamePrefix" and not local.interface_name_prefix:
        prefix = local.interface_name_prefix
        yield Problem("detectLocal.interfaceNamePrefix", "InterfacePrefix", prefix, "must not be empty")


def _own(own: OwnSettings) -> Iterator[Problem]:
    def problem(name: str, value: object, detail: str) -> Problem:
        return Problem(f"userspaceProxy.{name}", f"userspaceProxy.{name}", value, detail)

    for name, limit in (
        ("maxConnections", own.max_connections),
        ("maxConnectionsPerServicePort", own.max_connections_per_service_port),
        ("maxUdpSessions", own.max_udp_sessions),
        ("metricsPortLimit", own.metrics_port_limit),
        ("tcpIdleTimeout", own.tcp_idle_timeout),
        ("tcpUserTimeout", own.tcp_user_timeout),
    ):
        if limit < 0:
            yield problem(name, limit, _NOT_NEGATIVE)
    for name, amount in (
        ("halfCloseTimeout", own.half_close_timeout),
        ("unidlingHoldTimeout", own.unidling_hold_timeout),
        ("unidlingMaxConnections", own.unidling_max_connections),
    ):
        if amount <= 0:
            yield problem(name, amount, _POSITIVE)
    if not 1 <= own.listen_backlog <= MAX_BACKLOG:
        yield problem("listenBacklog", own.listen_backlog, f"must be within the range [1, {MAX_BACKLOG}]")
    if own.unidling == "hybrid" and own.iptables_backend == "none":
        yield problem("unidling", own.unidling, "needs kernel rules: iptablesBackend must not be none")
    if own.workers != "auto" and own.workers < 1:
        yield problem("workers", own.workers, "must be a number of processes, or auto")
    if own.tcp_user_timeout > MAX_USER_TIMEOUT_S:
        longest = Duration(MAX_USER_TIMEOUT_S)
        yield problem("tcpUserTimeout", own.tcp_user_timeout, f"must be less than or equal to {longest}")
    if not own.dial_ladder:
        yield problem("dialLadder", own.dial_ladder, "must have one time limit at least")
    for index, limit_s in enumerate(own.dial_ladder):
        if limit_s <= 0:
            yield problem(f"dialLadder[{index}]", limit_s, _POSITIVE)


def _as_go_prints(value: object) -> str:
    match value:
        case Duration():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case tuple():
            return "[" + ", ".join(map(_as_go_prints, value)) + "]"
        case _:
            return str(value)
