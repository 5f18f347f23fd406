"""What is set on a host, on a copy of its files."""

from __future__ import annotations

import errno
import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from userspace_proxy.node.setup import (
    ConntrackSettings,
    Outcome,
    Step,
    is_sys_read_only,
    log_steps,
    set_up_host,
    set_up_process,
)

HASH_SIZE = "sys/module/nf_conntrack/parameters/hashsize"


class Host:
    """The files of a kernel, in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put(HASH_SIZE, 65_536)
        self.put("proc/self/oom_score_adj", 0)
        for name, value in {
            "max": 131_072,
            "buckets": 65_536,
            "tcp_timeout_established": 432_000,
            "tcp_timeout_close_wait": 60,
            "udp_timeout": 30,
            "udp_timeout_stream": 120,
            "tcp_be_liberal": 0,
        }.items():
            self.put(f"proc/sys/net/netfilter/nf_conntrack_{name}", value)

    def put(self, path: str, value: object) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{value}\n")

    def get(self, path: str) -> int:
        return int((self.root / path).read_text())

    def conntrack(self, name: str) -> int:
        return self.get(f"proc/sys/net/netfilter/nf_conntrack_{name}")

    def set_up(self, cores: int = 8, **settings: Any) -> dict[str, Step]:
        steps = set_up_host(ConntrackSettings(**settings), root=self.root, cores=cores)
        return {step.name.removeprefix("nf_conntrack_"): step for step in steps}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("cores", "per_core", "least", "entries"),
    [(8, 32_768, 131_072, 262_144), (2, 32_768, 131_072, 131_072), (8, 0, 131_072, 0), (1, 1, 0, 1)],
)
def test_as_many_connections_are_tracked_as_cores_and_minimum_ask_for(
    cores: int, per_core: int, least: int, entries: int
) -> None:
    assert ConntrackSettings(max_per_core=per_core, min=least).max_entries(cores) == entries


def test_kube_proxys_defaults_are_set(host: Host) -> None:
    steps = host.set_up()
    assert (host.conntrack("max"), host.get(HASH_SIZE)) == (262_144, 65_536)
    assert (host.conntrack("tcp_timeout_established"), host.conntrack("tcp_timeout_close_wait")) == (86_400, 3_600)
    assert (host.conntrack("udp_timeout"), host.conntrack("tcp_be_liberal")) == (30, 0)
    assert str(steps["max"]) == "nf_conntrack_max: 131072 -> 262144"
    assert steps[HASH_SIZE].outcome is Outcome.UNCHANGED


def test_all_that_can_be_set_is(host: Host) -> None:
    steps = host.set_up(cores=32, tcp_be_liberal=True, udp_timeout_s=60.0, udp_stream_timeout_s=180.5)
    assert (host.conntrack("max"), host.get(HASH_SIZE)) == (1_048_576, 262_144)
    assert (host.conntrack("tcp_be_liberal"), host.conntrack("udp_timeout")) == (1, 60)
    assert host.conntrack("udp_timeout_stream") == 180
    assert {step.outcome for step in steps.values()} == {Outcome.DONE}


def test_a_second_run_changes_nothing(host: Host) -> None:
    host.set_up(cores=32)
    host.put("proc/sys/net/netfilter/nf_conntrack_buckets", 262_144)
    assert {step.outcome for step in host.set_up(cores=32).values()} == {Outcome.UNCHANGED}


def test_what_is_larger_is_not_made_smaller(host: Host) -> None:
    host.put("proc/sys/net/netfilter/nf_conntrack_max", 9_000_000)
    host.put("proc/sys/net/netfilter/nf_conntrack_buckets", 1)
    host.put(HASH_SIZE, 5_000_000)
    host.set_up()
    assert (host.conntrack("max"), host.get(HASH_SIZE)) == (9_000_000, 5_000_000)


def test_zero_leaves_a_value(host: Host) -> None:
    steps = host.set_up(max_per_core=0, tcp_established_timeout_s=0.0, tcp_close_wait_timeout_s=0.0)
    assert not steps
    assert host.conntrack("tcp_timeout_established") == 432_000


def test_without_the_kernels_module_each_step_says_so(tmp_path: Path) -> None:
    steps = set_up_host(ConntrackSettings(), root=tmp_path)
    assert len(steps) == 4
    assert all(step.outcome is Outcome.REFUSED and "may not be loaded" in step.detail for step in steps)


def test_a_file_that_holds_no_number_is_left(host: Host) -> None:
    host.put("proc/sys/net/netfilter/nf_conntrack_max", "many")
    assert host.set_up()["max"].detail.endswith("holds no number")


@pytest.mark.parametrize(
    ("code", "outcome", "is_told"),
    [(errno.EROFS, Outcome.READ_ONLY, True), (errno.EACCES, Outcome.REFUSED, False)],
)
def test_what_is_not_permitted_is_left_and_said(
    host: Host, monkeypatch: pytest.MonkeyPatch, code: int, outcome: Outcome, is_told: bool
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise OSError(code, "")

    monkeypatch.setattr(Path, "write_text", refuse)
    steps = host.set_up(cores=32)
    assert {step.outcome for step in steps.values()} == {outcome}
    assert is_sys_read_only(tuple(steps.values())) is is_told
    assert steps["max"].detail.startswith("cannot be set to 1048576: ")


def test_the_process_gets_its_score_and_its_descriptors(host: Host) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        score, descriptors = set_up_process(-999, root=host.root)
        assert host.get("proc/self/oom_score_adj") == -999
        assert (score.outcome, score.name) == (Outcome.DONE, "oom_score_adj")
        assert descriptors.name == "RLIMIT_NOFILE"
        assert descriptors.is_in_force == (resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64_000)
        assert len(set_up_process(None, root=host.root)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_changes_are_logged_and_refusals_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_steps(
        (
            Step("a", Outcome.DONE, "1 -> 2"),
            Step("b", Outcome.UNCHANGED, "is 1"),
            Step("c", Outcome.REFUSED, "cannot be set to 2: permission denied"),
        )
    )
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "a: 1 -> 2"),
        ("WARNING", "c: cannot be set to 2: permission denied"),
    ]
