"""UDP flows: which are forgotten, and by which command."""

from __future__ import annotations

from pathlib import Path

import pytest

from userspace_proxy.core.errors import RedirectFailed
from userspace_proxy.core.model import IPFamily
from userspace_proxy.redirect.conntrack import ConntrackProgram, UdpFlows, flows_of

LOCAL = ("192.168.77.1", "10.244.1.1", "127.0.0.1", "fd00::1")
UDP = '-p udp -m comment --comment "ns/a:b" -m udp --dport'


@pytest.mark.parametrize(
    ("rule", "flows"),
    [
        (f"-A KUBE-PORTALS-HOST -d 10.96.0.10/32 {UDP} 53 -j DNAT --to-destination 1.2.3.4:5", {("10.96.0.10", 53)}),
        (f"-A KUBE-PORTALS-CONTAINER -s 10.0.0.0/8 -d 10.96.0.10/32 {UDP} 53 -j REDIRECT", {("10.96.0.10", 53)}),
        (
            f"-A KUBE-NODEPORT-HOST {UDP} 30700 -j DNAT --to-destination 1.2.3.4:5",
            {("192.168.77.1", 30700), ("10.244.1.1", 30700), ("127.0.0.1", 30700)},
        ),
        (f"-A KUBE-NODEPORT-CONTAINER -d 192.168.77.0/24 {UDP} 30700 -j REDIRECT", {("192.168.77.1", 30700)}),
        ('-A KUBE-PORTALS-HOST -d 10.96.0.10/32 -p tcp -m comment --comment "a/b" -m tcp --dport 53 -j X', set()),
        (f"-A KUBE-NODEPORT-NON-LOCAL {UDP} 40000 -m state --state NEW -j ACCEPT", set()),
    ],
)
def test_flows_are_those_that_a_rule_decides_about(rule: str, flows: set[tuple[str, int]]) -> None:
    assert flows_of([rule], IPFamily.IPV4, LOCAL) == {UdpFlows(*flow) for flow in flows}


def test_an_ipv6_node_port_concerns_only_local_addresses_of_its_family() -> None:
    assert flows_of([f"-A KUBE-NODEPORT-HOST {UDP} 30700 -j X"], IPFamily.IPV6, LOCAL) == {UdpFlows("fd00::1", 30700)}


def program(directory: Path, script: str) -> ConntrackProgram:
    path = directory / "conntrack"
    path.write_text(f'#!/bin/sh\necho "$@" >> {directory}/calls\n{script}\n')
    path.chmod(0o755)
    return ConntrackProgram(str(path))


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


async def test_the_command_names_family_address_and_port(tmp_path: Path) -> None:
    await program(tmp_path, "").forget([UdpFlows("fd00::a", 53), UdpFlows("10.96.0.10", 53)])

    assert calls(tmp_path) == [
        "-D -f ipv4 -p udp --orig-dst 10.96.0.10 --orig-port-dst 53",
        "-D -f ipv6 -p udp --orig-dst fd00::a --orig-port-dst 53",
    ]


async def test_no_entry_is_no_error(tmp_path: Path) -> None:
    none = "echo 'conntrack v1.4.7 (conntrack-tools): 0 flow entries have been deleted.' >&2; exit 1"

    await program(tmp_path, none).forget([UdpFlows("10.96.0.10", 53)])


async def test_another_failure_is_told(tmp_path: Path) -> None:
    with pytest.raises(RedirectFailed, match="Operation not permitted"):
        await program(tmp_path, "echo 'Operation not permitted' >&2; exit 1").forget([UdpFlows("10.96.0.10", 53)])


async def test_of_many_flows_only_those_that_exist_are_deleted(tmp_path: Path) -> None:
    entry = (
        "udp      17 29 src=10.244.1.11 dst=10.96.0.7 sport=999 dport=53 src=10.244.1.1 dst=10.244.1.11 sport=1 dport=2"
    )
    await program(tmp_path, f"echo '{entry}'").forget([UdpFlows(f"10.96.0.{number}", 53) for number in range(100)])

    assert calls(tmp_path) == ["-L -f ipv4 -p udp", "-D -f ipv4 -p udp --orig-dst 10.96.0.7 --orig-port-dst 53"]
