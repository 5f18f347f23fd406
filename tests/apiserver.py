"""A Kubernetes API server for tests: objects, versions, lists in pages, watches, and faults to order.

    async with ApiServer() as api:
        api.put(service("web"))                  # as kubectl would
        source = KubernetesSource(ApiConnection(Access(api.url)))
        api.cut_watches()                        # as a restarted load balancer would

Every request is recorded with the verb and resource that RBAC would ask for. Objects are kept as the JSON they are sent
as, so large clusters are cheap. Workloads have the subresource `scale`, and lists and watches come as metadata alone
where that is asked for. Labels are selected by `!key`, `key` and `key=value`, fields by `metadata.name=NAME`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace, "" for objects without one, and name."""

_FORBIDDEN, _CONFLICT, _GONE = 403, 409, 410
_METADATA = "PartialObjectMetadata"


@dataclass(frozen=True)
class Kind:
    """A kind of object and where it is served."""

    plural: str
    kind: str
    api_version: str
    is_namespaced: bool = True

    @property
    def prefix(self) -> str:
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"


KINDS = (
    Kind("services", "Service", "v1"),
    Kind("endpoints", "Endpoints", "v1"),
    Kind("endpointslices", "EndpointSlice", "discovery.k8s.io/v1"),
    Kind("nodes", "Node", "v1", is_namespaced=False),
    Kind("pods", "Pod", "v1"),
    Kind("events", "Event", "v1"),
    Kind("events", "Event", "events.k8s.io/v1"),
    Kind("deployments", "Deployment", "apps/v1"),
    Kind("statefulsets", "StatefulSet", "apps/v1"),
    Kind("replicasets", "ReplicaSet", "apps/v1"),
    Kind("replicationcontrollers", "ReplicationController", "v1"),
    Kind("deploymentconfigs", "DeploymentConfig", "apps.openshift.io/v1"),
)


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    verb: str
    resource: str
    group: str
    namespace: str
    name: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def wants_metadata(self) -> bool:
        return f"as={_METADATA}" in self.headers.get("Accept", "")

    def shown(self, data: bytes) -> bytes:
        """Return an object as this request wants it."""
        return _metadata_of(data) if self.wants_metadata else data


@dataclass(frozen=True)
class Stored:
    """An object with its labels at hand and its JSON ready to send."""

    key: Key
    labels: Mapping[str, str]
    data: bytes


@dataclass(frozen=True)
class Change:
    """What happened at a version: `before` is None for a new object, `after` for a deleted one."""

    version: int
    before: Stored | None
    after: Stored | None


@dataclass
class Fault:
    """Answers the next `times` matching requests with an error. Empty fields match all."""

    status: int
    verb: str = ""
    resource: str = ""
    times: float = float("inf")
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "ordered by the test"

    def matches(self, request: Request) -> bool:
        return self.times > 0 and self.verb in ("", request.verb) and self.resource in ("", request.resource)


class Collection:
    """All objects of one kind and what happened to them."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.objects: dict[Key, Stored] = {}
        self.history: list[Change] = []
        self.watches: set[Watch] = set()


class Watch:
    """One open watch: lines to send, and None for its end."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.transport: asyncio.Transport | None = None

    def tell(self, change: Change) -> None:
        """Send a change as this watch's selectors see it."""
        was, is_ = _selected(change.before, self.request), _selected(change.after, self.request)
        if is_ and change.after:
            self.lines.put_nowait(event_line("MODIFIED" if was else "ADDED", self.request.shown(change.after.data)))
        elif was and change.before:
            data = _with_version(change.before.data, change.version)
            self.lines.put_nowait(event_line("DELETED", self.request.shown(data)))


