"""The proxy under test: in a thread of its own, over the variants of the data path, and nothing may be left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest
import uvloop

from tests.traffic.child import ChildPlane
from tests.traffic.peers import (
    PATIENCE_S,
    AnsweringDatagrams,
    Backend,
    Datagrams,
    Peer,
    ServingBackend,
    echo,
    eventually,
    identify,
)
from userspace_proxy import (
    Counters,
    DataPlaneSettings,
    Endpoint,
    EndpointCounters,
    L4Protocol,
    ListenAddress,
    ListenFailed,
    Proxy,
    ServicePort,
    ServicePortName,
    Snapshot,
)
from userspace_proxy.dataplane import udp
from userspace_proxy.dataplane.interface import MakeDataPath
from userspace_proxy.dataplane.plane import DataPlane
from userspace_proxy.proxy import in_this_process

Result = TypeVar("Result")


@dataclass(frozen=True)
class Variant:
    """One way to build the data path."""

    new_loop: Callable[[], asyncio.AbstractEventLoop]
    poller: str
    use_splice: bool
    mmsg: Literal["by load", "always", "never"]
    workers: int = 1
    is_child: bool = False

    def __str__(self) -> str:
        loop, copying = self.new_loop.__module__.partition(".")[0], "splice" if self.use_splice else "copy"
        workers = f"-{self.workers}-workers" if self.workers > 1 else ""
        where = "-child" if self.is_child else ""
        return f"{loop}-{self.poller}-{copying}-mmsg {self.mmsg}{workers}{where}".replace(" ", "_")

    @property
    def make_data_path(self) -> MakeDataPath:
        return ChildPlane if self.is_child else in_this_process

    def settings(self, **changed: Any) -> DataPlaneSettings:
        own = {"use_splice": self.use_splice, "use_mmsg": self.mmsg != "never", "workers": self.workers}
        return DataPlaneSettings(poller=self.poller, **own | changed)  # type: ignore[arg-type]


VARIANTS = (
    Variant(uvloop.new_event_loop, "epoll", True, "by load"),
    Variant(uvloop.new_event_loop, "epoll", False, "never"),
    Variant(asyncio.new_event_loop, "epoll", True, "always"),
    Variant(asyncio.new_event_loop, "loop", False, "by load"),
    Variant(uvloop.new_event_loop, "loop", False, "always"),
    Variant(uvloop.new_event_loop, "epoll", True, "by load", is_child=True),
    Variant(uvloop.new_event_loop, "epoll", True, "by load", workers=2),
)
WORKER_VARIANTS = (VARIANTS[-1], Variant(asyncio.new_event_loop, "loop", False, "by load", workers=2))


def a_service(
    *endpoints: Endpoint,
    name: str = "web",
    protocol: L4Protocol = L4Protocol.TCP,
    listen: tuple[ListenAddress, ...] = (ListenAddress("127.0.0.1", 0),),
    affinity_s: float | None = None,
    wakes: bool = False,
) -> ServicePort:
    return ServicePort(
        ServicePortName("default", name, "", protocol),
        80,
        endpoints,
        session_affinity_s=affinity_s,
        listen=listen,
        wakes_on_connect=wakes,
    )


class RunningProxy:
    """A Proxy whose event loop runs in a thread. Each method returns when its work is done."""

    def __init__(self, variant: Variant, *, settings: dict[str, Any], **options: Any) -> None:
        self.faults: list[str] = []
        self._started: concurrent.futures.Future[Proxy] = concurrent.futures.Future()
        self._variant = variant
        self._make = lambda: Proxy(variant.settings(**settings), data_path=variant.make_data_path, **options)
        self._thread = threading.Thread(target=self._run_loop)
        self._thread.start()
        self.proxy = self._started.result(PATIENCE_S)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the proxy's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S * 2)

    def call(self, function: Callable[[], Result]) -> Result:
        async def work() -> Result:
            return function()

        return self.run(work())

    def apply(self, *service_ports: ServicePort) -> dict[ServicePortName, tuple[ListenFailed, ...]]:
        return dict(self.run(self.proxy.apply(Snapshot.of(*service_ports))))

    def serve(self, *endpoints: Endpoint, **options: Any) -> ListenAddress:
        """Serve one service, and return where."""
        service_port = a_service(*endpoints, **options)
        assert self.apply(service_port) == {}
        return self.addresses(service_port.name)[0]

    def addresses(self, name: ServicePortName) -> tuple[ListenAddress, ...]:
        return self.call(lambda: self.proxy.addresses(name))

    @property
    def plane(self) -> DataPlane:
        assert isinstance(self.proxy._data_path, DataPlane), "the test is to be marked as in_this_process"
        return self.proxy._data_path

    @property
    def is_child(self) -> bool:
        return isinstance(self.proxy._data_path, ChildPlane)

    def child_descriptors(self) -> list[str]:
        """What the data path's own process has open."""
        assert isinstance(self.proxy._data_path, ChildPlane)
        return list(open_descriptors(self.proxy._data_path.process.pid).values())

    def listeners(self) -> list[object]:
        """All listeners, for their identity: those of another process are known by their sockets here."""
        path = self.proxy._data_path
        return list(path._sockets.values() if isinstance(path, ChildPlane) else self.plane._listeners.values())

    def listener(self) -> object:
        """The one listener of the data path, for its identity."""
        (listener,) = self.listeners()
        return listener

    def counters(self) -> Counters:
        return self.run(self.proxy.counters())

    def counters_of(self, endpoint: Endpoint) -> EndpointCounters:
        found = [of_service[endpoint] for of_service in self.counters().endpoints.values() if endpoint in of_service]
        assert len(found) == 1
        return found[0]

    def is_idle(self) -> bool:
        counters = self.counters()
        return not counters.open_connections and not counters.open_sessions

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the proxy from running: it finds everything that happens meanwhile in one batch."""
        if isinstance(self.proxy._data_path, ChildPlane):
            with self.proxy._data_path.held():
                yield
            return
        is_held, go_on = threading.Event(), threading.Event()
        self.loop.call_soon_threadsafe(lambda: (is_held.set(), go_on.wait(PATIENCE_S)))
        assert is_held.wait(PATIENCE_S)
        with ExitStack() as stack:
            stack.callback(go_on.set)
            for process_id in self.worker_processes():
                stack.enter_context(stopped(process_id))
            yield

    def worker_processes(self) -> list[int]:
        """The process ids of the workers."""
        workers = self.proxy._data_path._workers if isinstance(self.proxy._data_path, DataPlane) else None
        return [link.process_id for link in workers._links] if workers is not None else []

    def reconfigure(self, settings: DataPlaneSettings) -> None:
        self.call(lambda: self.proxy.reconfigure(settings))
        self.counters()  # a data path in another process has heard of it when it answers

    def stop(self) -> None:
        """Leave the proxy's context, and wait until its loop has nothing more to do."""
        with suppress(RuntimeError):  # it has stopped already
            self.loop.call_soon_threadsafe(self._leave.set)
        self._thread.join(PATIENCE_S * 2)
        assert not self._thread.is_alive()

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._variant.new_loop) as runner:
                runner.run(self._run())
        except BaseException as error:
            self.faults.append(f"the proxy died of {error!r}")
            if not self._started.done():
                self._started.set_exception(error)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
        self._leave = asyncio.Event()
        async with self._make() as proxy:
            self._started.set_result(proxy)
            await self._leave.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left and (left := (await asyncio.wait(left, timeout=1.0))[1]):
            self.faults.append(f"tasks left: {left}")


