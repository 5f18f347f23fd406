"""Both ends of a remote data path in one event loop: what either has when the other comes, goes, or comes again."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace

import pytest

from userspace_proxy.core.counters import OF_THE_MOMENT, EndpointCounters, LiveCounters, WorkerReading
from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.core.plan import diff
from userspace_proxy.dataplane.interface import Applied, Notices
from userspace_proxy.dataplane.remote.messages import Reading, Served, Step, numbers
from userspace_proxy.dataplane.remote.plane import RemotePlane
from userspace_proxy.dataplane.remote.presence import Presence
from userspace_proxy.dataplane.remote.readings import Lasting
from userspace_proxy.dataplane.remote.server import DataServer
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.metrics import traffic

SETTINGS = DataPlaneSettings()
NOWHERE = Endpoint("127.0.0.1", 1)


def service(number: int, *endpoints: Endpoint) -> ServicePort:
    listen = (ListenAddress("127.0.0.1", 0),)
    return ServicePort(ServicePortName("default", f"s{number}"), 80, endpoints or (NOWHERE,), listen=listen)


@asynccontextmanager
async def data_process() -> AsyncIterator[DataServer]:
    """What runs in a data process; at the end of the context it dies."""
    server = DataServer()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.run())
        yield server
        running.cancel()


class Control:
    """A control process's side, with what it has applied."""

    def __init__(self, notices: Notices = Notices()) -> None:  # noqa: B008  # it is frozen
        self.plane = RemotePlane(SETTINGS, notices, outlives=True)
        self.running = Snapshot()
        self.applied = Applied()

    async def connect(self, server: DataServer) -> None:
        ours, theirs = socket.socketpair()
        self.plane.attach(ours)
        server.attach(theirs)
        await self.plane.found()

    async def apply(self, *service_ports: ServicePort) -> Applied:
        wanted = Snapshot.of(*service_ports)
        self.applied = Applied()
        await self.plane.apply(diff(self.running, wanted), self.applied)
        self.running = wanted
        return self.applied


@pytest.fixture
async def control() -> AsyncIterator[Control]:
    made = Control()
    yield made
    made.plane.close()


@pytest.fixture
async def backend() -> AsyncIterator[Endpoint]:
    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1") as server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


async def ask(address: ListenAddress) -> bytes:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(address.address, address.port)
        answer = await reader.read()
        writer.close()
        return answer


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)


def at(applied: Applied, service_port: ServicePort) -> ListenAddress:
    return applied.bound[service_port.name, service_port.listen[0]]


async def test_the_next_data_process_gets_all_that_the_former_had_and_totals_go_on(
    control: Control, backend: Endpoint
) -> None:
    web = service(1, backend)
    async with data_process() as first:
        await control.connect(first)
        address = at(await control.apply(web), web)
        assert await ask(address) == b"hello"
        assert (await control.plane.counters()).total.connections == 1
    await until(lambda: not control.plane.is_attached)
    while_away = await control.plane.counters()
    assert (while_away.total.connections, while_away.open_connections) == (1, 0)
    async with data_process() as second:
        await control.connect(second)
        assert await ask(address) == b"hello"
        counters = await control.plane.counters()
        assert counters.total.connections == counters.service_ports[web.name].connections == 2
        assert counters.endpoints[web.name][backend].connections == 2


async def test_plans_without_a_data_process_are_carried_out_by_the_next(control: Control, backend: Endpoint) -> None:
    kept, gone, late = (service(number, backend) for number in range(3))
    async with data_process() as first:
        await control.connect(first)
        applied = await control.apply(kept, gone)
        addresses = [at(applied, each) for each in (kept, gone)]
    await until(lambda: not control.plane.is_attached)
    applied = await control.apply(kept, late)
    with pytest.raises(ConnectionRefusedError):
        await ask(addresses[1])
    waiting = asyncio.gather(ask(addresses[0]), ask(at(applied, late)))
    async with data_process() as second:
        await control.connect(second)
        assert await waiting == [b"hello", b"hello"]
        assert (await control.plane.counters()).endpoints.keys() == {kept.name, late.name}


async def test_another_control_process_finds_what_is_there(backend: Endpoint) -> None:
    web, other = service(1, backend), service(2)
    async with data_process() as data:
        first = Control()
        await first.connect(data)
        applied = await first.apply(web, other)
        first.plane.close()
        second = Control()
        await second.connect(data)
        found = await second.plane.found()
        assert found == {each.name: {each.listen[0]: at(applied, each)} for each in (web, other)}
        assert await ask(at(applied, web)) == b"hello"
        second.running = Snapshot.of(web, other)
        await second.apply(web)
        with pytest.raises(ConnectionRefusedError):
            await ask(at(applied, other))
        assert await ask(at(applied, web)) == b"hello"
        assert (await second.plane.counters()).total.connections == 2
        second.plane.close()


