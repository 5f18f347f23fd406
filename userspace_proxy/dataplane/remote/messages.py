"""What the control process and the data process say to each other. A message is as small as a turn of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from typing import TypeVar

import msgspec

from userspace_proxy.core.counters import CountedServicePort, EndpointCounters, LiveCounters
from userspace_proxy.core.model import Endpoint, ListenAddress, ServicePort, ServicePortName
from userspace_proxy.core.plan import Listening
from userspace_proxy.dataplane.settings import DataPlaneSettings

LISTENERS_PER_MESSAGE = 200
"""Each comes with a descriptor, of which a message can have 253."""

SERVICE_PORTS_PER_MESSAGE = 32
"""With ten endpoints each, taking these in costs the data process about 2 ms."""

NAMES_PER_MESSAGE = 500

Item = TypeVar("Item")


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What the data path has to know of a service port: all that is not about kernel rules."""

    name: ServicePortName
    port: int
    endpoints: tuple[Endpoint, ...]
    external_endpoints: tuple[Endpoint, ...] | None
    session_affinity_s: float | None
    listen: tuple[ListenAddress, ...]
    wakes_on_connect: bool

    @classmethod
    def of(cls, service_port: ServicePort) -> Served:
        return cls(*(getattr(service_port, name) for name in cls.__struct_fields__))

    def service_port(self) -> ServicePort:
        return ServicePort(**{name: getattr(self, name) for name in self.__struct_fields__})


class Configure(msgspec.Struct, frozen=True, tag=True):
    """To the data process: work like this from now on. It is the first message, and has no answer."""

    settings: DataPlaneSettings
    verbosity: int | None = None
    log_format: str = "text"


class Step(msgspec.Struct, frozen=True, tag=True):
    """To the data process: carry out a part of a plan. Comes with the sockets to `open`, in that order.

    Either all of `open` is done or, where not all sockets have come, nothing of the step.
    """

    update: tuple[Served, ...] = ()
    open: tuple[Listening, ...] = ()
    close: tuple[Listening, ...] = ()
    remove: tuple[ServicePortName, ...] = ()
    id: int = 0


class ReadCounters(msgspec.Struct, frozen=True, tag=True):
    """To the data process: send a page of counters, those from service port number `start` on. 0 reads anew."""

    start: int
    id: int = 0


class Keep(msgspec.Struct, frozen=True, tag=True):
    """To the data process: what those before it had counted, bit by bit. It tells the next control process, as it is.

    To the data process a `part` means nothing. See `Lasting`.
    """

    is_first: bool
    part: bytes


class Drain(msgspec.Struct, frozen=True, tag=True):
    """To the data process: stop listening at once, and answer when all connections have ended or time is up."""

    timeout_s: float
    id: int = 0


Answered = Step | ReadCounters | Drain
"""Requests with an answer, which names their `id`."""

Request = Configure | Keep | Answered


class Present(msgspec.Struct, frozen=True, tag=True):
    """From the data process, when it meets a control process: what there is. Comes with a socket for each `open`."""

    names: tuple[ServicePortName, ...] = ()
    open: tuple[Listening, ...] = ()
    bound: tuple[ListenAddress, ...] = ()


class AllPresent(msgspec.Struct, frozen=True, tag=True):
    """From the data process: that was all that there is. `process` is a number that no other process has."""

    process: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """From the data process: the request is carried out, but for `refused`, which came without their sockets."""

    to: int
    refused: tuple[Listening, ...] = ()


Numbers = tuple[int, ...]
"""The fields of a dataclass of counters, in their order."""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """The counters of one service port, and of its endpoints."""

    name: ServicePortName
    total: Numbers
    endpoints: tuple[tuple[str, int, Numbers], ...]

    @classmethod
    def of(cls, counted: CountedServicePort) -> Reading:
        endpoints = counted.counters().items()
        return cls(
            counted.name,
            numbers(counted.total()),
            tuple((endpoint.address, endpoint.port, numbers(each)) for endpoint, each in endpoints),
        )


class Page(msgspec.Struct, frozen=True, tag=True):
    """From the data process: counters. `whole` has what belongs to no service port, on the first page."""

    to: int
    whole: LiveCounters | None
    readings: tuple[Reading, ...]
    is_last: bool


class DialFailed(msgspec.Struct, frozen=True, tag=True):
    """From the data process: an endpoint could not be reached."""

    name: ServicePortName
    endpoint: Endpoint


class NeedsPods(msgspec.Struct, frozen=True, tag=True):
    """From the data process: a client waits at an idled service port."""

    name: ServicePortName


Report = Present | Keep | AllPresent | Done | Page | DialFailed | NeedsPods

_COUNTERS = tuple(field.name for field in fields(EndpointCounters))


def numbers(counters: EndpointCounters) -> Numbers:
    """Return counters as they are sent."""
    return tuple([getattr(counters, name) for name in _COUNTERS])


def in_batches(items: Iterable[Item], size: int) -> Iterator[tuple[Item, ...]]:
    """Yield the items in tuples of at most `size`."""
    rest = iter(items)
    while batch := tuple(islice(rest, size)):
        yield batch


def in_batches_of_listeners(
    grouped: Iterable[tuple[ServicePortName, list[ListenAddress]]],
) -> Iterator[list[tuple[ServicePortName, list[ListenAddress]]]]:
    """Yield batches of listeners as large as a message can have; the listeners of a service port stay together."""
    batch: list[tuple[ServicePortName, list[ListenAddress]]] = []
    size = 0
    for name, addresses in grouped:
        if batch and size + len(addresses) > LISTENERS_PER_MESSAGE:
            yield batch
            batch, size = [], 0
        batch.append((name, addresses))
        size += len(addresses)
    if batch:
        yield batch
