"""Idled services: which annotations say that a client is to wake a service, and what has to be scaled up for that.

A service without endpoints is woken when it has our annotation, or when it, or its Endpoints object, has OpenShift's.
Source: OpenShift's `oc idle` and unidling controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

import msgspec

from userspace_proxy.core.endpoints import Skip

IDLED_AT_ANNOTATION: Final = "idling.alpha.openshift.io/idled-at"
UNIDLE_TARGETS_ANNOTATION: Final = "idling.alpha.openshift.io/unidle-targets"
WAKE_ON_CONNECT_ANNOTATION: Final = "userspace-proxy.dev/wake-on-connect"
WAKE_TARGETS_ANNOTATION: Final = "userspace-proxy.dev/wake-targets"

ENDPOINTS_ANNOTATIONS: Final = frozenset({IDLED_AT_ANNOTATION, UNIDLE_TARGETS_ANNOTATION})
"""Those that count on an Endpoints object, too, where `oc idle` puts them."""

Annotations = Mapping[str, str]

WakeRequest = Literal["event", "scaling"]
"""What is asked of a cluster to wake a service."""

WakeResult = Literal["done", "unneeded", "failed"]
"""How that ends; "unneeded" where there were pods, or endpoints, before it was done."""

_SCALABLE: Final = {
    "Deployment": ("apps/v1", "deployments", frozenset({"apps", "extensions"})),
    "StatefulSet": ("apps/v1", "statefulsets", frozenset({"apps"})),
    "ReplicaSet": ("apps/v1", "replicasets", frozenset({"apps", "extensions"})),
    "ReplicationController": ("v1", "replicationcontrollers", frozenset[str]()),
    "DeploymentConfig": ("apps.openshift.io/v1", "deploymentconfigs", frozenset({"apps.openshift.io"})),
}
"""For each kind that can be scaled: where it is served, and the API groups by which annotations may call it."""


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """A workload in the namespace of its service, and how many replicas it had before it was scaled to none."""

    kind: str
    name: str
    replicas: int = 1

    @property
    def api_version(self) -> str:
        """The API group and version that serve it, such as `apps/v1`; `v1` for the core group."""
        return _SCALABLE[self.kind][0]

    @property
    def plural(self) -> str:
        """Its kind as RBAC and paths have it."""
        return _SCALABLE[self.kind][1]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class IdledService:
    """What it takes to wake a service: how to refer to it, and what could be scaled up."""

    uid: str = ""
    resource_version: str = ""
    targets: tuple[ScaleTarget, ...] = ()


class _Target(msgspec.Struct, frozen=True, rename="camel"):
    """An entry of the annotations that name targets. Source: OpenShift's RecordedScaleReference."""

    kind: str
    name: str
    replicas: int = 1
    api_version: str = ""
    group: str = ""


_targets = msgspec.json.Decoder(list[_Target])


def wakes_on_connect(service: Annotations, endpoints: Annotations, skip: Skip) -> bool:
    """Tell whether the annotations of a service and of its Endpoints object ask for the first client to wake it.

    What makes no sense in them is told to `skip`.
    """
    ours = service.get(WAKE_ON_CONNECT_ANNOTATION, "false")
    if ours not in ("true", "false"):
        skip(f"annotation {WAKE_ON_CONNECT_ANNOTATION}: {ours!r} is neither true nor false: ignored")
    is_idled = False
    for found, owner in ((service, ""), (endpoints, " of the Endpoints")):
        idled_at = found.get(IDLED_AT_ANNOTATION)
        if idled_at is not None:
            is_idled = True
            _check_time(idled_at, f"annotation {IDLED_AT_ANNOTATION}{owner}", skip)
    if ours != "true" and not is_idled:
        return False
    scale_targets(service, endpoints, skip)
    return True


def scale_targets(service: Annotations, endpoints: Annotations, skip: Skip) -> tuple[ScaleTarget, ...]:
    """Return the workloads behind a service, by our annotation or else by OpenShift's, of the Service or the Endpoints.

    Those that cannot be scaled are left out and told to `skip`.
    """
    for found, name in (
        (service, WAKE_TARGETS_ANNOTATION),
        (service, UNIDLE_TARGETS_ANNOTATION),
        (endpoints, UNIDLE_TARGETS_ANNOTATION),
    ):
        if name in found:
            return _read_targets(found[name], f"annotation {name}", skip)
    return ()


def _check_time(text: str, label: str, skip: Skip) -> None:
    try:
        is_time = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        is_time = False
    if not is_time:
        skip(f"{label}: {text!r} is no time such as 2026-01-31T12:00:00Z: the service counts as idled all the same")


def _read_targets(text: str, label: str, skip: Skip) -> tuple[ScaleTarget, ...]:
    try:
        entries = _targets.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        skip(f"{label}: it must be a list of targets in JSON, each with kind and name: {error}: ignored")
        return ()
    targets = dict[ScaleTarget, None]()
    for entry in entries:
        reason = _fault(entry)
        if reason:
            skip(f"{label}: {entry.kind or 'a target'} {entry.name}: {reason}: skipped")
        else:
            targets[ScaleTarget(entry.kind, entry.name, entry.replicas)] = None
    return tuple(targets)


def _fault(entry: _Target) -> str:
    """Return why a workload cannot be scaled up, "" when it can."""
    if entry.kind not in _SCALABLE:
        return f"its kind is not one of {', '.join(_SCALABLE)}"
    group = entry.group or entry.api_version.rpartition("/")[0]
    if group and group not in _SCALABLE[entry.kind][2]:
        return f"there is no {entry.kind} in the API group {group}"
    if not entry.name:
        return "it has no name"
    return "" if entry.replicas > 0 else f"{entry.replicas} is no number of replicas to wake up to"
