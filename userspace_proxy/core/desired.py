"""Kubernetes objects in, snapshots out: what should be proxied, kept up to date one change at a time.

Whatever the order of changes, the snapshot depends on the present objects alone, but for services that linger. Only
services that a change could concern are worked out again, and a `ServicePort` that comes out equal stays the same
object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar, cast

from userspace_proxy.core.endpoints import Merged, NodeFacts, PortKey, Skip, choose, merge_slices, merge_subsets
from userspace_proxy.core.idling import (
    ENDPOINTS_ANNOTATIONS,
    Annotations,
    IdledService,
    scale_targets,
    wakes_on_connect,
)
from userspace_proxy.core.model import Scope, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.objects import (
    HEADLESS_LABEL,
    SERVICE_NAME_LABEL,
    SERVICE_PROXY_NAME_LABEL,
    Endpoints,
    EndpointSlice,
    EndpointsMetadata,
    KubernetesObject,
    ObjectKey,
    Service,
)
from userspace_proxy.core.services import is_proxied, service_ports

ObjectT = TypeVar("ObjectT", Service, EndpointSlice, Endpoints, EndpointsMetadata)

_Ports = dict[ServicePortName, ServicePort]
"""The ports of one service."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that was left out, for the log. `service` is `namespace/name`, or "" where no service is known."""

    service: str
    text: str

    def __str__(self) -> str:
        return f"{self.service}: {self.text}" if self.service else self.text


