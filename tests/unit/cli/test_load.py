"""Arguments and file to one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.core.configs import HEADER
from userspace_proxy.cli.load import load_config
from userspace_proxy.core.config import DEFAULTS, Action, Config, VModule, field_at
from userspace_proxy.core.errors import ConfigError


def load(*arguments: str) -> Config:
    return load_config(arguments)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Return a file with a configuration that has values of its own."""
    path = tmp_path / "config.conf"
    path.write_text(
        HEADER + "udpIdleTimeout: 2s\nhostnameOverride: from-file\nlogging:\n  verbosity: 1\n"
        "  vmodule: [{filePattern: file, verbosity: 1}]\nuserspaceProxy: {workers: 2}\n"
    )
    return path


def test_no_arguments_mean_the_defaults() -> None:
    assert load() == Config(document=DEFAULTS)


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("--udp-timeout=1s", "udpIdleTimeout", 1.0),
        ("--iptables-min-sync-period=0s", "iptables.minSyncPeriod", 0.0),
        ("--conntrack-max-per-core=0", "conntrack.maxPerCore", 0),
        ("--nodeport-addresses=10.0.0.0/8,fd00::/8", "nodePortAddresses", ("10.0.0.0/8", "fd00::/8")),
        ("--nodeport-addresses=primary", "nodePortAddresses", ("primary",)),
        ("--proxy-mode=userspace", "mode", "userspace"),
        ("--proxy-mode=", "mode", ""),
        ("--kubeconfig=/k", "clientConnection.kubeconfig", "/k"),
        ("--profiling", "enableProfiling", True),
        ("--rule-style=dnat", "userspaceProxy.ruleStyle", "dnat"),
        ("--hostname-override= Node-A ", "hostnameOverride", "node-a"),
        ("--hostname-override=", "hostnameOverride", ""),
        ("-v4", "logging.verbosity", 4),
        ("--bind-address=", "bindAddress", "0.0.0.0"),
        ("--bind-address=::", "healthzBindAddress", "[::]:10256"),
        ("--bind-address=fd00::1", "metricsBindAddress", "[::1]:10249"),
        ("--healthz-bind-address=10.0.0.1", "healthzBindAddress", "10.0.0.1:10256"),
        ("--healthz-bind-address=10.0.0.1:1", "healthzBindAddress", "10.0.0.1:1"),
        ("--healthz-bind-address=", "healthzBindAddress", ""),
        ("--metrics-bind-address=", "metricsBindAddress", ""),
        ("--healthz-port=0", "healthzBindAddress", ""),
        ("--metrics-port=0", "metricsBindAddress", ""),
        ("--metrics-port=5", "metricsBindAddress", "127.0.0.1:10249"),
    ],
)
def test_a_flag_sets_its_field(argument: str, path: str, value: object) -> None:
    assert field_at(load(argument).document, path) == value


def test_a_port_flag_completes_an_address_without_a_port() -> None:
    config = load(
        "--metrics-bind-address=::", "--metrics-port=5", "--healthz-bind-address=0.0.0.0:7", "--healthz-port=6"
    )
    assert config.document.metrics_bind_address == "[::]:5"
    assert config.document.healthz_bind_address == "0.0.0.0:7"


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        (["--cleanup"], Action.CLEANUP),
        (["--cleanup=false"], Action.RUN),
        (["--init-only"], Action.INIT_ONLY),
        (["--write-config-to=x", "--cleanup"], Action.WRITE_CONFIG),
        (["--cleanup", "--init-only"], Action.CLEANUP),
    ],
)
def test_what_to_do_instead_of_running_is_known(arguments: list[str], action: Action) -> None:
    assert load(*arguments).action is action


def test_with_a_file_its_fields_count_and_other_flags_are_named_once(config_file: Path) -> None:
    config = load(
        f"--config={config_file}", "--udp-timeout=9s", "--proxy-mode=ipvs", "--metrics-port=0", "--master=https://m"
    )
    assert config.document.udp_idle_timeout == 2.0
    assert config.document.metrics_bind_address == "127.0.0.1:10249"
    assert (config.config_file, config.master) == (str(config_file), "https://m")
    ignored = [text for text in config.warnings if text.startswith("without effect")]
    assert ignored == [
        f"without effect, as the configuration comes from {config_file} (--config): "
        "--udp-timeout, --proxy-mode, --metrics-port"
    ]


def test_flags_for_the_log_and_our_own_and_the_host_name_outrank_the_file(config_file: Path) -> None:
    config = load(
        f"--config={config_file}",
        "-v=5",
        "--vmodule=flag=2",
        "--hostname-override=Flag",
        "--unidling=off",
        "--wake-scale",
        "--logtostderr",
    )
    document = config.document
    assert document.logging.verbosity == 5
    assert document.logging.vmodule == (
        VModule(file_pattern="flag", verbosity=2),
        VModule(file_pattern="file", verbosity=1),
    )
    assert document.hostname_override == "flag"
    assert (config.own.unidling, config.own.workers, config.own.wake.scale) == ("off", 2, True)
    assert config.warnings == ()


def test_without_such_flags_the_file_has_its_way(config_file: Path) -> None:
    document = load("--config", str(config_file)).document
    assert (document.hostname_override, document.logging.verbosity) == ("from-file", 1)


