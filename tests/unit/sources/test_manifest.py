"""Manifests in, objects out; and every fault with its place."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from userspace_proxy.core.desired import DesiredState
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.objects import EndpointSlice, KubernetesObject
from userspace_proxy.sources.manifest import parse

from .manifests import ENDPOINTS, SERVICE, SLICE, service


def names(text: str | bytes) -> list[str]:
    return [f"{type(each).__name__} {each.key}" for each in parse(text, "a.yaml")]


def fault_of(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "a.yaml")
    return str(caught.value)


def as_json(text: str, **dump: Any) -> str:
    return json.dumps(yaml.safe_load(text), **dump)


def test_documents_give_objects_in_their_order() -> None:
    assert names(f"# a comment\n---\n{SERVICE}---\n---\n{SLICE}...\n---\n{ENDPOINTS}") == [
        "Service default/web",
        "EndpointSlice default/web-a",
        "Endpoints default/web",
    ]


@pytest.mark.parametrize("separator", ["\n---\n", "\n", "\n--- ", "---\n\n"])
def test_json_documents_give_the_same_objects_as_yaml(separator: str) -> None:
    if separator == "---\n\n":
        separator = "\n" + separator
    assert parse(separator.join([as_json(SERVICE), as_json(SLICE)]), "a.json") == parse(
        f"{SERVICE}---\n{SLICE}", "a.yaml"
    )


def test_flow_style_yaml_is_not_mistaken_for_json() -> None:
    assert names("{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {ports: [{port: 80}]}}") == [
        "Service default/web"
    ]


@pytest.mark.parametrize(
    ("version", "kind"),
    [("v1", "List"), ("v1", "ServiceList"), ("v1", "EndpointsList"), ("discovery.k8s.io/v1", "EndpointSliceList")],
)
def test_lists_give_their_items(version: str, kind: str) -> None:
    item = {"List": SERVICE, "ServiceList": SERVICE, "EndpointsList": ENDPOINTS, "EndpointSliceList": SLICE}[kind]
    document = {"apiVersion": version, "kind": kind, "items": [yaml.safe_load(item)]}
    assert parse(yaml.safe_dump(document), "a") == parse(json.dumps(document), "a") == parse(item, "a")
    assert parse(json.dumps(document | {"items": None}), "a") == []


def test_items_of_a_typed_list_need_not_say_what_they_are() -> None:
    item = {key: value for key, value in yaml.safe_load(SERVICE).items() if key not in ("kind", "apiVersion")}
    assert names(json.dumps({"apiVersion": "v1", "kind": "ServiceList", "items": [item]})) == ["Service default/web"]
    assert fault_of(json.dumps({"apiVersion": "v1", "kind": "List", "items": [item]})).startswith(
        "a.yaml:1: kind: missing"
    )


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("serving.knative.dev/v1", "Service"),
        ("apps/v1", "Deployment"),
        ("discovery.k8s.io/v9", "EndpointSlice"),
        ([], "Pod"),
    ],
)
def test_kind_and_version_together_decide_and_other_objects_are_passed_over(version: Any, kind: str) -> None:
    assert parse(json.dumps({"apiVersion": version, "kind": kind, "spec": "anything"}), "a") == []


def test_the_older_version_of_slices_is_read_too() -> None:
    assert names(SLICE.replace("/v1", "/v1beta1")) == ["EndpointSlice default/web-a"]


@pytest.mark.parametrize("text", ["", "\n", "# nothing", "---", "---\n---\n", "null", "...\n"])
def test_an_empty_file_has_no_objects(text: str) -> None:
    assert parse(text, "a.yaml") == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_encodings_and_line_ends_do_not_matter(encoding: str, line_end: str) -> None:
    assert names(f"{SERVICE}---\n{SLICE}".replace("\n", line_end).encode(encoding)) == [
        "Service default/web",
        "EndpointSlice default/web-a",
    ]


def test_directives_belong_to_the_document_after_them() -> None:
    assert names(f"{SERVICE}...\n%YAML 1.1\n%TAG ! tag:example.org,2024:\n---\n{SLICE}") == [
        "Service default/web",
        "EndpointSlice default/web-a",
    ]


SERVICE_FAULTS = [
    ("name: web", "title: web", 3, "Service: metadata.name: missing"),
    ("name: web", "name: Web_1", 4, "Service default/Web_1: metadata.name: 'Web_1' is no DNS name"),
    ("name: web", "name: web\n  namespace: a.b", 5, "Service a.b/web: metadata.namespace: 'a.b' is no DNS label"),
    ("name: web", "name: web\n  labels:\n    a: b\n    c: 1", 7,
     "metadata.labels: expected text, got a whole number (put it in quotes)"),
    ("10.96.0.1", "10.96.0.256", 6, "spec.clusterIP: '10.96.0.256' is no IP address"),
    ("clusterIP: 10.96.0.1", "clusterIPs:\n  - 10.96.0.1\n  - x", 8, "spec.clusterIPs[1]: 'x' is no IP address"),
    ("clusterIP: 10.96.0.1", "loadBalancerSourceRanges: [10.0.0.0/8]\n  externalIPs: [x]", 7,
     "spec.externalIPs[0]: 'x' is no IP address"),
    ("clusterIP: 10.96.0.1", "loadBalancerSourceRanges: [10.0.0.1]", 6,
     "spec.loadBalancerSourceRanges[0]: '10.0.0.1' is no network"),
    ("clusterIP: 10.96.0.1", "type: clusterip", 6, "spec.type: 'clusterip' is not one of ClusterIP,"),
    ("clusterIP: 10.96.0.1", "sessionAffinity: Client", 6, "spec.sessionAffinity: 'Client' is not one of None,"),
    ("clusterIP: 10.96.0.1", "sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}", 6,
     "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not in 1..86400"),
    ("clusterIP: 10.96.0.1", "externalTrafficPolicy: local", 6,
     "spec.externalTrafficPolicy: 'local' is not one of Cluster, Local"),
    ("port: 80", "port: 0", 9, "spec.ports[0].port: 0 is not in 1..65535"),
    ("port: 80", "port: 65536", 9, "spec.ports[0].port: 65536 is not in 1..65535"),
    ("port: 80", "port: http", 9, "spec.ports[0].port: expected a whole number, got text"),
    ("port: 80", "port: 80.5", 9, "spec.ports[0].port: expected a whole number, got a fraction"),
    ("port: 80", "port: yes", 9, "spec.ports[0].port: expected a whole number, got true or false"),
    ("port: 80", "port: " + "9" * 4000, 9, "spec.ports[0].port: the number is not in 1..65535"),
    ("port: 80", "port: " + "9" * 5000, 9, "spec.ports[0].port: expected a whole number, got text"),
    ("port: 80", "port: .nan", 9, "spec.ports[0].port: expected a whole number, got text"),
    ("port: 80", "targetPort: 80", 8, "spec.ports[0].port: missing"),
    ("port: 80", "port: 80\n    nodePort: 99999", 10, "spec.ports[0].nodePort: 99999 is not in 1..65535"),
    ("  ports:", "  ports:\n  - {name: http, port: 1}", 9, "spec.ports[1].name: a second TCP port with the name"),
    ("  ports:", "  ports:\n  - {name: b, port: 80}", 10, "spec.ports[1].port: a second TCP port with the number 80"),
    ("TCP", "ICMP", 10, "spec.ports[0].protocol: 'ICMP' is not one of TCP, UDP, SCTP"),
    ("name: http", "name: HTTP!", 8, "spec.ports[0].name: 'HTTP!' is no DNS label"),
    ("name: http", "name: 80", 8, "spec.ports[0].name: expected text, got a whole number (put it in quotes)"),
    ("name: http", "name: http\n    name: b", 9, "the key 'name' is there twice"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "line", "reason"), SERVICE_FAULTS)
def test_a_fault_in_a_service_names_file_line_object_field_and_reason(
    right: str, wrong: str, line: int, reason: str
) -> None:
    fault = fault_of(SERVICE.replace(right, wrong, 1))
    assert fault.startswith(f"a.yaml:{line}: ")
    assert reason in fault


@pytest.mark.parametrize(
    ("right", "wrong", "line", "reason"),
    [
        ("name: web-a", "name: a..b", 4, "metadata.name: "),
        ("addressType: IPv4", "", 1, "EndpointSlice default/web-a: addressType: missing: IPv4, IPv6 or FQDN"),
        ("IPv4", "ipv4", 7, "EndpointSlice default/web-a: addressType: 'ipv4' is not one of IPv4, IPv6, FQDN"),
        ("10.0.0.1", "ten", 10, "EndpointSlice default/web-a: endpoints[0].addresses[0]: 'ten' is no IP address"),
        ("ready: true", "ready: maybe", 11, "endpoints[0].conditions.ready: expected true or false, got text"),
        ("8080", "-1", 14, "ports[0].port: -1 is not in 1..65535"),
        ("name: http", "name: http\n  protocol: tcp", 14, "ports[0].protocol: 'tcp' is not one of TCP, UDP, SCTP"),
    ],
)
def test_a_fault_in_a_slice_names_its_place(right: str, wrong: str, line: int, reason: str) -> None:
    fault = fault_of(SLICE.replace(right, wrong, 1))
    assert fault.startswith(f"a.yaml:{line}: ")
    assert reason in fault


def test_a_fault_in_endpoints_names_its_place() -> None:
    assert fault_of(ENDPOINTS.replace("10.0.0.1", "ten")) == (
        "a.yaml:7: Endpoints default/web: subsets[0].addresses[0].ip: 'ten' is no IP address"
    )


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("port: 8080", "port: null"), ("port: 8080", "port: 0"), ("- 10.0.0.1", ""), ("IPv4", "FQDN"), ("IPv4", "IPv6")],
)
def test_what_the_api_lets_pass_is_left_to_be_skipped_later(right: str, wrong: str) -> None:
    assert names(SLICE.replace(right, wrong, 1)) == ["EndpointSlice default/web-a"]


def test_a_bad_address_of_a_load_balancer_names_its_place() -> None:
    status = "status: {loadBalancer: {ingress: [{hostname: lb.example.org}, {ip: ten}]}}"
    assert fault_of(SERVICE + status) == (
        "a.yaml:11: Service default/web: status.loadBalancer.ingress[1].ip: 'ten' is no IP address"
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "ExternalName", "externalName": "example.org"},
        {"clusterIP": "None", "clusterIPs": ["None"], "externalIPs": ["192.0.2.1"]},
    ],
)
def test_only_services_that_are_served_need_ports(spec: dict[str, Any]) -> None:
    document = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": spec}
    assert names(json.dumps(document)) == ["Service default/web"]
    assert "spec.ports: missing" in fault_of(json.dumps(document | {"spec": {}}))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: b", "a.yaml:1: kind: missing: it says which kind of object this is"),
        ("a: b\nkind: 1", "a.yaml:2: kind: missing: it says which kind of object this is"),
        ("kind: Service", "a.yaml:1: Service: apiVersion: missing: it says which Service this is"),
        ("---\n- a", "a.yaml:2: a Kubernetes object is a mapping"),
        ("web", "a.yaml:1: a Kubernetes object is a mapping"),
        ("apiVersion: v1\nkind: List\nitems: a", "a.yaml:3: List: items: expected a list"),
        ("apiVersion: v1\nkind: List\nitems:\n- a", "a.yaml:4: a Kubernetes object is a mapping"),
        ("apiVersion: v1\nkind: List\nitems:\n- {kind: List, apiVersion: v1}",
         "a.yaml:4: List: a list within a list is not supported"),
        ("apiVersion: v1\nkind: Service\nspec:", "a.yaml:3: Service: spec: expected a mapping, got nothing"),
        ("apiVersion: v1\nkind: Service\nmetadata: a", "a.yaml:3: Service: metadata: expected a mapping, got text"),
        (b"kind: a\nb: \xff", "a.yaml:2: no valid UTF-8: invalid start byte"),
        (b"\xff\xfea", "a.yaml:1: no valid UTF-16-LE: truncated data"),
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(text: str | bytes, fault: str) -> None:
    assert fault_of(text) == fault


def test_a_fault_in_json_names_its_line() -> None:
    wrong = as_json(SERVICE.replace("port: 80", "port: http").replace("name: web", "name: \U0001f600"), indent=1)
    line = 1 + wrong[: wrong.index('"port"')].count("\n")
    assert fault_of(wrong).startswith(f"a.yaml:{line}: Service 'default/\\U0001f600': spec.ports[0].port: ")
    assert fault_of(as_json(SLICE) + "\n" + wrong).startswith(f"a.yaml:{line + 1}: ")
    twice = as_json(SERVICE)[:-1] + ',\n"kind": "Service"}'
    assert fault_of(twice) == "a.yaml:2: the key 'kind' is there twice"
    assert fault_of(as_json(SERVICE).replace("80", "NaN")).startswith(
        "a.yaml:1: Service default/web: spec.ports[0].port: "
    )


def test_a_fault_whose_line_yaml_cannot_find_names_the_line_of_its_document() -> None:
    wrong = as_json(SERVICE).replace("80", '"http"').replace('"web"', '"web", "a": "\x7f"')
    assert fault_of(f"{SLICE}---\n{wrong}") == (
        "a.yaml:15: Service default/web: spec.ports[0].port: expected a whole number, got text"
    )


def test_a_fault_in_an_item_of_a_list_names_the_line_of_its_field() -> None:
    items = [yaml.safe_load(service("one")), yaml.safe_load(service("two").replace("port: 80", "port: 0"))]
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": items})
    line = 1 + text[: text.index("port: 0")].count("\n")
    assert fault_of(text) == f"a.yaml:{line}: Service default/two: spec.ports[0].port: 0 is not in 1..65535"


def test_the_same_object_twice_counts_once() -> None:
    assert names(f"{SERVICE}---\n{as_json(SERVICE)}") == ["Service default/web"]


def test_two_objects_of_one_name_that_differ_are_refused_with_both_places() -> None:
    assert fault_of(f"{SERVICE}---\n{SERVICE.replace('80', '81')}") == (
        "a.yaml:12: Service default/web: already defined otherwise in a.yaml:1"
    )


def test_objects_of_different_kind_or_namespace_may_share_a_name() -> None:
    elsewhere = SERVICE.replace("name: web", "name: web\n  namespace: other")
    assert names("---\n".join([SERVICE, elsewhere, ENDPOINTS])) == [
        "Service default/web",
        "Service other/web",
        "Endpoints default/web",
    ]


def test_unknown_fields_dates_and_long_lists_of_managed_fields_do_not_matter() -> None:
    text = SERVICE.replace(
        "name: web", "name: web\n  creationTimestamp: 2024-01-01T00:00:00Z\n  managedFields: [{a: 1}]"
    )
    assert names(text) == ["Service default/web"]


def _objects_or_fault(text: str | bytes) -> list[KubernetesObject] | ConfigError:
    try:
        return parse(text, "a.yaml")
    except ConfigError as error:
        return error


def _never_another_exception(text: str | bytes) -> None:
    found = _objects_or_fault(text)
    if isinstance(found, ConfigError):
        assert re.fullmatch(r"a\.yaml:[1-9][0-9]*", found.where)
        assert re.fullmatch(r"[^\n]+", str(found))
        str(found).encode()
    else:
        state = DesiredState(serve_without_cluster_ip=True)
        for each in found:
            state.upsert(each)
        state.snapshot()


@given(st.text() | st.text(alphabet="ab:-[]{},&*!|>'\"%#?<.01 \n\t\\~") | st.binary())
@example("[" * 100_000)
@example('{"a":' * 100_000)
@example("- " * 1000)
@example("a: !!python/object/apply:os.system [x]")
@example('{"kind": "\\ud800"}')
@example('{"kind": "Service", "apiVersion": "v1", "metadata": {"name": "\\ud800\\n"}}')
@example("kind: " + "9" * 5000)
def test_any_text_gives_objects_or_an_error_that_names_the_place(text: str | bytes) -> None:
    _never_another_exception(text)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["None", "10.0.0.1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _places(value: object) -> list[tuple[Any, Any]]:
    """Return every place in a value, as a collection and a key or index into it."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in _places(inner)]


@given(st.data())
def test_any_value_in_any_place_of_a_manifest_gives_objects_or_an_error_that_names_the_place(
    data: st.DataObject,
) -> None:
    document = yaml.safe_load(data.draw(st.sampled_from([SERVICE, SLICE, ENDPOINTS])))
    for _ in range(data.draw(st.integers(1, 2))):
        collection, key = data.draw(st.sampled_from(_places(document)))
        collection[key] = data.draw(JUNK)
    _never_another_exception(json.dumps(document))
    _never_another_exception(yaml.dump(document))


@given(st.data())
def test_any_edit_of_a_manifest_gives_objects_or_an_error_that_names_the_place(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([SERVICE, SLICE, ENDPOINTS, as_json(SLICE, indent=1)]))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 10)))
    _never_another_exception(text[:start] + data.draw(st.text(max_size=5)) + text[end:])


def test_what_files_give_is_what_the_api_gives() -> None:
    assert parse(SLICE, "a") == [msgspec.json.decode(as_json(SLICE), type=EndpointSlice)]