class ApiServer:
    """An API server on a loopback port, with kube-apiserver's ways as far as a proxy sees them.

    `served` restricts the plurals that exist. `tokens`, when given, are the bearer tokens that are accepted.
    `gone_as` says how an expired version is refused: with the HTTP "status" 410 or with an ERROR "event".
    """

    def __init__(
        self,
        *,
        served: tuple[str, ...] = tuple({kind.plural for kind in KINDS}),
        tls: ssl.SSLContext | None = None,
        tokens: set[str] | None = None,
        gone_as: str = "event",
        most_per_page: int = 500,
        port: int = 0,
    ) -> None:
        self.tokens = tokens
        self.gone_as = gone_as
        self.most_per_page = most_per_page
        self.requests: list[Request] = []
        self.posted: list[Object] = []
        self.version = 1
        self.compacted = 0
        self.port = port
        self._tls = tls
        self._faults: list[Fault] = []
        self._collections = {(kind.prefix, kind.plural): Collection(kind) for kind in KINDS if kind.plural in served}
        self._continues: dict[str, tuple[int, list[Stored]]] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._requested = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    # Running

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve. After `stop`, serve again on the same port, with the same objects."""
        self._runner = web.AppRunner(self.app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections and end those that are open."""
        self.thaw()
        runner, self._runner = self._runner, None
        if runner is not None:
            self.cut_watches()
            self.end_watches()
            await runner.cleanup()

    # Objects

    def put(self, each: Object) -> None:
        """Create or replace an object."""
        collection = self._collection_of(each)
        metadata = {**each["metadata"]}
        if collection.kind.is_namespaced:
            metadata.setdefault("namespace", "default")
        key = (metadata.get("namespace", ""), metadata["name"])
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        stored = Stored(key, metadata.get("labels") or {}, json.dumps({**each, "metadata": metadata}).encode())
        before = collection.objects.get(key)
        collection.objects[key] = stored
        self._record(collection, Change(self.version, before, stored))

    def delete(self, plural: str, name: str, namespace: str = "default") -> None:
        """Delete an object. Raises KeyError when there is none."""
        collection = self._collection(plural)
        before = collection.objects.pop((namespace if collection.kind.is_namespaced else "", name))
        self.version += 1
        self._record(collection, Change(self.version, before, None))

    def _record(self, collection: Collection, change: Change) -> None:
        collection.history.append(change)
        for watch in collection.watches:
            watch.tell(change)

    def _collection(self, plural: str) -> Collection:
        return next(each for (_, name), each in self._collections.items() if name == plural)

    def _collection_of(self, each: Object) -> Collection:
        kinds = self._collections.values()
        return next(one for one in kinds if (one.kind.kind, one.kind.api_version) == (each["kind"], each["apiVersion"]))

    # Faults

    def fail(self, status: int, **options: Any) -> Fault:
        """Refuse requests from now on. Return the fault, for `heal`."""
        fault = Fault(status, **options)
        self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Order no more faults."""
        self._faults.clear()

    def compact(self) -> None:
        """Forget all versions before now: watches cannot resume from them, and lists cannot continue."""
        self.compacted = self.version
        self._continues.clear()
        for collection in self._collections.values():
            collection.history.clear()

    def cut_watches(self, plural: str = "") -> None:
        """End connections with watches in the middle of whatever they send."""
        for watch in self.open_watches(plural):
            if watch.transport is not None and not watch.transport.is_closing():  # abort then fails in 3.11.2
                watch.transport.abort()

    def end_watches(self, plural: str = "") -> None:
        """End watches as their time-out would."""
        for watch in self.open_watches(plural):
            watch.lines.put_nowait(None)

    def send_raw(self, plural: str, data: bytes) -> None:
        """Send bytes over all watches of a kind, right or wrong."""
        for watch in self.open_watches(plural):
            watch.lines.put_nowait(data)

    def send_error(self, plural: str, code: int, message: str = "ordered by the test") -> None:
        """Send an ERROR event over all watches of a kind."""
        self.send_raw(plural, event_line("ERROR", json.dumps(_status(code, message)).encode()))

    def bookmark(self, plural: str = "") -> None:
        """Tell all watches the present version."""
        for watch in self.open_watches(plural):
            watch.lines.put_nowait(self._bookmark_line())

    def freeze(self) -> None:
        """Send nothing more and answer nothing, and keep connections open, as a stopped process does."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def open_watches(self, plural: str = "") -> list[Watch]:
        return [
            watch
            for (_, name), collection in self._collections.items()
            for watch in collection.watches
            if plural in ("", name)
        ]

    # What tests wait for

    def count(self, verb: str, resource: str = "") -> int:
        """Return how many requests of this kind have arrived."""
        return sum(each.verb == verb and resource in ("", each.resource) for each in self.requests)

    async def until_requested(self, verb: str, resource: str = "", *, times: int = 1) -> Request:
        """Return the latest request of this kind once there were that many."""
        async with self._requested:
            await self._requested.wait_for(lambda: self.count(verb, resource) >= times)
        return [each for each in self.requests if each.verb == verb and resource in ("", each.resource)][-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition holds that requests bring about."""
        async with self._requested:
            await self._requested.wait_for(condition)

    # HTTP

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        request, collection = self._parse(http)
        self.requests.append(request)
        await self._notify()
        await self._thawed.wait()
        if self.tokens is not None and http.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return _refuse(401, "Unauthorized")
        for fault in self._faults:
            if fault.matches(request):
                fault.times -= 1
                return _refuse(fault.status, fault.message, fault.headers)
        if collection is None:
            return _refuse(404, "the server could not find the requested resource")
        match request.verb:
            case "get" | "update" if request.resource.endswith("/scale"):
                return await self._scale(http, request, collection)
            case "list":
                return self._list(request, collection)
            case "watch":
                return await self._watch(http, request, collection)
            case "get":
                return self._get(request, collection)
            case "create":
                return await self._create(http, collection)
            case "update":
                self.put(await http.json())
                return self._get(request, collection)
            case "delete":
                self.delete(collection.kind.plural, request.name, request.namespace)
                return web.json_response(_status(200, "deleted"))
        return _refuse(405, "not by this server")

    async def _notify(self) -> None:
        async with self._requested:
            self._requested.notify_all()

    def _parse(self, http: web.Request) -> tuple[Request, Collection | None]:
        parts = http.path.strip("/").split("/")
        depth = 2 if parts[0] == "api" else 3
        group, rest = "/" + "/".join(parts[:depth]), parts[depth:]
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = ([*rest, "", "", ""])[:3]
        query = dict(http.query)
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(http.method, "get")
        if verb == "get" and not name:
            verb = "watch" if query.get("watch") in ("true", "1") else "list"
        api_group = parts[1] if depth == 3 and len(parts) > 1 else ""
        resource = f"{plural}/{subresource}" if subresource else plural
        request = Request(verb, resource, api_group, namespace, name, query, dict(http.headers))
        return request, self._collections.get((group, plural))

    def _list(self, request: Request, collection: Collection) -> web.Response:
        token = request.query.get("continue", "")
        if token and token not in self._continues:
            return _refuse(_GONE, "The provided continue parameter is too old")
        found = [each for each in collection.objects.values() if _selected(each, request)]
        version, items = self._continues.pop(token) if token else (self.version, found)
        limit = min(int(request.query.get("limit") or len(items) or 1), self.most_per_page)
        page, rest = items[:limit], items[limit:]
        metadata: Object = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = f"{version}-{len(self.requests)}"
            metadata["remainingItemCount"] = len(rest)
            self._continues[metadata["continue"]] = (version, rest)
        kind = collection.kind
        name, api_version = (_METADATA, "meta.k8s.io/v1") if request.wants_metadata else (kind.kind, kind.api_version)
        head = json.dumps({"kind": f"{name}List", "apiVersion": api_version, "metadata": metadata})
        body = head[:-1].encode() + b',"items":[' + b",".join(request.shown(each.data) for each in page) + b"]}\n"
        return web.Response(body=body, content_type="application/json")

    def _get(self, request: Request, collection: Collection) -> web.Response:
        found = collection.objects.get((request.namespace, request.name))
        if found is None:
            return _refuse(404, f'{collection.kind.plural} "{request.name}" not found')
        return web.Response(body=found.data, content_type="application/json")

    async def _scale(self, http: web.Request, request: Request, collection: Collection) -> web.Response:
        """Answer what asks for the size of a workload, or gives it another one."""
        found = collection.objects.get((request.namespace, request.name))
        if found is None:
            return _refuse(404, f'{collection.kind.plural} "{request.name}" not found')
        each = json.loads(found.data)
        if request.verb == "update":
            wanted = await http.json()
            if wanted["metadata"]["resourceVersion"] != each["metadata"]["resourceVersion"]:
                return _refuse(_CONFLICT, "the object has been modified; please apply your changes anew")
            each["spec"]["replicas"] = wanted["spec"].get("replicas", 0)
            self.put(each)
            await self._notify()
            each = json.loads(collection.objects[found.key].data)
        identity = {key: each["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
        replicas = each["spec"]["replicas"]
        spec = {"replicas": replicas} if replicas else {}  # a zero is left out, as by Kubernetes
        return web.json_response({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": identity, "spec": spec})

    async def _create(self, http: web.Request, collection: Collection) -> web.Response:
        each = await http.json()
        self.posted.append(each)
        if "name" not in each["metadata"]:
            each["metadata"]["name"] = f"{each['metadata'].get('generateName', 'object-')}{self.version}"
        self.put(each)
        await self._notify()
        return web.json_response(each, status=201)

    async def _watch(self, http: web.Request, request: Request, collection: Collection) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or 0)
        if since < self.compacted and self.gone_as == "status":
            return _refuse(_GONE, f"too old resource version: {since} ({self.compacted})")
        watch = Watch(request)
        watch.transport = http.transport
        if since < self.compacted:
            message = f"too old resource version: {since} ({self.compacted})"
            watch.lines.put_nowait(event_line("ERROR", json.dumps(_status(_GONE, message)).encode()))
            watch.lines.put_nowait(None)
        for change in collection.history:
            if change.version > since:
                watch.tell(change)
        collection.watches.add(watch)
        try:
            return await self._stream(http, watch)
        finally:
            collection.watches.discard(watch)

    async def _stream(self, http: web.Request, watch: Watch) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(http)
        await self._notify()
        timeout_s = float(watch.request.query.get("timeoutSeconds") or 1800)
        try:
            async with asyncio.timeout(timeout_s):
                async for line in _queued(watch.lines):
                    await self._thawed.wait()
                    await response.write(line)
        except TimeoutError:
            await self._thawed.wait()
            if watch.request.query.get("allowWatchBookmarks") == "true":
                await response.write(self._bookmark_line())
        except ConnectionError:
            return response
        await response.write_eof()
        return response

    def _bookmark_line(self) -> bytes:
        return event_line("BOOKMARK", json.dumps({"metadata": {"resourceVersion": str(self.version)}}).encode())


def event_line(type_: str, data: bytes) -> bytes:
    """Return one line of a watch."""
    return b'{"type":"' + type_.encode() + b'","object":' + data + b"}\n"


async def _queued(lines: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (line := await lines.get()) is not None:
        yield line


def _with_version(data: bytes, version: int) -> bytes:
    each = json.loads(data)
    each["metadata"]["resourceVersion"] = str(version)
    return json.dumps(each).encode()


def _metadata_of(data: bytes) -> bytes:
    metadata = json.loads(data)["metadata"]
    return json.dumps({"kind": _METADATA, "apiVersion": "meta.k8s.io/v1", "metadata": metadata}).encode()


def _selected(stored: Stored | None, request: Request) -> bool:
    if stored is None or request.namespace not in ("", stored.key[0]):
        return False
    fields = request.query.get("fieldSelector", "")
    if fields and fields != f"metadata.name={stored.key[1]}":
        return False
    selectors = filter(None, request.query.get("labelSelector", "").split(","))
    return all(_label_matches(stored.labels, each) for each in selectors)


def _label_matches(labels: Mapping[str, str], selector: str) -> bool:
    if selector.startswith("!"):
        return selector[1:] not in labels
    key, equals, value = selector.partition("=")
    return labels.get(key) == value if equals else key in labels


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}


def _refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(_status(status, message), status=status, headers=headers)


# Objects to serve


def service(name: str, *, namespace: str = "default", cluster_ip: str = "10.0.0.1", **spec: Any) -> Object:
    """Return a service with the port 80, unless `ports` says otherwise."""
    ports = spec.pop("ports", [{"port": 80, "protocol": "TCP"}])
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "labels": spec.pop("labels", {}),
        "annotations": spec.pop("annotations", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"type": "ClusterIP", "clusterIP": cluster_ip, "clusterIPs": [cluster_ip], "ports": ports, **spec},
        "status": {"loadBalancer": {}},
    }


def endpoint_slice(
    service_name: str, *addresses: str, namespace: str = "default", name: str = "", port: int = 8080
) -> Object:
    """Return a slice of ready endpoints."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name or f"{service_name}-1",
            "namespace": namespace,
            "labels": {"kubernetes.io/service-name": service_name},
        },
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": True, "serving": True, "terminating": False}}
            for address in addresses
        ],
        "ports": [{"name": "", "port": port, "protocol": "TCP"}],
    }


