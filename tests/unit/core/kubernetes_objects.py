"""Kubernetes objects in few words, for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from userspace_proxy.core.objects import Endpoints, EndpointSlice, EndpointsMetadata, Service

HTTP = {"name": "http", "port": 80}


def service(
    name: str = "web",
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    status: Any = None,
    **spec: Any,
) -> Service:
    """Return a service with the cluster IP 10.96.0.1 and one port, 80/TCP, named http, unless `spec` says otherwise."""
    spec = {"clusterIP": "10.96.0.1", "ports": [HTTP], **spec}
    metadata = {
        "name": name,
        "labels": labels,
        "annotations": annotations,
        "uid": f"uid-{name}",
        "resourceVersion": "7",
    }
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, Service)


def slice_of(
    owner: str | None,
    *endpoints: Any,
    name: str = "a",
    port: Any = 8080,
    ports: Any = None,
    family: str | None = "IPv4",
    labels: dict[str, str] | None = None,
) -> EndpointSlice:
    """Return a slice of the service `owner`. Endpoints are addresses, or mappings made by `endpoint`."""
    owned = {"kubernetes.io/service-name": owner} if owner else {}
    return msgspec.convert(
        {
            "metadata": {"name": f"{owner}-{name}", "labels": owned | (labels or {})},
            "addressType": family,
            "endpoints": [endpoint(each) if isinstance(each, str) else each for each in endpoints],
            "ports": [{"name": "http", "port": port}] if ports is None else ports,
        },
        EndpointSlice,
    )


def endpoint(
    address: str, *, node: str | None = None, nodes: str | None = None, zones: str | None = None, **conditions: bool
) -> dict[str, Any]:
    """Return an endpoint of a slice. `nodes` and `zones` are its hints, parted by blanks."""
    hints = {
        "forNodes": [{"name": each} for each in nodes.split()] if nodes else None,
        "forZones": [{"name": each} for each in zones.split()] if zones else None,
    }
    return {"addresses": [address], "nodeName": node, "conditions": conditions, "hints": hints}


def endpoints_of(name: str, *subsets: Any, annotations: dict[str, str] | None = None) -> Endpoints:
    return msgspec.convert(
        {"metadata": {"name": name, "annotations": annotations}, "subsets": list(subsets)}, Endpoints
    )


def endpoints_metadata(name: str, annotations: dict[str, str] | None = None) -> EndpointsMetadata:
    return msgspec.convert({"metadata": {"name": name, "annotations": annotations}}, EndpointsMetadata)
