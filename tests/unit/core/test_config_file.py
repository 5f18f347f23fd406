"""The configuration file, read and written."""

from __future__ import annotations

import json

import pytest

from tests.unit.core.configs import HEADER, golden
from userspace_proxy.core.config import DEFAULTS, OwnSettings, field_at, with_field
from userspace_proxy.core.config_file import UNWRITTEN, as_mapping, decode, encode
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.errors import ConfigError


def test_the_defaults_are_written_byte_for_byte_as_kube_proxy_1_25_does() -> None:
    assert encode(DEFAULTS) == golden("default-config.yaml")


def test_what_kube_proxy_1_25_writes_is_the_defaults() -> None:
    decoded = decode(golden("default-config.yaml"), "kube-proxy.yaml")
    assert decoded.document == DEFAULTS
    assert decoded.warnings == ()


def test_the_empty_fields_of_kubeadm_mean_the_defaults_without_a_warning() -> None:
    decoded = decode(golden("kubeadm-config.yaml"), "config.conf")
    wanted = with_field(DEFAULTS, "clientConnection.kubeconfig", "/var/lib/kube-proxy/kubeconfig.conf")
    wanted = with_field(wanted, "clusterCIDR", "10.244.0.0/16")
    options = {"json": {"infoBufferSize": "0"}, "text": {"infoBufferSize": "0"}}
    assert decoded.document == with_field(wanted, "logging.options", options)
    assert decoded.warnings == ()


def test_case_75_an_unknown_field_is_one_warning_and_the_rest_is_used() -> None:
    text = HEADER + "metadata:\n  name: config\nresourceContainer: /kube-proxy\nudpIdleTimeout: 1s\n"
    decoded = decode(text, "config.conf")
    (warning,) = decoded.warnings
    assert warning == (
        "Using lenient decoding as strict decoding failed: "
        'unknown field "metadata" at config.conf:3, '
        'unknown field "resourceContainer" at config.conf:5 (no longer in use)'
    )
    assert decoded.document.udp_idle_timeout == 1.0


def test_a_field_that_is_there_twice_is_named_and_the_last_one_counts() -> None:
    decoded = decode(HEADER + "mode: iptables\nconntrack: {min: 1, min: 2}\nmode: userspace\n", "f")
    (warning,) = decoded.warnings
    assert 'duplicate field "conntrack.min" at f:4' in warning
    assert 'duplicate field "mode" at f:5' in warning
    assert (decoded.document.mode, decoded.document.conntrack.min) == ("userspace", 2)


def test_unknown_and_duplicate_fields_share_one_warning_with_what_was_perhaps_meant() -> None:
    decoded = decode(HEADER + "iptables:\n  synchPeriod: 1s\nmode: ''\nmode: ''\n", "f")
    (warning,) = decoded.warnings
    assert 'unknown field "iptables.synchPeriod" at f:4 (did you mean syncPeriod?)' in warning
    assert 'duplicate field "mode" at f:6' in warning


