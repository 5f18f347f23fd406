"""Which services are woken by their first client, and by what."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from userspace_proxy.core.desired import DesiredState
from userspace_proxy.core.endpoints import NodeFacts
from userspace_proxy.core.idling import (
    IDLED_AT_ANNOTATION,
    UNIDLE_TARGETS_ANNOTATION,
    WAKE_ON_CONNECT_ANNOTATION,
    WAKE_TARGETS_ANNOTATION,
    IdledService,
    ScaleTarget,
)
from userspace_proxy.core.model import ServicePort, ServicePortName
from userspace_proxy.core.objects import Endpoints, EndpointsMetadata, KubernetesObject, ObjectKey, Service

from .kubernetes_objects import endpoint, endpoints_metadata, endpoints_of, service, slice_of

WEB = ServicePortName("default", "web", "http")
IDLED = {IDLED_AT_ANNOTATION: "2026-01-31T12:00:00Z"}
WAKES = {WAKE_ON_CONNECT_ANNOTATION: "true"}
IdleIt = Callable[[], list[KubernetesObject]]


def state_of(*objects: KubernetesObject, unidling: bool = True) -> DesiredState:
    state = DesiredState(unidling=unidling)
    for each in objects:
        state.upsert(each)
    return state


def web(state: DesiredState) -> ServicePort:
    return state.snapshot().service_ports[WEB]


def notices(*objects: KubernetesObject) -> list[str]:
    state = state_of(*objects)
    state.snapshot()
    return [str(each) for each in state.take_notices()]


def targets_of(*objects: KubernetesObject) -> tuple[ScaleTarget, ...]:
    idled = state_of(*objects).idled("default", "web")
    assert idled is not None
    return idled.targets


WAYS: dict[str, list[KubernetesObject]] = {
    "OpenShift's on the Service": [service(annotations=IDLED)],
    "OpenShift's on the Endpoints": [service(), endpoints_of("web", annotations=IDLED)],
    "OpenShift's on the Endpoints beside slices": [service(), endpoints_metadata("web", IDLED)],
    "ours": [service(annotations=WAKES)],
}


@pytest.mark.parametrize("objects", WAYS.values(), ids=WAYS.keys())
def test_a_service_without_endpoints_that_is_marked_is_idled_in_whichever_order_things_come(
    objects: list[KubernetesObject],
) -> None:
    for order in permutations([*objects, slice_of("web")]):
        assert web(state_of(*order)).is_idled


@pytest.mark.parametrize("objects", WAYS.values(), ids=WAYS.keys())
def test_a_service_that_is_marked_is_idled_as_soon_as_its_endpoints_vanish(objects: list[KubernetesObject]) -> None:
    state = state_of(*objects, slice_of("web", "10.0.0.1"))
    assert web(state).wakes_on_connect
    assert not web(state).is_idled
    state.upsert(slice_of("web"))
    assert web(state).is_idled
    state.upsert(slice_of("web", "10.0.0.2"))
    assert not web(state).is_idled


@pytest.mark.parametrize("objects", WAYS.values(), ids=WAYS.keys())
def test_nothing_is_idled_while_unidling_is_off(objects: list[KubernetesObject]) -> None:
    assert not web(state_of(*objects, unidling=False)).wakes_on_connect


def test_a_mark_may_come_and_go_after_the_endpoints_went() -> None:
    state = state_of(service(), slice_of("web"))
    assert not web(state).is_idled
    state.upsert(endpoints_metadata("web", IDLED))
    assert web(state).is_idled
    state.upsert(endpoints_metadata("web", {"another": "annotation"}))
    assert not web(state).is_idled
    state.upsert(endpoints_metadata("web", IDLED))
    assert web(state).is_idled
    state.delete(EndpointsMetadata, "default", "web")
    assert not web(state).is_idled


def test_a_service_that_is_awake_on_other_nodes_alone_is_not_idled() -> None:
    local = service(annotations=WAKES, internalTrafficPolicy="Local", externalTrafficPolicy="Local")
    state = state_of(local, slice_of("web", endpoint("10.0.0.1", node="other")))
    state.set_node(NodeFacts("here"))
    assert not web(state).endpoints
    assert not web(state).is_idled
    state.upsert(slice_of("web"))
    assert web(state).is_idled


def lingering_state() -> DesiredState:
    """Return the state of an idled service whose annotation was taken away a moment ago."""
    state = DesiredState(unidling=True, lingers=True)
    for each in (service(), slice_of("web"), endpoints_metadata("web", IDLED)):
        state.upsert(each)
    assert web(state).is_idled
    state.delete(EndpointsMetadata, "default", "web")
    return state


def test_an_idled_service_whose_mark_is_taken_away_stays_idled_until_it_has_endpoints() -> None:
    state = lingering_state()
    assert web(state).is_idled
    state.upsert(slice_of("web", name="b"))
    assert web(state).is_idled
    assert state.take_lingering() == [("default", "web")]
    assert state.take_lingering() == []
    state.upsert(slice_of("web", "10.0.0.1"))
    assert not web(state).wakes_on_connect
    state.end_lingering(ObjectKey("default", "web"))
    assert state.is_settled
    state.upsert(slice_of("web"))
    assert not web(state).is_idled


def test_it_does_so_only_until_that_is_ended() -> None:
    state = lingering_state()
    assert web(state).is_idled
    state.end_lingering(ObjectKey("default", "web"))
    assert not web(state).is_idled
    state.upsert(endpoints_metadata("web", IDLED))
    assert web(state).is_idled
    state.upsert(endpoints_metadata("web", {}))
    assert web(state).is_idled
    assert state.take_lingering() == [("default", "web")] * 2


def test_it_waits_for_no_endpoints_here_that_are_on_other_nodes() -> None:
    state = DesiredState(unidling=True, lingers=True)
    state.set_node(NodeFacts("here"))
    local = {"internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"}
    state.upsert(service(annotations=IDLED, **local))
    assert web(state).is_idled
    state.upsert(service(**local))
    assert web(state).is_idled
    state.upsert(slice_of("web", endpoint("10.0.0.1", node="other")))
    assert not web(state).is_idled


def test_what_lingers_is_gone_with_its_service() -> None:
    state = lingering_state()
    assert web(state).is_idled
    state.delete(Service, "default", "web")
    assert not state.snapshot().service_ports
    state.upsert(service())
    assert not web(state).is_idled


def test_metadata_of_endpoints_that_says_nothing_costs_nothing() -> None:
    state = state_of(service(), slice_of("web"))
    before = state.snapshot()
    assert not state.upsert(endpoints_metadata("web", {"endpoints.kubernetes.io/last-change-trigger-time": "now"}))
    assert state.is_settled
    assert state.snapshot() is before


def test_false_is_the_same_as_no_annotation() -> None:
    objects = [service(annotations={WAKE_ON_CONNECT_ANNOTATION: "false"})]
    assert not web(state_of(*objects)).is_idled
    assert notices(*objects) == []


def test_a_value_that_is_no_answer_is_told_and_wakes_nothing() -> None:
    objects = [service(annotations={WAKE_ON_CONNECT_ANNOTATION: "yes"})]
    assert not web(state_of(*objects)).is_idled
    assert notices(*objects) == [
        "default/web: annotation userspace-proxy.dev/wake-on-connect: 'yes' is neither true nor false: ignored"
    ]


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-31", "2026-01-31T12:00:00"])
def test_a_time_that_is_none_is_told_and_the_service_counts_as_idled(text: str) -> None:
    objects: list[KubernetesObject] = [service(), endpoints_metadata("web", {IDLED_AT_ANNOTATION: text})]
    assert web(state_of(*objects)).is_idled
    (notice,) = notices(*objects)
    assert f"default/web: annotation {IDLED_AT_ANNOTATION} of the Endpoints: {text!r} is no time such as" in notice


def test_a_service_is_known_by_what_an_event_needs() -> None:
    assert state_of(service(annotations=WAKES)).idled("default", "web") == IdledService("uid-web", "7", ())
    assert state_of().idled("default", "web") is None
    assert state_of(Service(), Endpoints()).idled("default", "") == IdledService()


def test_targets_are_openshifts() -> None:
    text = """[{"kind":"Deployment","group":"apps","name":"web","replicas":3},
               {"kind":"DeploymentConfig","apiVersion":"apps.openshift.io/v1","name":"old","replicas":2},
               {"kind":"ReplicationController","apiVersion":"v1","name":"older","replicas":1,"unknown":[]}]"""
    targets = targets_of(service(), endpoints_metadata("web", {UNIDLE_TARGETS_ANNOTATION: text}))
    assert targets == (
        ScaleTarget("Deployment", "web", 3),
        ScaleTarget("DeploymentConfig", "old", 2),
        ScaleTarget("ReplicationController", "older", 1),
    )
    assert [(each.api_version, each.plural) for each in targets] == [
        ("apps/v1", "deployments"),
        ("apps.openshift.io/v1", "deploymentconfigs"),
        ("v1", "replicationcontrollers"),
    ]
    assert str(targets[0]) == "Deployment web"


def test_our_annotation_comes_before_openshifts_and_the_service_before_its_endpoints() -> None:
    ours, of_service, of_endpoints = (f'[{{"kind":"StatefulSet","name":"{name}"}}]' for name in "abc")
    marked = {UNIDLE_TARGETS_ANNOTATION: of_service}
    mark = endpoints_metadata("web", {UNIDLE_TARGETS_ANNOTATION: of_endpoints})
    assert targets_of(service(annotations={**marked, WAKE_TARGETS_ANNOTATION: ours}), mark)[0].name == "a"
    assert targets_of(service(annotations=marked), mark)[0].name == "b"
    assert targets_of(service(), mark) == (ScaleTarget("StatefulSet", "c", 1),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("web", "it must be a list of targets in JSON, each with kind and name"),
        ('{"kind":"Deployment","name":"web"}', "it must be a list"),
        ('[{"kind":"Deployment"}]', "missing required field `name`"),
        ('[{"kind":"Deployment","name":"web","replicas":"2"}]', "Expected `int`, got `str`"),
        ("[" * 100_000, "it must be a list"),
        ('[{"kind":"DaemonSet","name":"web"}]', "DaemonSet web: its kind is not one of Deployment, StatefulSet"),
        ('[{"kind":"","name":"web"}]', "a target web: its kind is not one of"),
        ('[{"kind":"Deployment","name":""}]', "it has no name"),
        ('[{"kind":"Deployment","name":"web","replicas":0}]', "0 is no number of replicas to wake up to"),
        ('[{"kind":"Deployment","group":"example.com","name":"web"}]', "no Deployment in the API group example.com"),
        ('[{"kind":"StatefulSet","apiVersion":"a.b/v1","name":"web"}]', "no StatefulSet in the API group a.b"),
    ],
)
def test_targets_that_cannot_be_scaled_are_told(text: str, said: str) -> None:
    web = service(annotations={**WAKES, WAKE_TARGETS_ANNOTATION: text})
    (notice,) = notices(web)
    assert f"default/web: annotation {WAKE_TARGETS_ANNOTATION}: " in notice
    assert said in notice
    assert targets_of(web) == ()


def test_a_target_that_is_named_twice_is_one() -> None:
    text = '[{"kind":"Deployment","name":"web"},{"kind":"Deployment","name":"web","replicas":1}]'
    assert targets_of(service(annotations={WAKE_TARGETS_ANNOTATION: text})) == (ScaleTarget("Deployment", "web"),)