class Stage:
    """Everything that a test puts up, taken down in reverse order when it ends."""

    def __init__(self, stack: ExitStack, variant: Variant) -> None:
        self._stack = stack
        self._variant = variant
        self.proxies: list[RunningProxy] = []

    def proxy(self, *, settings: dict[str, Any] | None = None, **options: Any) -> RunningProxy:
        proxy = RunningProxy(self._variant, settings=settings or {}, **options)
        self.proxies.append(proxy)
        self._stack.callback(proxy.stop)
        return proxy

    def backend(self, address: str = "127.0.0.1", **options: Any) -> Backend:
        return self._closed_at_end(Backend(address, **options))

    def serving_backend(self, treat: Callable[[Peer], None] = echo, *args: Any, **options: Any) -> ServingBackend:
        return self._closed_at_end(ServingBackend(treat, *args, **options))

    def named_backend(self, name: str, *args: Any, **options: Any) -> ServingBackend:
        return self.serving_backend(identify(name.encode()), *args, **options)

    def connect(self, address: Any, **options: Any) -> Peer:
        return self._closed_at_end(Peer.connect(address, **options))

    def connected_pair(self, proxy: RunningProxy, **options: Any) -> tuple[Peer, Peer]:
        """A client and the backend's end of its connection through the proxy, which relays between them already.

        A backend that resets before counts as a failed dial, and the client gets another connection.
        """
        backend = self.backend()
        client = self.connect(proxy.serve(backend.endpoint), **options)
        server = backend.accept()
        assert eventually(lambda: proxy.counters_of(backend.endpoint).open_connections == 1)
        return client, server

    def datagrams(self, address: str = "127.0.0.1", **options: Any) -> Datagrams:
        return self._closed_at_end(Datagrams(address, **options))

    def answering_datagrams(self, answer: Callable[[bytes], bytes], *args: Any, **options: Any) -> AnsweringDatagrams:
        return self._closed_at_end(AnsweringDatagrams(answer, *args, **options))

    def _closed_at_end(self, thing: Any) -> Any:
        self._stack.callback(thing.close)
        return thing