@pytest.mark.parametrize(
    ("fields", "place", "reason"),
    [
        ("oomScoreAdj: high", "f:3: oomScoreAdj", "expected int, got str"),
        ("oomScoreAdj: 2147483648", "f:3: oomScoreAdj", "expected int <= 2147483647"),
        ("iptables:\n  masqueradeAll: 1", "f:4: iptables.masqueradeAll", "expected bool, got int"),
        ("iptables: []", "f:3: iptables", "expected object, got array"),
        ("bindAddress: 1", "f:3: bindAddress", "expected str, got int"),
        ("nodePortAddresses:\n- 10.0.0.0/8\n- 5", "f:5: nodePortAddresses[1]", "expected str, got int"),
        ("featureGates: {A: maybe}", "f:3: featureGates", "expected bool, got str"),
        ("udpIdleTimeout: '5'", "f:3: udpIdleTimeout", "'5' is not a duration such as 250ms, 30s or 1h30m; it needs"),
        ("udpIdleTimeout: 5", "f:3: udpIdleTimeout", "expected a duration such as 30s, got int"),
        ("logging: {flushFrequency: true}", "f:3: logging.flushFrequency", "expected a duration"),
        ("userspaceProxy:\n  ruleStyle: pretty", "f:4: userspaceProxy.ruleStyle", "one of faithful, dnat"),
        ("userspaceProxy: {dialLadder: [1s, soon]}", "f:3: userspaceProxy.dialLadder[1]", "'soon' is not a duration"),
    ],
)
def test_a_wrong_type_is_an_error_with_file_line_and_field(fields: str, place: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(HEADER + fields, "f")
    assert str(caught.value).startswith(f"{place}: failed to decode: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: the file is empty"),
        ("# nothing\n---\n", "f: the file is empty"),
        ("- a\n", "f:1: failed to decode: the file is no mapping"),
        ("just text", "f:1: failed to decode: the file is no mapping"),
        ("mode: ''\n", "f:1: kind: failed to decode: Object 'Kind' is missing"),
        ("\nkind: KubeProxyConfiguration\n", "f:2: apiVersion: failed to decode: Object 'apiVersion' is missing"),
        ("apiVersion: v1\nkind: Pod\n", "f:2: kind: got unexpected config type: v1, Kind=Pod"),
        (
            "apiVersion: kubeproxy.config.k8s.io/v1beta1\nkind: KubeProxyConfiguration\n",
            "f:1: apiVersion: got unexpected config type: kubeproxy.config.k8s.io/v1beta1",
        ),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(text, "f")
    assert str(caught.value).startswith(message)


def test_an_error_of_the_whole_has_no_field() -> None:
    with pytest.raises(ConfigError, match=r"^f:2: failed to decode: no valid YAML"):
        decode("a: 1\nb: [", "f")


def test_further_documents_are_not_read_and_that_is_said() -> None:
    decoded = decode(HEADER + "---\nmode: ipvs\n", "f")
    assert decoded.document == DEFAULTS
    assert decoded.warnings == ("f has several documents, of which only the first is read",)


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ("udpIdleTimeout: 0s", "udpIdleTimeout", 0.25),
        ("udpIdleTimeout: 1h0m0s", "udpIdleTimeout", 3600.0),
        ("udpIdleTimeout: 1.5h", "udpIdleTimeout", 5400.0),
        ("udpIdleTimeout: 250ms", "udpIdleTimeout", 0.25),
        ("udpIdleTimeout: -1s", "udpIdleTimeout", -1.0),
        ("configSyncPeriod: 0s", "configSyncPeriod", 900.0),
        ("iptables: {syncPeriod: 0s, minSyncPeriod: '0'}", "iptables.minSyncPeriod", 1.0),
        ("conntrack: {tcpEstablishedTimeout: 0s}", "conntrack.tcpEstablishedTimeout", 0.0),
        ("conntrack: {maxPerCore: 0}", "conntrack.maxPerCore", 0),
        ("oomScoreAdj: 0", "oomScoreAdj", 0),
        ("clientConnection: {qps: 0, burst: 0}", "clientConnection.qps", 5.0),
        ("bindAddress: ''", "bindAddress", "0.0.0.0"),
        ("logging: {flushFrequency: 3000000000}", "logging.flushFrequency", 3.0),
        ("logging: {flushFrequency: 3s}", "logging.flushFrequency", 3.0),
        ("mode: null", "mode", ""),
        ("healthzBindAddress: 10.0.0.1", "healthzBindAddress", "10.0.0.1:10256"),
        ("healthzBindAddress: ''", "healthzBindAddress", "0.0.0.0:10256"),
        ("bindAddress: '::'", "healthzBindAddress", "[::]:10256"),
        ("bindAddress: 'fd00::1'", "metricsBindAddress", "[::1]:10249"),
        ("metricsBindAddress: '::'", "metricsBindAddress", "[::]:10249"),
        ("metricsBindAddress: localhost:10249", "metricsBindAddress", "localhost:10249"),
        ("nodePortAddresses: [primary]", "nodePortAddresses", ("primary",)),
        ("userspaceProxy: {workers: auto}", "userspaceProxy.workers", "auto"),
        ("userspaceProxy: {workers: 4}", "userspaceProxy.workers", 4),
        ("userspaceProxy: {wake: {scale: true}}", "userspaceProxy.wake.scale", True),
        ("iptables: {localhostNodePorts: false}", "iptables.localhostNodePorts", False),
        ("iptables: {snatNodeInternalIP: true}", "iptables.snatNodeInternalIP", True),
        ("conntrack: {tcpBeLiberal: true}", "conntrack.tcpBeLiberal", True),
        ("conntrack: {udpTimeout: 9s}", "conntrack.udpTimeout", 9.0),
        ("logging: {vmodule: [{filePattern: a, verbosity: 3}], format: json}", "logging.format", "json"),
        ("nftables: {masqueradeBit: 3}", "nftables.masqueradeBit", 3),
        ("windowsRunAsService: true", "windowsRunAsService", True),
        ("featureGates: {SomeGate: true}", "featureGates", {"SomeGate": True}),
        ("portRange: 2000-3000", "portRange", "2000-3000"),
    ],
)
def test_a_field_is_read_and_empty_or_zero_mean_what_they_mean_to_kube_proxy(
    fields: str, path: str, value: object
) -> None:
    decoded = decode(HEADER + fields, "f")
    assert field_at(decoded.document, path) == value
    assert decoded.warnings == ()


