"""The set-up of a node against the real kernel, in network and mount namespaces that the test makes."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making a network namespace needs root")

SET_UP = """
import json
from userspace_proxy.node.setup import ConntrackSettings, is_sys_read_only, set_up_host
steps = set_up_host(
    ConntrackSettings(max_per_core=64_000_000, tcp_be_liberal=True, udp_timeout_s=77, udp_stream_timeout_s=177), cores=1
)
print(json.dumps({"read_only": is_sys_read_only(steps), **{s.name: [s.outcome.value, s.detail] for s in steps}}))
"""
READ_BACK = "cat /proc/sys/net/netfilter/nf_conntrack_{udp_timeout,tcp_timeout_established,tcp_be_liberal}"


async def in_namespace(script: str) -> list[str]:
    """Run a shell script in new network and mount namespaces, and return the lines that it prints."""
    process = await asyncio.create_subprocess_exec(
        "unshare", "--net", "--mount", "bash", "-ec", script, "bash", sys.executable, SET_UP,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(20.0):
        stdout, _ = await process.communicate()
    assert process.returncode == 0
    return stdout.decode().splitlines()


async def test_a_namespace_takes_time_outs_and_refuses_what_belongs_to_the_host() -> None:
    report, *values = await in_namespace(f'"$1" -c "$2"; {READ_BACK}')
    steps = json.loads(report)
    assert values == ["77", "86400", "1"]
    assert steps["nf_conntrack_udp_timeout"][0] == "done"
    assert steps["nf_conntrack_max"] == ["refused", "cannot be set to 64000000: permission denied"]
    assert steps["sys/module/nf_conntrack/parameters/hashsize"][0] == "refused"
    assert not steps["read_only"]


async def test_a_read_only_sys_is_recognised() -> None:
    (report,) = await in_namespace('mount --bind /sys /sys && mount -o remount,bind,ro /sys && "$1" -c "$2"')
    steps = json.loads(report)
    assert steps["read_only"]
    assert steps["nf_conntrack_udp_timeout"][0] == "done"


async def test_addresses_of_a_namespace_are_read_by_family() -> None:
    ask = (
        "import asyncio; from userspace_proxy.node.addresses import local_addresses;"
        "print(*(f'{a.address}/{a.prefix_length}%{a.interface}' for a in asyncio.run(local_addresses())), sep=chr(10))"
    )
    lines = await in_namespace(
        "ip link set lo up; ip link add d0 type veth peer name d1; ip addr add 10.9.8.7/24 dev d0;"
        f'ip addr add 2001:db8::1/64 dev d0; ip link set d0 up; "$1" -c "{ask}"'
    )
    assert {"10.9.8.7/24%d0", "127.0.0.1/8%lo", "2001:db8::1/64%d0", "::1/128%lo"} <= set(lines)
