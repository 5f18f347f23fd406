"""Another kube-proxy on the node, in its iptables mode: the rules of a busy host, and those of one service more."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.test_cleanup import fixture_text, restore
from tests.netns.services import BACKEND_PORT
from tests.netns.topology import ADDRESSES
from tests.support.namespaces import run
from userspace_proxy.core.model import IPFamily, L4Protocol
from userspace_proxy.redirect.tables import OWN_CHAIN_NAMES

FIXTURE = Path(__file__).parent.parent / "fixtures" / "fixture-kubeproxy.rules"
STEMS = ("iptables", "ip6tables")
_CHAIN = "KUBE-SVC-ASLEEPASLEEPASLE"
_CLUSTER_IP = ADDRESSES[IPFamily.IPV4].cluster_ip
_COUNTERS = re.compile(r"\[\d+:\d+\]")


class OtherProxy:
    """What it writes for the service at the cluster IP of the topology, port 80: without endpoints it refuses."""

    def __init__(self, variant: str) -> None:
        self._variant = variant
        for stem in STEMS:
            restore(variant, fixture_text(FIXTURE, stem), stem)
        self._restore("filter", *(f"-A {self._rejection(protocol)}" for protocol in L4Protocol))

    def leads_to(self, pod: str) -> None:
        """Know an endpoint now."""
        for table, lines in (
            ("filter", [f"-D {self._rejection(protocol)}" for protocol in L4Protocol]),
            ("nat", [f":{_CHAIN} - [0:0]", *self._service_rules(), *self._endpoint_rules(pod)]),
        ):
            self._restore(table, *lines)

    def rules(self) -> list[str]:
        """Return all that is saved and not ours, byte for byte but for the counters of chains."""
        saved = [line for stem in STEMS for line in run(f"{stem}-{self._variant}-save").splitlines()]
        return [
            _COUNTERS.sub("", line)
            for line in saved
            if not line.startswith("#") and OWN_CHAIN_NAMES.isdisjoint(re.findall(r"KUBE-[A-Z-]+", line))
        ]

    def _rejection(self, protocol: L4Protocol) -> str:
        return f"KUBE-SERVICES {_matches(protocol)} -j REJECT --reject-with icmp-port-unreachable"

    def _service_rules(self) -> list[str]:
        return [f"-I KUBE-SERVICES {_matches(protocol)} -j {_CHAIN}" for protocol in L4Protocol]

    def _endpoint_rules(self, pod: str) -> list[str]:
        target = f"-j DNAT --to-destination {pod}:{BACKEND_PORT}"
        return [f"-A {_CHAIN} -p {protocol.lower()} {target}" for protocol in L4Protocol]

    def _restore(self, table: str, *lines: str) -> None:
        restore(self._variant, "\n".join((f"*{table}", *lines, "COMMIT", "")))


def _matches(protocol: L4Protocol) -> str:
    name = protocol.lower()
    return f"-d {_CLUSTER_IP}/32 -p {name} -m comment --comment default/web -m {name} --dport 80"


class NftablesProxy:
    """A kube-proxy in its nftables mode: the shape of its table, with the same service."""

    def __init__(self) -> None:
        self._write("no-endpoint-services", "service-ips", "goto reject-chain", "")

    def leads_to(self, pod: str) -> None:
        """Know an endpoint now."""
        self._write("service-ips", "no-endpoint-services", "goto service-web", f"dnat to {pod}:{BACKEND_PORT}")

    def rules(self) -> str:
        return run("nft", "list", "table", "ip", "kube-proxy")

    def _write(self, full_map: str, empty_map: str, verdict: str, dnat: str) -> None:
        elements = ", ".join(f"{_CLUSTER_IP} . {protocol.lower()} . 80 : {verdict}" for protocol in L4Protocol)
        kind = "type ipv4_addr . inet_proto . inet_service : verdict;"
        key = "ip daddr . meta l4proto . th dport"
        rules = f"""
            map {full_map} {{ {kind} elements = {{ {elements} }}; }}
            map {empty_map} {{ {kind} }}
            chain reject-chain {{ reject; }}
            chain service-web {{ {f"meta l4proto {{ tcp, udp }} {dnat};" if dnat else ""} }}
            chain services {{ {key} vmap @service-ips; }}
            chain service-endpoints-check {{ {key} vmap @no-endpoint-services; }}
            chain filter-input {{
                type filter hook input priority filter; ct state new jump service-endpoints-check;
            }}
            chain filter-forward {{
                type filter hook forward priority filter; ct state new jump service-endpoints-check;
            }}
            chain filter-output {{
                type filter hook output priority filter; ct state new jump service-endpoints-check;
            }}
            chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
            chain nat-output {{ type nat hook output priority -100; jump services; }}
        """
        table = "table ip kube-proxy"
        run("nft", "-f", "-", stdin=f"{table} {{}}\ndelete {table}\n{table} {{ {rules} }}")


def own_rules(variant: str) -> list[str]:
    """Return what is saved and ours: chains, jumps and rules."""
    saved = [line for stem in STEMS for line in run(f"{stem}-{variant}-save").splitlines()]
    return [line for line in saved if not OWN_CHAIN_NAMES.isdisjoint(re.findall(r"KUBE-[A-Z-]+", line))]