def test_own_settings_are_written_only_where_they_are_not_the_defaults() -> None:
    document = with_field(DEFAULTS, "userspaceProxy", OwnSettings(workers=2, dial_ladder=(Duration(0.5),)))
    document = with_field(document, "featureGates", {"A": True})
    text = encode(document)
    assert "userspaceProxy:\n  dialLadder:\n  - 500ms\n  workers: 2\n" in text
    assert "featureGates:\n  A: true\n" in text
    assert decode(text, "f").document == document


def test_fields_that_kube_proxy_1_25_does_not_know_are_never_written() -> None:
    document = with_field(DEFAULTS, "conntrack.tcpBeLiberal", True)
    document = with_field(document, "logging.verbosity", 4)
    assert encode(document) == encode(DEFAULTS)
    assert all(path.rpartition(".")[2] + ":" not in encode(document).split() for path in UNWRITTEN if "udp" not in path)


def test_lists_are_null_when_empty_and_lists_otherwise() -> None:
    assert "nodePortAddresses: null\n" in encode(DEFAULTS)
    document = with_field(DEFAULTS, "nodePortAddresses", ("10.0.0.0/8", "fd00::/8"))
    assert "nodePortAddresses:\n- 10.0.0.0/8\n- fd00::/8\n" in encode(document)
    assert decode(encode(document), "f").document == document


def test_a_rate_with_a_fraction_stays_one() -> None:
    assert "qps: 2.5\n" in encode(with_field(DEFAULTS, "clientConnection.qps", 2.5))


def test_every_field_is_in_the_mapping_for_machines_with_durations_as_text() -> None:
    data = as_mapping(DEFAULTS)
    assert json.loads(json.dumps(data)) == data
    assert data["udpIdleTimeout"] == "250ms"
    assert data["userspaceProxy"]["dialLadder"] == ["250ms", "500ms", "1s", "2s"]
    assert data["kind"] == "KubeProxyConfiguration"


@pytest.mark.parametrize("text", ["", "0E0", "12", ".5", "0o7", "yes", "null", "~", "a: b"])
def test_text_that_looks_like_something_else_is_written_so_that_it_is_read_back(text: str) -> None:
    document = with_field(DEFAULTS, "clientConnection.acceptContentTypes", text)
    assert decode(encode(document), "written.conf").document == document