async def test_another_control_process_hears_of_clients_that_wait(backend: Endpoint) -> None:
    told: list[ServicePortName] = []
    asleep = replace(service(1), endpoints=(), wakes_on_connect=True)
    async with data_process() as data:
        first = Control()
        await first.connect(data)
        address = at(await first.apply(asleep), asleep)
        first.plane.close()
        waiting = asyncio.gather(ask(address))
        await until(lambda: data._plane is not None and data._plane.waited_at())
        second = Control(Notices(needs_pods=told.append))
        await second.connect(data)
        await until(lambda: told)
        assert told == [asleep.name]
        second.running = Snapshot.of(asleep)
        await second.apply(replace(asleep, endpoints=(backend,)))
        assert await waiting == [b"hello"]
        second.plane.close()


async def test_totals_go_on_when_both_processes_were_replaced_one_after_the_other(backend: Endpoint) -> None:
    web, other = service(1, backend), service(2, backend)
    first, second = Control(), Control()
    async with data_process() as data:
        await first.connect(data)
        applied = await first.apply(web, other)
        for each in (web, web, other):
            await ask(at(applied, each))
        assert (await first.plane.counters()).total.connections == 3
    await until(lambda: not first.plane.is_attached)
    await first.apply(web)
    async with data_process() as data:
        for _ in range(2):  # a connection that is lost changes nothing
            await first.connect(data)
            await until(lambda: first.plane._requests._channel)
        await ask(at(applied, web))
        assert (await first.plane.counters()).total.connections == 4
        first.plane.close()
        await second.connect(data)
        counters = await second.plane.counters()
        assert counters.total.connections == 4
        assert counters.service_ports[web.name].connections == counters.endpoints[web.name][backend].connections == 3
        second.running = Snapshot.of(replace(web, endpoints=()))
        await second.apply(web)
    await until(lambda: not second.plane.is_attached)
    async with data_process() as data:
        await second.connect(data)
        await ask(at(applied, web))
        counters = await second.plane.counters()
        assert counters.total.connections == 5
        assert counters.service_ports[web.name].connections == 4
    second.plane.close()


async def test_clients_wait_while_neither_a_new_control_nor_a_new_data_process_knows_where_they_are_to_go(
    backend: Endpoint,
) -> None:
    web = service(1, backend)
    first, second = Control(), Control()
    async with data_process() as data:
        await first.connect(data)
        address = at(await first.apply(web), web)
        first.plane.close()
        await second.connect(data)
    await until(lambda: not second.plane.is_attached)
    async with data_process() as data:
        await second.connect(data)
        waiting = asyncio.gather(ask(address))
        await until(lambda: second.plane._unbriefed)
        second.running = Snapshot.of(replace(web, endpoints=()))
        await second.apply(web)
        assert await waiting == [b"hello"]
    second.plane.close()


async def test_a_connection_anew_to_the_same_data_process_counts_nothing_twice(
    control: Control, backend: Endpoint
) -> None:
    web = service(1, backend)
    async with data_process() as data:
        await control.connect(data)
        address = at(await control.apply(web), web)
        await ask(address)
        assert (await control.plane.counters()).total.connections == 1
        await control.connect(data)
        await ask(address)
        await until(lambda: control.plane._requests._channel)
        assert (await control.plane.counters()).total.connections == 2


async def test_many_endpoints_are_read_in_pages(control: Control) -> None:
    endpoints = tuple(Endpoint("127.0.0.1", port) for port in range(1, 31))
    services = [service(number, *endpoints) for number in range(300)]
    async with data_process() as data:
        await control.connect(data)
        assert len((await control.apply(*services)).bound) == 300
        counters = await control.plane.counters()
        assert list(counters.endpoints) == [each.name for each in services]
        assert all(of_service.keys() == set(endpoints) for of_service in counters.endpoints.values())


async def test_listeners_for_which_the_data_process_has_no_room_fail_and_can_be_tried_again(
    control: Control, backend: Endpoint
) -> None:
    web = service(1, backend)
    async with data_process() as data:
        await control.connect(data)
        carry_out = data._carry_out

        async def without_room(step: Step, fds: list[int]) -> None:
            await carry_out(step, list(drop_last(fds)))

        data._carry_out = without_room  # type: ignore[method-assign]
        applied = await control.apply(web)
        assert [str(each) for each in applied.failures[web.name]] == [
            "cannot listen on 127.0.0.1:0: too many open files in the data process"
        ]
        assert not applied.bound
        data._carry_out = carry_out  # type: ignore[method-assign]
        control.running = Snapshot()
        assert await ask(at(await control.apply(web), web)) == b"hello"