class DesiredState:
    """The objects as last heard of, and the snapshot that follows from them.

    `serve_without_cluster_ip` serves services that have no cluster IP, as those that never were in a cluster.
    `unidling` lets annotations say that the first client of a service without endpoints is to wake it. With `lingers`
    an idled service whose annotation is taken away stays idled until it has endpoints, or `end_lingering` is called.
    Objects that are labelled as another proxy's, or as headless, do not exist here; nor does metadata without meaning.
    """

    def __init__(
        self, *, serve_without_cluster_ip: bool = False, unidling: bool = False, lingers: bool = False
    ) -> None:
        self._serve_without_cluster_ip = serve_without_cluster_ip
        self._unidling = unidling
        self._lingers = lingers
        self._lingering: set[ObjectKey] = set()
        self._lingering_since: list[ObjectKey] = []
        self._given_up: set[ObjectKey] = set()
        self._node = NodeFacts()
        self._objects: dict[type[KubernetesObject], dict[ObjectKey, KubernetesObject]]
        self._objects = {Service: {}, EndpointSlice: {}, Endpoints: {}, EndpointsMetadata: {}}
        self._slices_of: dict[ObjectKey, dict[ObjectKey, EndpointSlice]] = {}
        self._stale: set[ObjectKey] = set()
        self._failed: set[ObjectKey] = set()
        self._is_snapshot_old = False
        self._built: dict[ObjectKey, _Ports] = {}
        self._service_ports: _Ports = {}
        self._reported: dict[ObjectKey, frozenset[Notice]] = {}
        self._notices: list[Notice] = []
        self._snapshot = Snapshot()

    def replace(self, kind: type[ObjectT], objects: Iterable[ObjectT]) -> None:
        """Make `objects` all there is of `kind`: others of that kind are deleted, equal ones cost nothing."""
        listed = {each.key: each for each in objects}
        for key in self._all(kind).keys() - listed.keys():
            self.delete(kind, *key)
        for each in listed.values():
            self.upsert(each)

    def upsert(self, each: KubernetesObject) -> bool:
        """Add an object, or put it in the place of its namesake. Return whether it is new, or other than that one."""
        if _is_passed_over(each):
            self.delete(type(each), *each.key)
        elif self._objects[type(each)].get(each.key) != each:
            self.delete(type(each), *each.key)
            self._objects[type(each)][each.key] = each
            self._link(each)
            return True
        return False

    def delete(self, kind: type[KubernetesObject], namespace: str, name: str) -> None:
        """Forget an object. One that is not known is no error."""
        known = self._objects[kind].pop(ObjectKey(namespace, name), None)
        if known is not None:
            self._unlink(known)

    def set_node(self, node: NodeFacts) -> None:
        """Say where this proxy runs, which traffic policies and topology hints depend on."""
        if node != self._node:
            self._node = node
            self._stale.update(self._all(Service))

    def idled(self, namespace: str, name: str) -> IdledService | None:
        """Return what it takes to wake a service; None when there is no such service."""
        service = self._all(Service).get(ObjectKey(namespace, name))
        if service is None:
            return None
        targets = scale_targets(service.annotations, self._endpoints_annotations(service.key), lambda text: None)
        return IdledService(service.metadata.uid or "", service.metadata.resource_version or "", targets)

    def take_lingering(self) -> list[ObjectKey]:
        """Return the services that linger since the last call or later. Each is for `end_lingering`, some time."""
        keys, self._lingering_since = self._lingering_since, []
        return keys

    def end_lingering(self, key: ObjectKey) -> None:
        """Let a service be no longer idled whose annotation was taken away, if that is still so."""
        if key in self._lingering:
            self._given_up.add(key)
            self._stale.add(key)

    @property
    def is_settled(self) -> bool:
        """Whether all changes are worked out, except for services that could not be."""
        return not self._stale

    def settle(self) -> None:
        """Work out one of the services that changes could concern: a piece of `snapshot` for whoever is in no hurry.

        Whatever goes wrong is raised. Then that service stays as it was, and the snapshot after the next tries again.
        """
        key = self._stale.pop()
        self._failed.add(key)
        ports = self._build(key)
        self._failed.discard(key)
        if ports != self._built.get(key, {}):
            self._replace_ports(self._built.pop(key, {}), ports)
            if ports:
                self._built[key] = ports
            self._is_snapshot_old = True

    def snapshot(self) -> Snapshot:
        """Return what should be proxied now; the same object as last time when nothing is different."""
        while self._stale:
            self.settle()
        self._stale, self._failed = self._failed, set()
        if self._is_snapshot_old:
            self._snapshot = Snapshot(MappingProxyType(self._service_ports.copy()))
            self._is_snapshot_old = False
        return self._snapshot

    def take_notices(self) -> list[Notice]:
        """Return what the snapshots since the last call left out. Each is told once for as long as it is true."""
        notices, self._notices = self._notices, []
        return notices

    def _all(self, kind: type[ObjectT]) -> dict[ObjectKey, ObjectT]:
        return cast("dict[ObjectKey, ObjectT]", self._objects[kind])

    def _link(self, each: KubernetesObject) -> None:
        if not isinstance(each, EndpointSlice):
            self._stale.add(each.key)
        elif each.service_key is not None:
            self._slices_of.setdefault(each.service_key, {})[each.key] = each
            self._stale.add(each.service_key)
        else:
            text = f"EndpointSlice {each.key} has no label {SERVICE_NAME_LABEL} and so belongs to no service: ignored"
            self._notices.append(Notice("", text))

    def _unlink(self, each: KubernetesObject) -> None:
        if not isinstance(each, EndpointSlice):
            self._stale.add(each.key)
        elif each.service_key is not None:
            slices = self._slices_of[each.service_key]
            del slices[each.key]
            if not slices:
                del self._slices_of[each.service_key]
            self._stale.add(each.service_key)

    def _replace_ports(self, old: _Ports, new: _Ports) -> None:
        """Put the new ports of a service in the place of its old ones; equal ports stay the same object."""
        for name in old.keys() - new.keys():
            del self._service_ports[name]
        for name, port in new.items():
            if old.get(name) == port:
                new[name] = old[name]
            self._service_ports[name] = new[name]

    def _build(self, key: ObjectKey) -> _Ports:
        """Return the service ports of one service, none when it is not ours to proxy."""
        texts = list[str]()
        service = self._all(Service).get(key)
        ports: _Ports = {}
        lingers = False
        if service and is_proxied(service, serve_without_cluster_ip=self._serve_without_cluster_ip):
            annotations = service.annotations, self._endpoints_annotations(key)
            wakes = self._unidling and wakes_on_connect(*annotations, texts.append)
            ports = {port.name: port for port in self._join(service, wakes, texts.append)}
            lingers = not wakes and any(port.wakes_on_connect for port in ports.values())
        self._note_lingering(key, lingers)
        self._report(key, frozenset(Notice(str(key), text) for text in texts))
        return ports

    def _awaited(self, key: ObjectKey) -> Collection[ServicePortName]:
        """Return the ports of a service that are idled, and stay so without an annotation until they have endpoints.

        Source: OpenShift's controller, which takes the annotation away when it has scaled up, before pods are ready.
        """
        if not self._lingers or key in self._given_up:
            return ()
        return [name for name, port in self._built.get(key, {}).items() if port.is_idled]

    def _note_lingering(self, key: ObjectKey, lingers: bool) -> None:
        self._given_up.discard(key)
        if not lingers:
            self._lingering.discard(key)
        elif key not in self._lingering:
            self._lingering.add(key)
            self._lingering_since.append(key)

    def _join(self, service: Service, wakes: bool, skip: Skip) -> Iterator[ServicePort]:
        """Yield the ports of a service with the endpoints that its traffic policies choose."""
        ports = list(service_ports(service, skip))
        merged = self._merge(service.key, [(port.name.port, port.protocol.value) for port in ports], skip)
        is_local = service.spec.internal_traffic_policy == "Local"
        is_local_outside = service.spec.external_traffic_policy == "Local"
        policies = {Scope.INTERNAL: is_local, Scope.EXTERNAL: is_local_outside}
        scopes = frozenset(scope for scope, is_set in policies.items() if is_set and self._node.name)
        awaited = self._awaited(service.key)
        for port in ports:
            known = merged[port.name.port, port.protocol.value]
            outside = None
            if self._node.name and is_local_outside != is_local:
                outside = choose(known, self._node, only_local=is_local_outside)
            inside = choose(known, self._node, only_local=is_local)
            is_awake = bool(inside or outside or choose(known, self._node, only_local=False))
            wakes_here = wakes and bool(inside or outside or not is_awake)
            yield replace(
                port,
                endpoints=inside,
                external_endpoints=outside,
                local_scopes=scopes,
                wakes_on_connect=wakes_here or (port.name in awaited and not is_awake),
            )

    def _merge(self, key: ObjectKey, wanted: Iterable[PortKey], skip: Skip) -> dict[PortKey, Merged]:
        """Return the endpoints of a service: from its slices when it has any, though they be empty, else Endpoints."""
        endpoints = self._all(Endpoints).get(key)
        if endpoints and key not in self._slices_of:
            return merge_subsets(endpoints, wanted, skip)
        return merge_slices((each for _, each in sorted(self._slices_of.get(key, {}).items())), wanted, skip)

    def _endpoints_annotations(self, key: ObjectKey) -> Annotations:
        """Return the annotations of a service's Endpoints object, however they were learnt."""
        found = self._all(Endpoints).get(key) or self._all(EndpointsMetadata).get(key)
        return found.annotations if found else {}

    def _report(self, key: ObjectKey, notices: frozenset[Notice]) -> None:
        fresh = notices - self._reported.get(key, frozenset())
        self._notices.extend(sorted(fresh, key=str))
        if notices:
            self._reported[key] = notices
        else:
            self._reported.pop(key, None)


def _is_passed_over(each: KubernetesObject) -> bool:
    """Whether an object is another proxy's, of a service that is not proxied, or metadata without meaning."""
    if each.label(SERVICE_PROXY_NAME_LABEL) is not None or each.label(HEADLESS_LABEL) is not None:
        return True
    return isinstance(each, EndpointsMetadata) and ENDPOINTS_ANNOTATIONS.isdisjoint(each.annotations)
