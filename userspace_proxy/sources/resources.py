"""What is asked of the API server: one path and its selectors for each kind of object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import quote

from userspace_proxy.core.objects import (
    HEADLESS_LABEL,
    SERVICE_PROXY_NAME_LABEL,
    Endpoints,
    EndpointSlice,
    EndpointsMetadata,
    Node,
    Service,
)
from userspace_proxy.sources.connection import JSON

ObjectT = TypeVar("ObjectT", Service, EndpointSlice, Endpoints, EndpointsMetadata, Node)

_METADATA = "PartialObjectMetadata"
_METADATA_ALONE = f"{JSON};as={_METADATA};g=meta.k8s.io;v=v1"
_OURS = f"!{SERVICE_PROXY_NAME_LABEL}"
_OURS_WITH_CLUSTER_IP = f"{_OURS},!{HEADLESS_LABEL}"


@dataclass(frozen=True, slots=True)
class Resource(Generic[ObjectT]):
    """A collection of objects of one kind that is listed and watched.

    `name` is what RBAC calls it, with its API group; `path` is relative to the server's URL. `is_optional` is set where
    an API server may lack the whole kind, and `is_dispensable` where it may refuse it for any reason. `accept` is the
    form of objects that is asked for, and `sent_kind` what they then call themselves.
    """

    kind: type[ObjectT]
    name: str
    path: str
    selectors: Mapping[str, str] = field(default_factory=dict)
    is_optional: bool = False
    is_dispensable: bool = False
    accept: str = JSON
    sent_kind: str = ""

    @property
    def kind_name(self) -> str:
        """What an object of it says that it is."""
        return self.sent_kind or self.kind.__name__

    def __str__(self) -> str:
        namespace = self.path.partition("/namespaces/")[2].partition("/")[0]
        return f"{self.name} in namespace {namespace}" if namespace else self.name


def services(namespace: str = "") -> Resource[Service]:
    """All services that are not another proxy's."""
    path = path_of("v1", namespace, "services")
    return Resource(Service, "services", path, {"labelSelector": _OURS_WITH_CLUSTER_IP})


def endpoint_slices(namespace: str = "") -> Resource[EndpointSlice]:
    """All slices of services with a cluster IP."""
    path = path_of("discovery.k8s.io/v1", namespace, "endpointslices")
    selectors = {"labelSelector": _OURS_WITH_CLUSTER_IP}
    return Resource(EndpointSlice, "endpointslices.discovery.k8s.io", path, selectors, is_optional=True)


def endpoints(namespace: str = "") -> Resource[Endpoints]:
    """What slices replace; for API servers that do not have slices."""
    path = path_of("v1", namespace, "endpoints")
    return Resource(Endpoints, "endpoints", path, {"labelSelector": _OURS_WITH_CLUSTER_IP})


def endpoints_metadata(namespace: str = "") -> Resource[EndpointsMetadata]:
    """The annotations of what slices replace. The server is asked for metadata alone, as addresses may be many."""
    return Resource(
        EndpointsMetadata,
        "endpoints",
        endpoints(namespace).path,
        {"labelSelector": _OURS_WITH_CLUSTER_IP},
        is_dispensable=True,
        accept=_METADATA_ALONE,
        sent_kind=_METADATA,
    )


def this_node(name: str) -> Resource[Node]:
    """One node."""
    return Resource(Node, "nodes", "/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"})


def path_of(api_version: str, namespace: str, plural: str) -> str:
    """Return the path of a collection, in all namespaces if `namespace` is "". `api_version` is such as `apps/v1`."""
    served_at = f"/{'apis' if '/' in api_version else 'api'}/{api_version}"
    return f"{served_at}/namespaces/{quote(namespace, safe='')}/{plural}" if namespace else f"{served_at}/{plural}"
