"""A node with pods and an outside client, in namespaces: real interfaces, real rules, real sockets.

ex (outside) --- eth0  nd (the node)  br0 --- p1, p2 (pods on a bridge)
                                      v3  --- p3 (a pod on a routed link; the node's end has no address)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.namespaces import Namespace, run
from userspace_proxy.core.model import IPFamily


@dataclass(frozen=True)
class Addresses:
    """The addresses of one family."""

    node: str
    second: str
    bridge: str
    loopback: str
    pods: tuple[str, str]
    routed_pod: str
    outside: str
    far_outside: str
    cluster_ip: str
    load_balancer_ip: str
    external_ip: str


ADDRESSES = {
    IPFamily.IPV4: Addresses(
        node="192.168.77.1",
        second="192.168.77.5",
        bridge="10.244.1.1",
        loopback="127.0.0.1",
        pods=("10.244.1.11", "10.244.1.12"),
        routed_pod="10.244.2.13",
        outside="192.168.77.100",
        far_outside="192.168.88.100",
        cluster_ip="10.96.0.10",
        load_balancer_ip="198.51.100.9",
        external_ip="203.0.113.7",
    ),
    IPFamily.IPV6: Addresses(
        node="fd00:77::1",
        second="fd00:77::5",
        bridge="fd00:244::1",
        loopback="::1",
        pods=("fd00:244::11", "fd00:244::12"),
        routed_pod="fd00:245::13",
        outside="fd00:77::100",
        far_outside="fd00:88::100",
        cluster_ip="fd00:96::10",
        load_balancer_ip="fd00:51::9",
        external_ip="fd00:113::7",
    ),
}

_NODE = """
link add br0 type bridge
addr add 10.244.1.1/24 dev br0
addr add fd00:244::1/64 dev br0 nodad
link set br0 up
link add v1 type veth peer name eth0 netns {p1}
link add v2 type veth peer name eth0 netns {p2}
link add v3 type veth peer name eth0 netns {p3}
link add eth0 type veth peer name eth0 netns {ex}
link set v1 master br0 up
link set v2 master br0 up
link set v3 up
addr add 192.168.77.1/24 dev eth0
addr add 192.168.77.5/24 dev eth0
addr add fd00:77::5/64 dev eth0 nodad
addr add fd00:77::1/64 dev eth0 nodad
link set eth0 up
route add default via 192.168.77.100
route add ::/0 via fd00:77::100
route add 10.244.2.13/32 dev v3
route add fd00:245::13/128 dev v3
"""
_POD = """
addr add {v4}/24 dev eth0
addr add {v6}/64 dev eth0 nodad
link set eth0 up
route add default via 10.244.1.1
route add ::/0 via fd00:244::1
"""
_ROUTED_POD = """
addr add 10.244.2.13/32 dev eth0
addr add fd00:245::13/128 dev eth0 nodad
link set eth0 up
route add 169.254.1.1 dev eth0
route add default via 169.254.1.1
"""
_OUTSIDE = """
addr add 192.168.77.100/24 dev eth0
addr add fd00:77::100/64 dev eth0 nodad
addr add 192.168.88.100/32 dev lo
addr add fd00:88::100/128 dev lo nodad
link set eth0 up
route add default via 192.168.77.1
route add ::/0 via fd00:77::1
"""
_SYSCTLS = (
    "net.ipv4.ip_forward=1",
    "net.ipv6.conf.all.forwarding=1",
    "net.ipv4.conf.v3.proxy_arp=1",
    "net.ipv6.conf.v3.proxy_ndp=1",
    "net.ipv4.conf.all.rp_filter=0",
)


@dataclass(frozen=True)
class Topology:
    node: Namespace
    pods: tuple[Namespace, Namespace]
    routed_pod: Namespace
    outside: Namespace


@contextmanager
def topology() -> Iterator[Topology]:
    """Build the namespaces and remove them afterwards."""
    made: list[Namespace] = []
    try:
        for hint in ("nd", "p1-", "p2-", "p3-", "ex"):
            made.append(Namespace.made(hint))
        node, p1, p2, p3, outside = made
        names = {"p1": p1.name, "p2": p2.name, "p3": p3.name, "ex": outside.name}
        _batch(node, _NODE.format(**names))
        for index, pod in enumerate((p1, p2)):
            v4, v6 = (ADDRESSES[family].pods[index] for family in IPFamily)
            _batch(pod, _POD.format(v4=v4, v6=v6))
        _batch(p3, _ROUTED_POD)
        _batch(outside, _OUTSIDE)
        node.run("sysctl", "-qw", *_SYSCTLS)
        gateway = _link_local(node, "v3")
        p3.ip("-6", "route", "add", "default", "via", gateway, "dev", "eth0")
        yield Topology(node, (p1, p2), p3, outside)
    finally:
        for namespace in made:
            namespace.delete()


def _batch(namespace: Namespace, commands: str) -> None:
    run("ip", "-n", namespace.name, "-batch", "-", stdin=commands)


def _link_local(namespace: Namespace, link: str) -> str:
    """Return the address that the kernel derives for a link, whether or not it has finished checking it."""
    shown = namespace.ip("-6", "-o", "addr", "show", "dev", link, "scope", "link")
    return shown.split("inet6 ")[1].split("/")[0]
