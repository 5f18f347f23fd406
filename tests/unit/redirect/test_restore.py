"""iptables-restore as a program: how it is called, how it is waited for, what its ends mean."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from userspace_proxy.core.errors import KernelRefused, RedirectFailed, RuleNotUnderstood
from userspace_proxy.core.model import IPFamily
from userspace_proxy.core.rules import FIRST_JUMPS
from userspace_proxy.redirect import programs as programs_module
from userspace_proxy.redirect import restore
from userspace_proxy.redirect.programs import Programs, Variant, find_programs, run, variant_in_use, version_in
from userspace_proxy.redirect.restore import RestoreBackend
from userspace_proxy.redirect.tables import TableChange

LOCKED = "Another app is currently holding the xtables lock. Stopped waiting after 5s."
CHANGE = TableChange("nat", declare=("KUBE-PORTALS-HOST",), append=(FIRST_JUMPS[2],))


def program(directory: Path, name: str, script: str) -> str:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def backend(directory: Path, script: str, version: tuple[int, ...] = (1, 8, 9)) -> RestoreBackend:
    path = program(directory, "restore", f'cd {directory}; echo "$@" >> calls; {script}')
    return RestoreBackend(Programs(Variant.LEGACY, IPFamily.IPV4, "save", path, version))


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


async def test_a_lock_that_others_hold_is_waited_for_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "FIRST_PAUSE_S", 0.01)
    script = f'[ $(wc -l < calls) -gt 2 ] && cat > written && exit 0; echo "{LOCKED}" >&2; exit 4'
    writer = backend(tmp_path, script)

    await writer.write([CHANGE])

    assert calls(tmp_path) == ["--noflush -w 5"] * 3
    assert (tmp_path / "written").read_text().splitlines() == CHANGE.lines()
    await writer.close()


async def test_a_lock_that_is_never_free_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "TIME_LIMIT_S", 0.1)
    writer = backend(tmp_path, f'echo "{LOCKED}" >&2; exit 4')

    with pytest.raises(RedirectFailed, match="xtables lock") as caught:
        await writer.write([CHANGE])

    assert type(caught.value) is RedirectFailed
    await writer.close()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ('echo "restore v1.8.9: bad\nError occurred at line: 3" >&2; exit 2', RuleNotUnderstood),
        ('echo "line 5: RULE_APPEND failed (Invalid argument)" >&2; exit 4', KernelRefused),
        ('echo "iptables-restore: line 6 failed" >&2; exit 1', KernelRefused),
        ('echo "Permission denied (you must be root)" >&2; exit 4', RedirectFailed),
        ("exit 3", RedirectFailed),
        ('echo "no line" >&2; exit 2', RedirectFailed),
    ],
)
async def test_each_end_of_the_program_has_its_meaning(
    tmp_path: Path, script: str, error: type[RedirectFailed]
) -> None:
    writer = backend(tmp_path, script)

    with pytest.raises(RedirectFailed) as caught:
        await writer.write([CHANGE])

    assert type(caught.value) is error
    if isinstance(caught.value, RuleNotUnderstood):
        assert caught.value.line == FIRST_JUMPS[2].text
    await writer.close()


@pytest.mark.parametrize(
    ("version", "arguments"),
    [((1, 4, 21), ()), ((1, 6, 1), ()), ((1, 6, 2), ("-w", "5", "-W", "100000")), ((1, 8), ("-w", "5"))],
)
def test_each_version_is_told_to_wait_as_it_understands(version: tuple[int, ...], arguments: tuple[str, ...]) -> None:
    assert Programs(Variant.LEGACY, IPFamily.IPV4, "", "", version).wait_arguments == arguments


@pytest.mark.parametrize(
    ("said", "version"),
    [("iptables-restore v1.8.9 (nf_tables)", (1, 8, 9)), ("iptables-restore v1.6", (1, 6)), ("", (1, 8))],
)
def test_the_version_is_read_from_what_the_program_says(said: str, version: tuple[int, ...]) -> None:
    assert version_in(said) == version


async def test_a_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    slow = program(tmp_path, "slow", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    began = time.monotonic()

    with pytest.raises(RedirectFailed, match=r"not finished after 0\.3 s"):
        await run(slow, time_limit_s=0.3)

    assert time.monotonic() - began < 5
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(RedirectFailed, match=r"/no/such: No such file"):
        await run("/no/such")


async def test_a_program_may_end_before_it_has_read_its_input(tmp_path: Path) -> None:
    finished = await run(program(tmp_path, "deaf", "exit 7"), stdin=b"x" * 1_000_000)

    assert finished.code == 7


@pytest.fixture
def only_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole search path."""
    monkeypatch.setitem(programs_module._ENVIRONMENT, "PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def install(directory: Path, stem: str, said: str, save: str) -> None:
    program(directory, f"{stem}-restore", f'echo "{said}"')
    program(directory, f"{stem}-save", f"cat <<'EOF'\n{save}\nEOF")


async def test_a_program_without_variant_in_its_name_is_asked(only_these: Path) -> None:
    install(only_these, "iptables", "iptables-restore v1.8.7 (nf_tables)", "")

    found = await find_programs(IPFamily.IPV4)

    assert list(found) == [Variant.NFT]
    assert found[Variant.NFT].version == (1, 8, 7)
    assert await find_programs(IPFamily.IPV6) == {}


EMPTY = "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT"
ONE_RULE = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j ACCEPT\nCOMMIT"
KUBELET = "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT"


@pytest.mark.parametrize(
    ("nft", "legacy", "variant"),
    [
        (EMPTY, EMPTY, Variant.NFT),
        (EMPTY, ONE_RULE, Variant.LEGACY),
        (ONE_RULE, ONE_RULE, Variant.NFT),
        (ONE_RULE, KUBELET, Variant.LEGACY),
        (KUBELET, f"{ONE_RULE}\n{KUBELET}", Variant.NFT),
        ("*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT", ONE_RULE, Variant.NFT),
    ],
)
async def test_the_variant_is_that_of_the_kubelet_or_of_most_rules(
    only_these: Path, monkeypatch: pytest.MonkeyPatch, nft: str, legacy: str, variant: Variant
) -> None:
    monkeypatch.setattr(programs_module, "legacy_tables", lambda family: ("nat",))
    install(only_these, "iptables-nft", "v1.8.9 (nf_tables)", nft)
    install(only_these, "iptables-legacy", "v1.8.9 (legacy)", legacy)

    assert await variant_in_use((await find_programs(IPFamily.IPV4)).values()) is variant


async def test_a_variant_that_the_kernel_does_not_support_does_not_count(only_these: Path) -> None:
    install(only_these, "iptables-legacy", "v1.8.9 (legacy)", EMPTY)
    install(only_these, "iptables-nft", "v1.8.9 (nf_tables)", EMPTY)
    program(only_these, "iptables-nft-save", "echo 'Protocol not supported' >&2; exit 4")
    found = await find_programs(IPFamily.IPV4)

    assert await variant_in_use(found.values()) is Variant.LEGACY
    with pytest.raises(RedirectFailed, match="Protocol not supported"):
        await variant_in_use([found[Variant.NFT]])
    assert await variant_in_use([]) is None
