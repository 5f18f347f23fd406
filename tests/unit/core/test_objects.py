"""Decoding: the same structs from the API's JSON and from plain mappings."""

from __future__ import annotations

import json

import msgspec
import pytest

from userspace_proxy.core.objects import Endpoints, EndpointSlice, Node, ObjectKey, Service

SLICE = {
    "kind": "EndpointSlice",
    "apiVersion": "discovery.k8s.io/v1",
    "metadata": {"name": "web-abc", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "zone": "a", "targetRef": {"uid": "1"}}],
    "ports": [{"name": "", "port": 8080, "protocol": "TCP", "appProtocol": None}],
}


def test_json_and_mappings_decode_to_the_same_object() -> None:
    assert msgspec.json.decode(json.dumps(SLICE), type=EndpointSlice) == msgspec.convert(SLICE, EndpointSlice)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (EndpointSlice, '{"metadata": {"name": "a", "labels": null}, "endpoints": null, "ports": null}'),
        (
            EndpointSlice,
            '{"endpoints": [{"addresses": null, "conditions": null, "hints": null}], "ports": [{"name": null}]}',
        ),
        (Endpoints, '{"subsets": null}'),
        (Endpoints, '{"subsets": [{"addresses": null, "notReadyAddresses": null, "ports": null}]}'),
        (Service, '{"spec": {"ports": null, "clusterIPs": null, "sessionAffinityConfig": {"clientIP": null}}}'),
        (Service, '{"status": {"loadBalancer": {"ingress": null}}}'),
        (Node, '{"spec": {"taints": null}, "status": {"addresses": null}}'),
    ],
)
def test_null_is_accepted_where_api_servers_send_it(kind: type[msgspec.Struct], text: str) -> None:
    msgspec.json.decode(text, type=kind)


def test_an_object_without_namespace_is_in_the_default_namespace() -> None:
    assert msgspec.convert({"metadata": {"name": "web"}}, Service).key == ObjectKey("default", "web")
    assert str(msgspec.convert(SLICE, EndpointSlice).key) == "shop/web-abc"


def test_a_slice_belongs_to_the_service_that_its_label_names() -> None:
    assert msgspec.convert(SLICE, EndpointSlice).service_key == ObjectKey("shop", "web")
    assert msgspec.convert({"metadata": {"name": "web"}}, EndpointSlice).service_key is None


@pytest.mark.parametrize(
    ("conditions", "ready", "serving", "terminating"),
    [
        (None, True, True, False),
        ({}, True, True, False),
        ({"ready": False}, False, True, False),
        ({"serving": False, "terminating": True}, True, False, True),
    ],
)
def test_a_missing_condition_means_ready_serving_and_not_terminating(
    conditions: dict[str, bool] | None, ready: bool, serving: bool, terminating: bool
) -> None:
    each = msgspec.convert({"endpoints": [{"conditions": conditions}]}, EndpointSlice).endpoints
    assert each
    assert (each[0].is_ready, each[0].is_serving, each[0].is_terminating) == (ready, serving, terminating)


def test_a_node_has_taints_addresses_and_a_time_of_deletion() -> None:
    node = msgspec.convert(
        {
            "metadata": {"name": "n1", "deletionTimestamp": "2024-01-01T00:00:00Z"},
            "spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
        },
        Node,
    )
    assert node.metadata.deletion_timestamp == "2024-01-01T00:00:00Z"
    assert node.spec.taints
    assert node.spec.taints[0].key == "ToBeDeletedByClusterAutoscaler"
    assert node.status
    assert node.status.addresses
    assert node.status.addresses[0].address == "192.0.2.1"
