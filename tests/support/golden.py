"""What a real kube-proxy 1.25 was given and what it printed, as the tests need it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from userspace_proxy.core.model import IPFamily, L4Protocol, ServicePort, ServicePortName
from userspace_proxy.core.portals import NodeFacts, ProxyPortKey
from userspace_proxy.core.rule import Chain
from userspace_proxy.core.rules import FIRST_JUMPS, LAST_JUMPS, RuleSet

GOLDEN = Path(__file__).parent.parent / "golden"
FIXTURES = Path(__file__).parent.parent / "fixtures"
NODE = NodeFacts("192.168.77.10", bind_address="0.0.0.0", local_addresses=frozenset({"192.168.77.10", "127.0.0.1"}))


def rule_lines(save: str) -> dict[str, list[str]]:
    """Return the `-A` lines of each chain in the text of an iptables-save."""
    chains: dict[str, list[str]] = {}
    for line in save.splitlines():
        if line.startswith("-A "):
            chains.setdefault(line.split()[1], []).append(line)
    return chains


def lines_of(rules: RuleSet) -> dict[str, list[str]]:
    """Return the rules of a rule set and the jumps to them as an iptables-save would print them, by chain."""
    lines: dict[str, list[str]] = {}
    for rule in (*FIRST_JUMPS, *LAST_JUMPS, *rules):
        lines.setdefault(rule.chain.value, []).append(rule.text)
    return lines


def userspace_save() -> str:
    return (GOLDEN / "userspace-bind-any.iptables-save").read_text()


def proxy_ports() -> dict[ProxyPortKey, int]:
    """Return the proxy ports that kube-proxy had chosen, read from its rules."""
    ports = {}
    for line in rule_lines(userspace_save())[Chain.PORTALS_CONTAINER.value]:
        if found := re.search(r'-p (\S+) .*--comment "([^"]+)".*--to-ports (\d+)', line):
            protocol, name, port = found.groups()
            namespace, service, port_name = re.match(r"([^/]+)/([^:]+):?(.*)", name).groups()  # type: ignore[union-attr]
            key = ServicePortName(namespace, service, port_name, L4Protocol(protocol.upper()))
            ports[ProxyPortKey(key, IPFamily.IPV4)] = int(port)
    return ports


def service_ports() -> list[ServicePort]:
    """Return the service ports of services.yaml that are proxied."""
    return list(_service_ports())


def _service_ports() -> Iterator[ServicePort]:
    for service in yaml.safe_load_all((GOLDEN / "services.yaml").read_text()):
        metadata, spec = service["metadata"], service["spec"]
        if spec.get("clusterIP", "None") == "None" or metadata.get("labels"):
            continue
        ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
        for port in spec["ports"]:
            yield ServicePort(
                ServicePortName(
                    metadata["namespace"],
                    metadata["name"],
                    port.get("name", ""),
                    L4Protocol(port.get("protocol", "TCP")),
                ),
                port["port"],
                cluster_ips=(spec["clusterIP"],),
                external_ips=tuple(spec.get("externalIPs", ())),
                load_balancer_ips=tuple(entry["ip"] for entry in ingress if "ip" in entry),
                node_port=port.get("nodePort", 0),
            )