def test_what_belongs_to_other_modes_is_one_warning() -> None:
    config = load("--ipvs-scheduler=rr", "--masquerade-all", "--log-file=x", "--cleanup-ipvs", "--metrics-port=1")
    assert config.warnings == (
        "--metrics-port is deprecated: use --metrics-bind-address",
        "accepted without effect, as they belong to other proxy modes: --ipvs-scheduler, --masquerade-all",
        "accepted without effect, as they are about log files and log headers, while this log goes to standard error: "
        "--log-file",
        "accepted without effect, as they are no longer in use: --cleanup-ipvs",
    )


def test_so_it_is_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text(HEADER + "ipvs: {scheduler: rr}\niptables: {masqueradeAll: true}\nmodee: x\n")
    lenient, unused = load(f"--config={path}").warnings
    assert lenient.startswith("Using lenient decoding as strict decoding failed: ")
    assert (
        unused == f"{path}: accepted without effect, as they belong to other proxy modes: iptables.masqueradeAll, ipvs"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--udp-timeout=0"],
            "failed validate: KubeProxyConfiguration.UDPIdleTimeout: Invalid value: 0s: must be greater than 0 "
            "(--udp-timeout)",
        ),
        (["--udp-timeout=-1s"], "Invalid value: -1s: must be greater than 0 (--udp-timeout)"),
        (["--nodeport-addresses=10.0.0.0/8,x"], 'Invalid value: "x": must be a valid CIDR (--nodeport-addresses)'),
        (["--iptables-min-sync-period=1m"], "KubeProxyIPTablesConfiguration.MinSyncPeriod (iptables.syncPeriod)"),
        (["--proxy-mode=ipvs"], "for ipvs, run kube-proxy itself"),
        (["--hostname-override=  "], "--hostname-override: empty hostname-override is invalid"),
        (["--bind-address=127.0.0.1"], "bindAddress: 127.0.0.1: cannot proxy on localhost"),
        (["--config=/absent/file"], "/absent/file: cannot be read: No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_flag(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert message in str(caught.value)


def test_several_problems_are_one_message_with_a_line_each() -> None:
    with pytest.raises(ConfigError) as caught:
        load("--oom-score-adj=1001", "--udp-timeout=0")
    first, *lines = str(caught.value).splitlines()
    assert first == "failed validate:"
    assert [line.split(":")[0] for line in lines] == [
        "  KubeProxyConfiguration.OOMScoreAdj",
        "  KubeProxyConfiguration.UDPIdleTimeout",
    ]


@pytest.mark.parametrize(
    ("fields", "flags", "place"),
    [
        ("mode: userspace\nudpIdleTimeout: -1s\n", [], "(FILE:4)"),
        ("nodePortAddresses:\n- 10.0.0.0/8\n- x\n", [], "(FILE:5)"),
        ("iptables: {minSyncPeriod: 1h}\n", [], "(FILE:3)"),
        ("userspaceProxy: {workers: 1}\n", ["--workers=0"], "(--workers)"),
        ("udpIdleTimeout: -1s\n", ["--udp-timeout=1s"], "(FILE:3)"),
    ],
)
def test_what_makes_no_sense_in_a_file_is_refused_with_its_line(
    tmp_path: Path, fields: str, flags: list[str], place: str
) -> None:
    path = tmp_path / "f"
    path.write_text(HEADER + fields)
    with pytest.raises(ConfigError, match="failed validate: ") as caught:
        load(f"--config={path}", *flags)
    assert str(caught.value).endswith(place.replace("FILE", str(path)))


def test_a_file_that_is_no_text_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r":2: failed to decode: no valid UTF-8"):
        load(f"--config={path}")


def test_loopback_is_no_reason_not_to_clean_up() -> None:
    assert load("--bind-address=127.0.0.1", "--cleanup").action is Action.CLEANUP


@pytest.mark.parametrize(("timeout", "seconds"), [("1h0m0s", 3600.0), ("1.5h", 5400.0), ("250ms", 0.25), ("0s", 0.25)])
def test_case_77_durations_of_a_file(tmp_path: Path, timeout: str, seconds: float) -> None:
    path = tmp_path / "f"
    path.write_text(HEADER + f"udpIdleTimeout: {timeout}\n")
    assert load(f"--config={path}").document.udp_idle_timeout == seconds


@pytest.mark.parametrize(("timeout", "reason"), [("-1s", "must be greater than 0"), ("'5'", "it needs a unit")])
def test_case_77_durations_that_are_refused(tmp_path: Path, timeout: str, reason: str) -> None:
    path = tmp_path / "f"
    path.write_text(HEADER + f"udpIdleTimeout: {timeout}\n")
    with pytest.raises(ConfigError, match=reason):
        load(f"--config={path}")


def test_any_flag_may_stand_beside_a_file(config_file: Path) -> None:
    arguments: list[Any] = ["--ipvs-strict-arp", "--feature-gates=A=true", "--iptables-masquerade-bit=5"]
    config = load(f"--config={config_file}", *arguments)
    assert config.warnings == (
        "accepted without effect, as they belong to other proxy modes: --ipvs-strict-arp, --iptables-masquerade-bit",
        f"without effect, as the configuration comes from {config_file} (--config): --feature-gates",
    )