def ask(address: Any, **options: Any) -> str:
    """Connect, and return the name of whoever answers."""
    with Peer.connect(address, **options) as client:
        return client.receive_all().decode()


@contextmanager
def stopped(process_id: int) -> Iterator[None]:
    """Keep a process from running."""
    os.kill(process_id, signal.SIGSTOP)
    try:
        assert eventually(lambda: process_state(process_id) == "T")
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def process_state(process_id: int) -> str:
    """The letter that /proc has for it, T for stopped."""
    with open(f"/proc/{process_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def open_descriptors(pid: int | str = "self") -> dict[int, str]:
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # the one that listed the directory
    return found


@pytest.fixture(scope="session", autouse=True)
def _loops_have_run_once() -> None:
    """The first loop of a kind opens descriptors that stay open for the life of the process."""
    for variant in VARIANTS:
        with asyncio.Runner(loop_factory=variant.new_loop) as runner:
            runner.run(asyncio.sleep(0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and do not skip, what is in_this_process where the variant is not."""
    left_out = [each for each in items if _is_elsewhere(each)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [each for each in items if each not in left_out]


def _is_elsewhere(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("in_this_process")
    if marker is None:
        return False
    assert isinstance(item, pytest.Function)
    variant: Variant = item.callspec.params["variant"]
    return variant.is_child or (variant.workers > 1 and marker.kwargs.get("without_workers", False))


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Variant:
    if request.param.mmsg == "always":  # even for one datagram, if it is not the first
        monkeypatch.setattr(udp, "_FEW", 0)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def stage(variant: Variant, caplog: pytest.LogCaptureFixture) -> Iterator[Stage]:
    """Fails a test that leaves a descriptor, a pipe, a task or a logged exception behind."""
    caplog.set_level(logging.INFO, logger="userspace_proxy")
    before = open_descriptors()
    with ExitStack() as stack:
        built = Stage(stack, variant)
        yield built
    left = {fd: what for fd, what in open_descriptors().items() if before.get(fd) != what}
    assert not left
    for proxy in built.proxies:
        assert not proxy.faults
    assert not [record.getMessage() for record in caplog.get_records("call") if record.exc_info]


@pytest.fixture
def proxy(stage: Stage) -> RunningProxy:
    return stage.proxy()


__all__ = ["RunningProxy", "Stage", "Variant", "a_service", "ask", "eventually"]
