"""Changes in, snapshots out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy.core.desired import DesiredState, Notice
from userspace_proxy.core.endpoints import NodeFacts
from userspace_proxy.core.model import ServicePort, ServicePortName
from userspace_proxy.core.objects import Endpoints, EndpointSlice, KubernetesObject, Service

from .kubernetes_objects import HTTP, endpoint, endpoints_of, service, slice_of

WEB = ServicePortName("default", "web", "http")


def state_of(*objects: KubernetesObject, node: NodeFacts | None = None) -> DesiredState:
    state = DesiredState()
    state.set_node(node or NodeFacts())
    for each in objects:
        state.upsert(each)
    return state


def web(state: DesiredState) -> ServicePort:
    return state.snapshot().service_ports[WEB]


def addresses(state: DesiredState) -> list[str]:
    return [each.address for each in web(state).endpoints]


def test_a_service_with_a_slice_is_served_by_its_endpoints() -> None:
    assert addresses(state_of(service(), slice_of("web", "10.0.0.2", "10.0.0.1"))) == ["10.0.0.1", "10.0.0.2"]


def test_the_order_of_arrival_does_not_matter() -> None:
    objects = [service(), slice_of("web", "10.0.0.1", name="a"), slice_of("web", "10.0.0.2", name="b")]
    assert state_of(*objects).snapshot() == state_of(*reversed(objects)).snapshot()


def test_slices_win_over_endpoints_even_when_they_are_empty() -> None:
    old = endpoints_of("web", {"addresses": [{"ip": "10.0.0.9"}], "ports": [{"name": "http", "port": 8080}]})
    state = state_of(service(), old, slice_of("web", "10.0.0.1"))
    assert addresses(state) == ["10.0.0.1"]
    state.upsert(slice_of("web"))
    assert addresses(state) == []
    state.delete(EndpointSlice, "default", "web-a")
    assert addresses(state) == ["10.0.0.9"]
    state.delete(Endpoints, "default", "web")
    assert addresses(state) == []


def test_a_deleted_slice_takes_only_its_own_endpoints_along() -> None:
    state = state_of(service(), slice_of("web", "10.0.0.1", name="a"), slice_of("web", "10.0.0.2", name="b"))
    state.delete(EndpointSlice, "default", "web-a")
    assert addresses(state) == ["10.0.0.2"]


def test_a_slice_whose_label_names_another_service_moves_there() -> None:
    state = state_of(service(), service("api"), slice_of("web", "10.0.0.1"))
    moved = slice_of("web", "10.0.0.1", labels={"kubernetes.io/service-name": "api"})
    state.upsert(moved)
    assert addresses(state) == []
    assert state.snapshot().service_ports[ServicePortName("default", "api", "http")].endpoints


def test_a_service_that_becomes_external_name_goes_and_comes_back() -> None:
    state = state_of(service(), slice_of("web", "10.0.0.1"))
    before = state.snapshot()
    state.upsert(service(type="ExternalName", externalName="example.org"))
    assert state.snapshot().service_ports == {}
    state.upsert(service())
    assert state.snapshot() == before


@pytest.mark.parametrize("label", ["service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"])
def test_a_label_of_another_proxy_or_headless_counts_as_delete_and_its_removal_as_add(label: str) -> None:
    state = state_of(service(), slice_of("web", "10.0.0.1"))
    state.upsert(service(labels={label: ""}))
    assert state.snapshot().service_ports == {}
    state.upsert(service())
    assert addresses(state) == ["10.0.0.1"]
    state.upsert(slice_of("web", "10.0.0.1", labels={label: ""}))
    assert addresses(state) == []


def test_a_headless_slice_does_not_hide_the_endpoints_object() -> None:
    old = endpoints_of("web", {"addresses": [{"ip": "10.0.0.9"}], "ports": [{"name": "http", "port": 8080}]})
    assert addresses(state_of(service(), old, slice_of("web", labels={"service.kubernetes.io/headless": ""}))) == [
        "10.0.0.9"
    ]


def test_services_without_cluster_ip_are_served_where_that_is_asked_for() -> None:
    state = DesiredState(serve_without_cluster_ip=True)
    state.replace(Service, [service(clusterIP=None), service("db", clusterIP="None")])
    assert list(state.snapshot().service_ports) == [WEB]
    assert state_of(service(clusterIP=None)).snapshot().service_ports == {}


def test_a_list_replaces_everything_of_its_kind_and_nothing_else() -> None:
    state = state_of(service(), service("gone"), slice_of("web", "10.0.0.1"))
    state.replace(Service, [service(), service("new")])
    assert {name.service for name in state.snapshot().service_ports} == {"web", "new"}
    assert addresses(state) == ["10.0.0.1"]
    state.replace(EndpointSlice, [])
    assert addresses(state) == []


def test_a_removed_port_is_gone_and_its_siblings_stay_the_same_object() -> None:
    state = state_of(service(ports=[HTTP, {"name": "metrics", "port": 9090}]))
    before = web(state)
    state.upsert(service())
    assert list(state.snapshot().service_ports) == [WEB]
    assert web(state) is before


def test_unchanged_service_ports_keep_their_identity() -> None:
    state = state_of(service(), service("api"), slice_of("web", "10.0.0.1"))
    before = state.snapshot()
    state.upsert(slice_of("api", "10.0.0.2"))
    after = state.snapshot()
    assert after is not before
    assert after.service_ports[WEB] is before.service_ports[WEB]


def test_a_snapshot_of_equal_meaning_is_the_same_object() -> None:
    state = state_of(service(), slice_of("web", "10.0.0.1", "10.0.0.2"))
    before = state.snapshot()
    state.upsert(slice_of("web", "10.0.0.2", "10.0.0.1"))
    state.delete(Service, "default", "unknown")
    state.upsert(service("headless", clusterIP="None"))
    assert state.snapshot() is before


def test_a_snapshot_does_not_change_afterwards() -> None:
    state = state_of(service())
    before = state.snapshot()
    state.upsert(service("api"))
    state.snapshot()
    assert list(before.service_ports) == [WEB]


def test_policies_part_inside_from_outside_traffic() -> None:
    both = slice_of("web", endpoint("10.0.0.1", node="here"), endpoint("10.0.0.2", node="there"))
    here = NodeFacts("here")
    port = web(state_of(service(externalTrafficPolicy="Local"), both, node=here))
    assert [each.address for each in port.endpoints] == ["10.0.0.1", "10.0.0.2"]
    assert [each.address for each in port.external_endpoints or ()] == ["10.0.0.1"]
    port = web(state_of(service(internalTrafficPolicy="Local"), both, node=here))
    assert [each.address for each in port.endpoints] == ["10.0.0.1"]
    assert [each.address for each in port.external_endpoints or ()] == ["10.0.0.1", "10.0.0.2"]
    port = web(state_of(service(internalTrafficPolicy="Local", externalTrafficPolicy="Local"), both, node=here))
    assert [each.address for each in port.endpoints] == ["10.0.0.1"]
    assert port.external_endpoints is None


def test_policies_do_not_apply_until_the_node_is_known() -> None:
    state = state_of(service(externalTrafficPolicy="Local"), slice_of("web", endpoint("10.0.0.1", node="there")))
    assert web(state).external_endpoints is None
    state.set_node(NodeFacts("here"))
    assert web(state).external_endpoints == ()
    state.set_node(NodeFacts("here"))
    assert web(state).external_endpoints == ()


def test_what_is_left_out_is_told_once_for_as_long_as_it_is_true() -> None:
    sctp = service(ports=[HTTP, {"name": "s", "port": 9, "protocol": "SCTP"}])
    state = state_of(sctp)
    assert state.take_notices() == []
    state.snapshot()
    (notice,) = state.take_notices()
    assert str(notice) == "default/web: port s: SCTP is not proxied: skipped"
    state.upsert(slice_of("web", "10.0.0.1"))
    state.snapshot()
    assert state.take_notices() == []
    state.upsert(service())
    state.snapshot()
    state.upsert(sctp)
    state.snapshot()
    assert state.take_notices() == [notice]


def test_a_slice_that_belongs_to_no_service_is_told() -> None:
    state = state_of(slice_of(None, "10.0.0.1"))
    (notice,) = state.take_notices()
    assert notice == Notice("", str(notice))
    assert "has no label kubernetes.io/service-name" in str(notice)
    state.replace(EndpointSlice, [slice_of(None, "10.0.0.1")])
    assert state.take_notices() == []
    state.replace(EndpointSlice, [])
    assert state.snapshot().service_ports == {}


def test_one_change_among_5000_services_costs_less_than_a_millisecond() -> None:
    state = DesiredState()
    state.replace(Service, [service(f"s{number}") for number in range(5000)])
    state.replace(EndpointSlice, [slice_of(f"s{number}", "10.0.0.1") for number in range(5000)])
    state.snapshot()
    best_s = min(_timed_change(state, slice_of("s7", f"10.0.1.{last}")) for last in range(10))
    assert best_s < 0.001


def _timed_change(state: DesiredState, change: EndpointSlice) -> float:
    start = time.perf_counter()
    state.upsert(change)
    state.snapshot()
    return time.perf_counter() - start


LABELS = st.sampled_from([None, None, {"service.kubernetes.io/headless": ""}])
SERVICES = st.builds(
    service,
    st.sampled_from(["web", "api"]),
    labels=LABELS,
    type=st.sampled_from(["ClusterIP", "ExternalName"]),
    clusterIP=st.sampled_from(["10.96.0.1", "None", None]),
    externalTrafficPolicy=st.sampled_from(["Local", "Cluster"]),
    ports=st.sampled_from([[HTTP], [HTTP, {"port": 53, "protocol": "UDP"}], []]),
)
SLICES = st.builds(
    lambda owner, ends, name, labels: slice_of(owner, *ends, name=name, labels=labels),
    st.sampled_from(["web", "api", None]),
    st.lists(
        st.builds(
            endpoint,
            st.sampled_from(["10.0.0.1", "10.0.0.2", "ten"]),
            node=st.sampled_from(["here", "there"]),
            zones=st.sampled_from([None, "a", "b"]),
            ready=st.booleans(),
            terminating=st.booleans(),
        ),
        max_size=3,
    ),
    st.sampled_from(["a", "b"]),
    LABELS,
)
ENDPOINTS = st.builds(
    lambda name, ip: endpoints_of(name, {"addresses": [{"ip": ip}], "ports": [{"name": "http", "port": 1}]}),
    st.sampled_from(["web", "api"]),
    st.sampled_from(["10.0.0.7", "10.0.0.8"]),
)
CHANGES = st.one_of(
    st.tuples(st.just("upsert"), SERVICES | SLICES | ENDPOINTS),
    st.tuples(st.just("delete"), SERVICES | SLICES | ENDPOINTS),
    st.tuples(st.just("replace"), st.lists(SLICES, max_size=3)),
    st.tuples(st.just("node"), st.sampled_from([NodeFacts(), NodeFacts("here", "a")])),
    st.tuples(st.just("snapshot"), st.none()),
)


@given(st.lists(CHANGES, max_size=25))
def test_any_history_gives_the_snapshot_of_the_objects_that_are_left(history: list[tuple[str, object]]) -> None:
    state, node = DesiredState(), NodeFacts()
    left: dict[tuple[type, object], KubernetesObject] = {}
    for verb, subject in history:
        match verb, subject:
            case "upsert", Service() | EndpointSlice() | Endpoints():
                state.upsert(subject)
                left[type(subject), subject.key] = subject
            case "delete", Service() | EndpointSlice() | Endpoints():
                state.delete(type(subject), *subject.key)
                left.pop((type(subject), subject.key), None)
            case "replace", list():
                state.replace(EndpointSlice, subject)
                left = {key: each for key, each in left.items() if key[0] is not EndpointSlice}
                left |= {(EndpointSlice, each.key): each for each in subject}
            case "node", NodeFacts():
                node = subject
                state.set_node(node)
            case _:
                state.snapshot()
    assert state.snapshot() == state_of(*left.values(), node=node).snapshot()


def test_changes_may_be_worked_out_a_service_at_a_time() -> None:
    state = state_of(service(), service("other"), slice_of("web", "10.0.0.1"))
    pieces = 0
    while not state.is_settled:
        state.settle()
        pieces += 1
    assert pieces == 2
    assert {name.service for name in state.snapshot().service_ports} == {"web", "other"}
    assert state.snapshot() is state.snapshot()


def test_a_service_that_cannot_be_worked_out_stays_as_it_was_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = state_of(service(), slice_of("web", "10.0.0.1"))
    before = state.snapshot()
    state.upsert(slice_of("web", "10.0.0.2"))
    with monkeypatch.context() as broken:
        broken.setattr(state, "_build", lambda key: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            state.settle()
        assert state.is_settled
        assert state.snapshot() is before
    assert addresses(state) == ["10.0.0.2"]
