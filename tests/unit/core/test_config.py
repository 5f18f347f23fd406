"""The configuration as values."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from userspace_proxy.core.config import (
    DEFAULTS,
    Config,
    choices_of,
    field_at,
    fields_of,
    wire_name,
    with_field,
)
from userspace_proxy.core.config_changes import APPLICABLE, WITHOUT_EFFECT, changes, taken_up
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.model import ListenAddress


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("mode", "mode"),
        ("udp_idle_timeout", "udpIdleTimeout"),
        ("cluster_cidr", "clusterCIDR"),
        ("exclude_cidrs", "excludeCIDRs"),
        ("strict_arp", "strictARP"),
        ("enable_dsr", "enableDSR"),
        ("source_vip", "sourceVip"),
        ("snat_node_internal_ip", "snatNodeInternalIP"),
    ],
)
def test_a_name_is_written_as_in_kube_proxy(name: str, written: str) -> None:
    assert wire_name(name) == written


def test_one_field_is_changed_and_the_rest_stays() -> None:
    changed = with_field(DEFAULTS, "iptables.syncPeriod", Duration(5))
    assert field_at(changed, "iptables.syncPeriod") == 5
    assert with_field(changed, "iptables.syncPeriod", Duration(30)) == DEFAULTS
    with pytest.raises(KeyError):
        field_at(DEFAULTS, "iptables.nonsense")


def test_every_field_has_a_path() -> None:
    paths = dict(fields_of(DEFAULTS))
    assert paths["userspaceProxy.workers"] == 1
    assert all(field_at(DEFAULTS, path) == value for path, value in paths.items())


def test_the_words_that_a_field_takes_are_known() -> None:
    assert choices_of("userspaceProxy.unidling") == ("off", "on", "hybrid")
    assert [choices_of(path) for path in ("mode", "nonsense", "mode.x", "userspaceProxy.nonsense", "")] == [()] * 5


def test_a_config_knows_its_addresses_and_ports() -> None:
    config = Config()
    assert config.healthz_address == ListenAddress("0.0.0.0", 10256)
    assert config.metrics_address == ListenAddress("127.0.0.1", 10249)
    assert config.proxy_ports is None
    assert config.cluster_networks == ()
    assert not config.node_ports_on_primary
    assert config.own.unidling == "on"


def test_a_config_of_other_values_knows_those() -> None:
    document = DEFAULTS
    for path, value in {
        "healthzBindAddress": "",
        "metricsBindAddress": "[::1]:1",
        "portRange": "10-11",
        "clusterCIDR": "10.0.0.0/8,fd00::/8",
        "nodePortAddresses": ("primary",),
    }.items():
        document = with_field(document, path, value)
    config = Config(document=document)
    assert config.healthz_address is None
    assert config.metrics_address == ListenAddress("::1", 1)
    assert config.proxy_ports == range(10, 12)
    assert config.cluster_networks == (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
    assert config.node_ports_on_primary


def test_in_hybrid_mode_the_ports_of_kube_proxy_are_left_to_the_other_one() -> None:
    document = with_field(DEFAULTS, "userspaceProxy.unidling", "hybrid")
    config = Config(document=document)
    assert config.is_hybrid
    assert config.healthz_address == ListenAddress("0.0.0.0", 10356)
    assert config.metrics_address == ListenAddress("127.0.0.1", 10349)
    for path, text in (("healthzBindAddress", "[::]:1234"), ("metricsBindAddress", "")):
        document = with_field(document, path, text)
    chosen = Config(document=document)
    assert chosen.healthz_address == ListenAddress("::", 1234)
    assert chosen.metrics_address is None


def test_a_change_is_applicable_needs_a_restart_or_has_no_effect() -> None:
    wanted = DEFAULTS
    for path, value in {
        "udpIdleTimeout": Duration(1),
        "userspaceProxy.maxConnections": 5,
        "bindAddress": "10.0.0.1",
        "userspaceProxy.workers": 2,
        "ipvs.scheduler": "rr",
        "featureGates": {"A": True},
        "detectLocalMode": "NodeCIDR",
    }.items():
        wanted = with_field(wanted, path, value)
    found = changes(DEFAULTS, wanted)
    assert found.applicable == ("udpIdleTimeout", "userspaceProxy.maxConnections")
    assert found.needs_restart == ("bindAddress", "userspaceProxy.workers")
    assert found
    running = taken_up(DEFAULTS, wanted)
    assert changes(running, wanted).applicable == ()
    assert changes(running, wanted).needs_restart == found.needs_restart


def test_no_change_is_none() -> None:
    assert not changes(DEFAULTS, DEFAULTS)


def test_the_lists_of_fields_name_fields_that_there_are() -> None:
    paths = [path for path, _ in fields_of(DEFAULTS)]
    assert set(paths) >= APPLICABLE
    assert all(any(path.startswith(beginning) for path in paths) for beginning in WITHOUT_EFFECT)
    assert not any(path.startswith(WITHOUT_EFFECT) for path in APPLICABLE)
