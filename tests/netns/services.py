"""Services in front of the pods of the topology."""

from __future__ import annotations

from tests.netns.topology import ADDRESSES
from userspace_proxy.core.model import Endpoint, L4Protocol, ServicePort, ServicePortName

BACKEND_PORT = 8080


def service(protocol: L4Protocol = L4Protocol.TCP, name: str = "web", *, pods: int = 2) -> ServicePort:
    """Return a service with every kind of portal, in both families, in front of the first pods."""
    both = ADDRESSES.values()
    return ServicePort(
        ServicePortName("ns", name, "", protocol),
        80,
        endpoints=tuple(Endpoint(pod, BACKEND_PORT) for of_family in both for pod in of_family.pods[:pods]),
        cluster_ips=tuple(of_family.cluster_ip for of_family in both),
        load_balancer_ips=tuple(of_family.load_balancer_ip for of_family in both),
        external_ips=tuple(address for of_family in both for address in (of_family.external_ip, of_family.second)),
        node_port=30080,
    )


BOTH = (service(), service(L4Protocol.UDP))