async def test_a_listener_whose_socket_another_control_process_could_not_take_is_closed(backend: Endpoint) -> None:
    web, other = service(1, backend), service(2, backend)
    async with data_process() as data:
        first, second = Control(), Control()
        await first.connect(data)
        applied = await first.apply(web, other)
        first.plane.close()
        add = Presence.add
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Presence, "add", lambda self, present, fds: add(self, present, drop_last(fds)))
            await second.connect(data)
        assert {name: len(listeners) for name, listeners in (await second.plane.found()).items()} == {
            web.name: 1,
            other.name: 0,
        }
        await second.plane.counters()
        with pytest.raises(ConnectionRefusedError):
            await ask(at(applied, other))
        assert await ask(at(applied, web)) == b"hello"
        second.plane.close()


def drop_last(fds: Sequence[int]) -> Sequence[int]:
    for fd in fds[-1:]:
        os.close(fd)
    return fds[:-1]


async def test_listeners_that_a_new_data_process_has_no_room_for_are_passed_over_the_next_connection(
    control: Control, backend: Endpoint
) -> None:
    web = service(1, backend)
    async with data_process() as first:
        await control.connect(first)
        address = at(await control.apply(web), web)
    await until(lambda: not control.plane.is_attached)
    async with data_process() as second:
        carry_out = second._carry_out

        async def without_room(step: Step, fds: list[int]) -> None:
            await carry_out(step, list(drop_last(fds)))

        second._carry_out = without_room  # type: ignore[method-assign]
        await control.connect(second)
        await until(lambda: not control.plane.is_attached)
        second._carry_out = carry_out  # type: ignore[method-assign]
        await control.connect(second)
        assert await ask(address) == b"hello"


async def test_notices_go_up_and_what_they_raise_harms_nobody(backend: Endpoint) -> None:
    told: list[tuple[ServicePortName, Endpoint]] = []

    def dial_failed(name: ServicePortName, endpoint: Endpoint) -> None:
        told.append((name, endpoint))
        raise ValueError

    control = Control(Notices(dial_failed=dial_failed))
    web = service(1, NOWHERE, backend)
    async with data_process() as data:
        await control.connect(data)
        address = at(await control.apply(web), web)
        assert [await ask(address) for _ in range(2)] == [b"hello"] * 2
        assert told == [(web.name, NOWHERE)]
    control.plane.close()


def test_the_data_process_is_told_all_of_a_service_port_but_what_is_for_kernel_rules() -> None:
    for_rules = {
        "cluster_ips",
        "external_ips",
        "load_balancer_ips",
        "load_balancer_source_ranges",
        "node_port",
        "health_check_node_port",
        "local_scopes",
    }
    assert {field.name for field in fields(ServicePort)} - for_rules == set(Served.__struct_fields__)
    web = service(1)
    assert Served.of(web).service_port() == web


def test_totals_stay_when_a_service_port_went_with_its_process() -> None:
    lasting = Lasting()
    counted = EndpointCounters(connections=3, open_connections=1)
    web = Reading(ServicePortName("default", "web"), numbers(counted), ())
    lasting.add_up(LiveCounters(accept_errors=5, open_connections=1), [web])
    lasting.process_is_gone()
    after = lasting.add_up(LiveCounters(accept_errors=1), [])
    assert after.gone == EndpointCounters(connections=3)
    assert (after.accept_errors, after.open_connections) == (6, 0)


def test_restarts_of_workers_are_counted_on_over_data_processes() -> None:
    lasting = Lasting()
    lasting.add_up(LiveCounters(workers=(WorkerReading("worker-0", 1 << 20, 3, 0, 2), WorkerReading("worker-1"))), [])
    lasting.process_is_gone()
    assert lasting.last.workers == (WorkerReading("worker-0", restarts=2), WorkerReading("worker-1"))
    after = lasting.add_up(LiveCounters(workers=(WorkerReading("worker-0", 1 << 19, restarts=1),)), [])
    assert after.workers == (WorkerReading("worker-0", 1 << 19, restarts=3),)


def test_what_metrics_call_a_gauge_ends_with_its_process() -> None:
    tables = [table for table in vars(traffic).values() if isinstance(table, tuple) and table is not traffic._WORKERS]
    families = [each for table in tables for each in table if isinstance(each, traffic._Family)]
    assert {each.field for each in families if each.kind == "gauge"} == OF_THE_MOMENT


async def test_sockets_that_cannot_be_copied_are_passed_over_the_next_connection(
    control: Control, backend: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    web = service(1, backend)
    async with data_process() as data:
        await control.connect(data)
        with monkeypatch.context() as patched:
            patched.setattr(os, "dup", no_room)
            address = at(await control.apply(web), web)
        assert not control.plane.is_attached
        await control.connect(data)
        assert await ask(address) == b"hello"
