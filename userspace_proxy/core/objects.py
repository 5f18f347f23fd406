"""Kubernetes objects as they travel: only the fields in use, decoded but not yet judged.

The same structs are read from the API's JSON (`msgspec.json.Decoder(Service)`) and from plain mappings
(`msgspec.convert(mapping, Service)`). Unknown fields are dropped. A field that real API servers send as null, such as
`"ports": null`, may be None here; nothing else is promised about a value: `core.desired` skips what it cannot use,
`sources.validation` refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from msgspec import Struct, field

SERVICE_NAME_LABEL = "kubernetes.io/service-name"
SERVICE_PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
TRIGGER_TIME_ANNOTATION = "endpoints.kubernetes.io/last-change-trigger-time"


class ObjectKey(NamedTuple):
    """What tells objects of one kind apart."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class _Wire(Struct, frozen=True, gc=False, rename="camel"):
    """A decoded mapping. Decoding builds no cycles, so the garbage collector need not visit it."""


class ObjectMeta(_Wire, frozen=True):
    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    resource_version: str | None = None
    deletion_timestamp: str | None = None


class _Object(_Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.metadata.namespace or "default", self.metadata.name or "")

    def label(self, name: str) -> str | None:
        """Return the value of a label, or None when the object does not carry it."""
        return (self.metadata.labels or {}).get(name)

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or {}


class ServicePortSpec(_Wire, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    node_port: int | None = None


class ClientIPConfig(_Wire, frozen=True):
    timeout_seconds: int | None = None


class SessionAffinityConfig(_Wire, frozen=True):
    client_ip: ClientIPConfig | None = field(default=None, name="clientIP")


class ServiceSpec(_Wire, frozen=True):
    type: str | None = None
    cluster_ip: str | None = field(default=None, name="clusterIP")
    cluster_ips: tuple[str, ...] | None = field(default=None, name="clusterIPs")
    ip_families: tuple[str, ...] | None = None
    external_name: str | None = None
    external_ips: tuple[str, ...] | None = field(default=None, name="externalIPs")
    load_balancer_source_ranges: tuple[str, ...] | None = None
    ports: tuple[ServicePortSpec, ...] | None = None
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    health_check_node_port: int | None = None

    @property
    def all_cluster_ips(self) -> tuple[str, ...]:
        """The cluster IPs of both families; empty when none was assigned, `("None",)` when the service is headless."""
        return self.cluster_ips or ((self.cluster_ip,) if self.cluster_ip else ())

    @property
    def is_headless(self) -> bool:
        return self.cluster_ip == "None" or "None" in self.all_cluster_ips

    @property
    def affinity_timeout_s(self) -> int | None:
        config = self.session_affinity_config
        return config.client_ip.timeout_seconds if config and config.client_ip else None


class LoadBalancerIngress(_Wire, frozen=True):
    ip: str | None = None
    hostname: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(_Wire, frozen=True):
    ingress: tuple[LoadBalancerIngress, ...] | None = None


class ServiceStatus(_Wire, frozen=True):
    load_balancer: LoadBalancerStatus | None = None


class Service(_Object, frozen=True):
    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus | None = None

    @property
    def ingress(self) -> tuple[LoadBalancerIngress, ...]:
        load_balancer = self.status.load_balancer if self.status else None
        return (load_balancer.ingress if load_balancer else None) or ()


class EndpointConditions(_Wire, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class ForNode(_Wire, frozen=True):
    name: str | None = None


class ForZone(_Wire, frozen=True):
    name: str | None = None


class EndpointHints(_Wire, frozen=True):
    for_nodes: tuple[ForNode, ...] | None = None
    for_zones: tuple[ForZone, ...] | None = None


class SliceEndpoint(_Wire, frozen=True):
    """One endpoint of a slice. A missing condition is the API's default: ready, serving, not terminating."""

    addresses: tuple[str, ...] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: EndpointHints | None = None

    @property
    def is_ready(self) -> bool:
        return self.conditions is None or self.conditions.ready is not False

    @property
    def is_serving(self) -> bool:
        return self.conditions is None or self.conditions.serving is not False

    @property
    def is_terminating(self) -> bool:
        return self.conditions is not None and self.conditions.terminating is True


class EndpointPort(_Wire, frozen=True):
    """A port of a slice or of an Endpoints subset."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(_Object, frozen=True):
    address_type: str | None = None
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[EndpointPort, ...] | None = None

    @property
    def service_key(self) -> ObjectKey | None:
        """The service that the slice belongs to, or None when no label says it."""
        service = self.label(SERVICE_NAME_LABEL)
        return ObjectKey(self.key.namespace, service) if service else None


class EndpointAddress(_Wire, frozen=True):
    ip: str | None = None
    node_name: str | None = None


class EndpointSubset(_Wire, frozen=True):
    addresses: tuple[EndpointAddress, ...] | None = None
    not_ready_addresses: tuple[EndpointAddress, ...] | None = None
    ports: tuple[EndpointPort, ...] | None = None


class Endpoints(_Object, frozen=True):
    """The deprecated predecessor of slices: one object of the same name as its service."""

    subsets: tuple[EndpointSubset, ...] | None = None


class EndpointsMetadata(_Object, frozen=True):
    """What an Endpoints object says beside its endpoints, where those come from slices: slices have no annotations."""


class Taint(_Wire, frozen=True):
    key: str | None = None
    value: str | None = None
    effect: str | None = None


class NodeSpec(_Wire, frozen=True):
    pod_cidrs: tuple[str, ...] | None = field(default=None, name="podCIDRs")
    taints: tuple[Taint, ...] | None = None


class NodeAddress(_Wire, frozen=True):
    type: str | None = None
    address: str | None = None


class NodeStatus(_Wire, frozen=True):
    addresses: tuple[NodeAddress, ...] | None = None


class Node(_Object, frozen=True):
    spec: NodeSpec = NodeSpec()
    status: NodeStatus | None = None


KubernetesObject = Service | EndpointSlice | Endpoints | EndpointsMetadata


def triggered_at(each: KubernetesObject) -> float | None:
    """Return when the change of pods was made that an object follows, in seconds since the epoch; None if not known."""
    text = each.annotations.get(TRIGGER_TIME_ANNOTATION)
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None
