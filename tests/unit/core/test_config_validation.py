"""Rules of sense, in kube-proxy's words."""

from __future__ import annotations

from typing import Any

import pytest

from userspace_proxy.core.config import DEFAULTS, with_field
from userspace_proxy.core.config_validation import problems, unused_settings
from userspace_proxy.core.durations import Duration

OK_CIDR = "(e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"
DUAL = "must be a valid DualStack CIDR (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)"
NOT_NEGATIVE = "must be greater than or equal to 0"
POSITIVE = "must be greater than 0"
WITHIN_32 = "must be within the range [0, 31]"
WITHIN_1000 = "must be within the range [-1000, 1000]"
MIN_SYNC_PERIOD = "KubeProxyConfiguration.KubeProxyIPTablesConfiguration.MinSyncPeriod"


def texts(**fields: Any) -> list[str]:
    document = DEFAULTS
    for path, value in fields.items():
        document = with_field(document, path.replace("__", "."), value)
    return [str(problem).removeprefix("KubeProxyConfiguration.") for problem in problems(document)]


def test_the_defaults_make_sense() -> None:
    assert texts() == []


@pytest.mark.parametrize(
    ("path", "value", "subject", "shown", "detail"),
    [
        ("iptables__masqueradeBit", 32, "KubeProxyIPTablesConfiguration.MasqueradeBit", "32", WITHIN_32),
        ("iptables__masqueradeBit", -1, "KubeProxyIPTablesConfiguration.MasqueradeBit", "-1", WITHIN_32),
        ("iptables__minSyncPeriod", Duration(-1), "KubeProxyIPTablesConfiguration.MinSyncPeriod", "-1s", NOT_NEGATIVE),
        (
            "iptables__minSyncPeriod",
            Duration(60),
            "KubeProxyIPTablesConfiguration.SyncPeriod",
            "1m0s",
            f"must be greater than or equal to {MIN_SYNC_PERIOD}",
        ),
        ("conntrack__maxPerCore", -1, "KubeProxyConntrackConfiguration.MaxPerCore", "-1", NOT_NEGATIVE),
        ("conntrack__min", -1, "KubeProxyConntrackConfiguration.Min", "-1", NOT_NEGATIVE),
        (
            "conntrack__tcpEstablishedTimeout",
            Duration(-5),
            "KubeProxyConntrackConfiguration.TCPEstablishedTimeout",
            "-5s",
            NOT_NEGATIVE,
        ),
        (
            "conntrack__tcpCloseWaitTimeout",
            Duration(-5),
            "KubeProxyConntrackConfiguration.TCPCloseWaitTimeout",
            "-5s",
            NOT_NEGATIVE,
        ),
        ("conntrack__udpTimeout", Duration(-5), "KubeProxyConntrackConfiguration.UDPTimeout", "-5s", NOT_NEGATIVE),
        (
            "conntrack__udpStreamTimeout",
            Duration(-5),
            "KubeProxyConntrackConfiguration.UDPStreamTimeout",
            "-5s",
            NOT_NEGATIVE,
        ),
        ("mode", "fast", "Mode.ProxyMode", '"fast"', "must be userspace or blank (blank means userspace)"),
        ("clientConnection__burst", -1, "ClientConnection.Burst", "-1", NOT_NEGATIVE),
        ("oomScoreAdj", 1001, "OOMScoreAdj", "1001", WITHIN_1000),
        ("oomScoreAdj", -1001, "OOMScoreAdj", "-1001", WITHIN_1000),
        ("udpIdleTimeout", Duration(0), "UDPIdleTimeout", "0s", POSITIVE),
        ("udpIdleTimeout", Duration(-1), "UDPIdleTimeout", "-1s", POSITIVE),
        ("configSyncPeriod", Duration(-1), "ConfigSyncPeriod", "-1s", POSITIVE),
        (
            "bindAddress",
            "10.10.12.11:2000",
            "BindAddress",
            '"10.10.12.11:2000"',
            "not a valid textual representation of an IP address",
        ),
        ("healthzBindAddress", "0.0.0.0", "HealthzBindAddress", '"0.0.0.0"', "must be IP:port"),
        ("healthzBindAddress", "host:1", "HealthzBindAddress", '"host"', "must be a valid IP"),
        ("metricsBindAddress", "127.0.0.1:0", "MetricsBindAddress", '"0"', "must be a valid port"),
        ("clusterCIDR", "192.168.59.0", "ClusterCIDR", '"192.168.59.0"', f"must be a valid CIDR block {OK_CIDR}"),
        ("clusterCIDR", "10.0.0.0/8,10.1.0.0/16", "ClusterCIDR", '"10.0.0.0/8,10.1.0.0/16"', DUAL),
        ("clusterCIDR", "10.0.0.0/8,x", "ClusterCIDR", '"10.0.0.0/8,x"', DUAL),
        (
            "clusterCIDR",
            "10.0.0.0/8,fd00::/48,10.1.0.0/16",
            "ClusterCIDR",
            '"10.0.0.0/8,fd00::/48,10.1.0.0/16"',
            "only one CIDR allowed or a valid DualStack CIDR (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)",
        ),
        ("portRange", "300-200", "PortRange", '"300-200"', "must be a valid port range (e.g. 300-2000)"),
        ("nodePortAddresses", ("10.0.0.0/8", "10.0.0.1"), "NodePortAddresses[1]", '"10.0.0.1"', "must be a valid CIDR"),
        (
            "nodePortAddresses",
            ("10.0.0.0/8", "primary"),
            "NodePortAddresses[1]",
            '"primary"',
            "can't use both 'primary' and CIDRs",
        ),
        ("detectLocalMode", "BridgeInterface", "InterfaceName", '""', "must not be empty"),
        ("detectLocalMode", "InterfaceNamePrefix", "InterfacePrefix", '""', "must not be empty"),
        ("logging__format", "xml", "logging.format", '"xml"', "Unsupported log format"),
        ("userspaceProxy__maxConnections", -1, "userspaceProxy.maxConnections", "-1", NOT_NEGATIVE),
        ("userspaceProxy__halfCloseTimeout", Duration(0), "userspaceProxy.halfCloseTimeout", "0s", POSITIVE),
        (
            "userspaceProxy__listenBacklog",
            0,
            "userspaceProxy.listenBacklog",
            "0",
            "must be within the range [1, 65535]",
        ),
        ("userspaceProxy__workers", 0, "userspaceProxy.workers", "0", "must be a number of processes, or auto"),
        ("userspaceProxy__tcpUserTimeout", Duration(-1), "userspaceProxy.tcpUserTimeout", "-1s", NOT_NEGATIVE),
        (
            "userspaceProxy__tcpUserTimeout",
            Duration(30 * 24 * 3600),
            "userspaceProxy.tcpUserTimeout",
            "720h0m0s",
            "must be less than or equal to 576h0m0s",
        ),
        ("userspaceProxy__dialLadder", (), "userspaceProxy.dialLadder", "[]", "must have one time limit at least"),
        ("userspaceProxy__dialLadder", (Duration(1), Duration(0)), "userspaceProxy.dialLadder[1]", "0s", POSITIVE),
    ],
)
def test_a_senseless_value_is_named_as_kube_proxy_names_it(
    path: str, value: object, subject: str, shown: str, detail: str
) -> None:
    assert texts(**{path: value}) == [f"{subject}: Invalid value: {shown}: {detail}"]


