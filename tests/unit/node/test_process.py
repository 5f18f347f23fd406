"""Capabilities, systemd and the addresses of this host."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from userspace_proxy.core.model import IPFamily
from userspace_proxy.node.addresses import LocalAddress, local_addresses
from userspace_proxy.node.capabilities import (
    Capability,
    Missing,
    capability_warnings,
    effective_capabilities,
    missing_capabilities,
)
from userspace_proxy.node.limits import backlog_warning
from userspace_proxy.node.systemd import READY, STOPPING, notify

ADMIN, RAW, BIND = Capability.CAP_NET_ADMIN, Capability.CAP_NET_RAW, Capability.CAP_NET_BIND_SERVICE


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("000001ffffffffff", {ADMIN, RAW, BIND}),
        ("0000000000001000", {ADMIN}),
        ("0000000000003400", {ADMIN, RAW, BIND}),
        ("0000000000000000", set()),
    ],
)
def test_the_kernels_mask_is_read(tmp_path: Path, mask: str, expected: set[Capability]) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t{mask}\n")
    assert effective_capabilities(tmp_path) == expected


def test_where_the_kernel_tells_nothing_nothing_is_assumed(tmp_path: Path) -> None:
    assert effective_capabilities(tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("backend", "has", "missing"),
    [
        ("nft", {ADMIN}, Missing(wanted=(BIND,))),
        ("nft", {ADMIN, BIND}, Missing()),
        ("legacy", {ADMIN, BIND}, Missing(needed=(RAW,))),
        ("libiptc", set(), Missing((ADMIN, RAW), (BIND,))),
        ("none", {BIND}, Missing()),
    ],
)
def test_each_backend_names_what_it_lacks(backend: str, has: set[Capability], missing: Missing) -> None:
    assert missing_capabilities(backend, has) == missing


def test_what_is_missing_is_said_with_what_it_means() -> None:
    assert list(capability_warnings("legacy", set())) == [
        "this process lacks CAP_NET_ADMIN and CAP_NET_RAW, without which no kernel rules can be set (legacy)",
        "this process lacks CAP_NET_BIND_SERVICE: service ports below 1024 at addresses of this node cannot be held",
    ]
    assert list(capability_warnings("nft", {ADMIN, BIND})) == []


@pytest.mark.parametrize("kind", ["path", "abstract"])
@pytest.mark.parametrize("state", [READY, STOPPING])
def test_systemd_is_told(tmp_path: Path, kind: str, state: str) -> None:
    name = str(tmp_path / "notify") if kind == "path" else f"@{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(5.0)
        systemd.bind(f"\0{name[1:]}" if kind == "abstract" else name)
        assert notify(state, {"NOTIFY_SOCKET": name})
        assert systemd.recv(100) == state.encode()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_systemd_nobody_is_told(environ: dict[str, str]) -> None:
    assert not notify(READY, environ)


def test_a_systemd_that_is_away_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not notify(READY, {"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    assert "systemd cannot be told READY=1" in caplog.text


async def test_the_addresses_of_this_host_are_found() -> None:
    addresses = await local_addresses(IPFamily.IPV4)
    assert LocalAddress("127.0.0.1", 8, "lo") in addresses
    assert all(each.family is IPFamily.IPV4 for each in addresses)
    assert {each for each in await local_addresses() if each.family is IPFamily.IPV4} == set(addresses)


def test_addresses_are_found_under_uvloop() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(local_addresses())


def test_an_address_says_what_it_is_good_for() -> None:
    assert LocalAddress("127.0.0.1", 8, "lo").is_loopback
    assert LocalAddress("fe80::1", 64, "eth0").is_link_local
    assert not LocalAddress("10.0.0.1", 24, "eth0").is_loopback


def test_a_backlog_that_the_kernel_cuts_short_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "sys/net/core").mkdir(parents=True)
    (tmp_path / "sys/net/core/somaxconn").write_text("128\n")
    assert backlog_warning(128, tmp_path) is None
    assert backlog_warning(4096, tmp_path) == (
        "at most 128 connections can wait to be accepted by a listener, not 4096 (listenBacklog); "
        "raise net.core.somaxconn for more"
    )
    assert backlog_warning(4096, tmp_path / "nowhere") is None