def workload(kind: str, name: str, replicas: int, *, namespace: str = "default") -> Object:
    """Return a Deployment or another kind that can be scaled."""
    api_version = next(each.api_version for each in KINDS if each.kind == kind)
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": {"replicas": replicas}}


def endpoints(
    name: str,
    *addresses: str,
    namespace: str = "default",
    port: int = 8080,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """Return an object of the deprecated kind Endpoints."""
    subsets = [{"addresses": [{"ip": each} for each in addresses], "ports": [{"port": port, "protocol": "TCP"}]}]
    return {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {"name": name, "namespace": namespace, "annotations": dict(annotations or {})},
        "subsets": subsets,
    }


def node(name: str, *ips: str, labels: Mapping[str, str] | None = None, taints: tuple[str, ...] = ()) -> Object:
    """Return a node with internal addresses."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {"taints": [{"key": each, "effect": "NoSchedule"} for each in taints]},
        "status": {"addresses": [{"type": "InternalIP", "address": each} for each in ips]},
    }


def cluster(services: int, endpoints_per_service: int) -> Iterator[Object]:
    """Yield the objects of a large cluster."""
    for number in range(services):
        high, low = divmod(number, 250)
        yield service(f"service-{number}", namespace=f"namespace-{number % 100}", cluster_ip=f"10.0.{high}.{low + 1}")
        addresses = [f"10.{1 + each}.{high}.{low + 1}" for each in range(endpoints_per_service)]
        yield endpoint_slice(f"service-{number}", *addresses, namespace=f"namespace-{number % 100}")