def test_an_unknown_way_to_detect_local_traffic_is_refused_with_those_that_there_are() -> None:
    assert texts(detectLocalMode="Guess") == [
        'DetectLocalMode: Unsupported value: "Guess": supported values: '
        '"", "BridgeInterface", "ClusterCIDR", "InterfaceNamePrefix", "NodeCIDR"'
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mode", "userspace"),
        ("healthzBindAddress", ""),
        ("metricsBindAddress", "[::1]:10249"),
        ("clusterCIDR", "10.0.0.0/8,fd00::/48"),
        ("clusterCIDR", "fd00::/48"),
        ("portRange", "2000+100"),
        ("nodePortAddresses", ("primary",)),
        ("nodePortAddresses", ("10.0.0.0/8", "fd00::/8")),
        ("conntrack__maxPerCore", 0),
        ("detectLocalMode", "NodeCIDR"),
        ("iptables__minSyncPeriod", Duration(0)),
        ("userspaceProxy__workers", "auto"),
        ("logging__format", "json"),
    ],
)
def test_other_values_are_taken(path: str, value: object) -> None:
    assert texts(**{path: value}) == []


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables", "kernelspace"])
def test_another_mode_is_refused_with_what_to_use_instead(mode: str) -> None:
    (text,) = texts(mode=mode)
    assert text.startswith(f'Mode.ProxyMode: Invalid value: "{mode}": this proxy has the userspace mode alone')
    assert "run kube-proxy" in text


def test_hybrid_mode_needs_kernel_rules() -> None:
    assert texts(userspaceProxy__unidling="hybrid") == []
    (text,) = texts(userspaceProxy__unidling="hybrid", userspaceProxy__iptablesBackend="none")
    assert text.endswith('unidling: Invalid value: "hybrid": needs kernel rules: iptablesBackend must not be none')


def test_a_sync_period_below_zero_is_two_problems() -> None:
    assert [text.partition(":")[0] for text in texts(iptables__syncPeriod=Duration(-5))] == [
        "KubeProxyIPTablesConfiguration.SyncPeriod",
        "KubeProxyIPTablesConfiguration.SyncPeriod",
    ]


def test_what_was_set_for_other_modes_is_found() -> None:
    document = DEFAULTS
    for path, value in {
        "ipvs.scheduler": "rr",
        "iptables.masqueradeAll": True,
        "iptables.masqueradeBit": 3,
        "detectLocalMode": "NodeCIDR",
    }.items():
        document = with_field(document, path, value)
    assert unused_settings(document, DEFAULTS) == [
        "detectLocalMode",
        "iptables.masqueradeAll",
        "iptables.masqueradeBit",
        "ipvs",
    ]
    assert unused_settings(DEFAULTS, DEFAULTS) == []
