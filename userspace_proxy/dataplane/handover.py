"""What the process that accepts and its workers say to each other. One encoding of each message, for both ends."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Struct

from userspace_proxy.core.counters import WakingCounters
from userspace_proxy.core.model import Endpoint, IPFamily, ListenAddress, Scope, ServicePort, ServicePortName
from userspace_proxy.dataplane.backends import Origin
from userspace_proxy.dataplane.settings import DataPlaneSettings

ORIGINS: tuple[Origin, ...] = tuple((scope, family) for scope in Scope for family in IPFamily)
"""Origins by the number that stands for each in messages."""

ORIGIN_NUMBERS = {origin: number for number, origin in enumerate(ORIGINS)}


class _Message(Struct, array_like=True, tag=True):
    """Fields go by their order. What comes often has plain tuples, as these are decoded fastest."""


class Lead(Struct, array_like=True, frozen=True):
    """A number for an endpoint of a service port, good for one worker. It is told once, and never used for another."""

    number: int
    name: ServicePortName
    endpoint: Endpoint


class Start(_Message):
    """To a worker, first of all: how it is to work."""

    settings: DataPlaneSettings
    log_level: int


class Configure(_Message):
    """To a worker: other settings from now on."""

    settings: DataPlaneSettings
    log_level: int


class Take(_Message):
    """To a worker: clients to connect, each as the number of its lead and its origin, and its address.

    As many descriptors come with it.
    """

    leads: list[Lead]
    clients: list[tuple[int, int, str]]


class Next(_Message):
    """To a worker: the lead to try next in a dial, or 0 if there is none."""

    dial: int
    leads: list[Lead]
    number: int


class Forget(_Message):
    """To a worker: leads without clients, which nobody will use any more."""

    numbers: list[int]


class Ask(_Message):
    """To a worker: report now. The answer also means that all messages before were carried out."""

    number: int


class UpdateDatagrams(_Message):
    """To a worker: the endpoints of a UDP service port of its own."""

    name: ServicePortName
    port: int
    endpoints: tuple[Endpoint, ...]
    external_endpoints: tuple[Endpoint, ...] | None
    session_affinity_s: float | None
    wakes_on_connect: bool

    @classmethod
    def of(cls, service_port: ServicePort) -> UpdateDatagrams:
        return cls(
            service_port.name,
            service_port.port,
            service_port.endpoints,
            service_port.external_endpoints,
            service_port.session_affinity_s,
            service_port.wakes_on_connect,
        )

    def service_port(self) -> ServicePort:
        """Return the service port, as far as it matters for what becomes of datagrams."""
        return ServicePort(
            self.name,
            self.port,
            self.endpoints,
            self.external_endpoints,
            self.session_affinity_s,
            wakes_on_connect=self.wakes_on_connect,
        )


class ListenForDatagrams(_Message):
    """To a worker: serve the clients of the bound socket that comes with it."""

    name: ServicePortName
    address: ListenAddress


class CloseDatagrams(_Message):
    """To a worker: serve that socket no more."""

    name: ServicePortName
    address: ListenAddress


class ForgetDatagrams(_Message):
    """To a worker: the UDP service port is gone."""

    name: ServicePortName


ToWorker = (
    Start
    | Configure
    | Take
    | Next
    | Forget
    | Ask
    | UpdateDatagrams
    | ListenForDatagrams
    | CloseDatagrams
    | ForgetDatagrams
)


class Ready(_Message):
    """From a worker: it is there."""


class WantsNext(_Message):
    """From a worker: a dial needs an endpoint: the same again unless it was tried, else the one after those."""

    dial: int
    lead: int
    origin: int
    client: str
    tried: list[Endpoint]


class GivenBack(_Message):
    """From a worker: a client that could not be connected, whose descriptor comes with it.

    Either its dial has run out of attempts, or there was no endpoint for it.
    """

    lead: int
    origin: int
    client: str
    has_run_out: bool


class DialFailed(_Message):
    """From a worker: an endpoint could not be reached."""

    name: ServicePortName
    endpoint: Endpoint


class NeedsPods(_Message):
    """From a worker: a client waits at a UDP service port that is idled."""

    name: ServicePortName


class Complained(_Message):
    """From a worker: a warning about a service port."""

    name: ServicePortName
    text: str


class Said(_Message):
    """From a worker: a line for the log."""

    logger: str
    level: int
    text: str


class HostCounts(Struct, array_like=True, frozen=True):
    """What a process has counted that belongs to no endpoint, and how many sessions it has."""

    abandoned: int = 0
    idle_timeouts: int = 0
    half_close_timeouts: int = 0
    peer_timeouts: int = 0
    accept_errors: int = 0
    dropped_datagrams: int = 0
    evicted_sessions: int = 0
    waking: WakingCounters = WakingCounters()
    open_sessions: int = 0

    def plus(self, ended: HostCounts) -> HostCounts:
        """Return the sum with what a process had counted that has ended, and has no sessions and guests any more."""
        return HostCounts(
            self.abandoned + ended.abandoned,
            self.idle_timeouts + ended.idle_timeouts,
            self.half_close_timeouts + ended.half_close_timeouts,
            self.peer_timeouts + ended.peer_timeouts,
            self.accept_errors + ended.accept_errors,
            self.dropped_datagrams + ended.dropped_datagrams,
            self.evicted_sessions + ended.evicted_sessions,
            self.waking.plus(replace(ended.waking, held_connections=0, held_udp_clients=0)),
        )


LeadRow = tuple[int, int, int, int, int, int, int]
"""Number of the lead, ended clients, connections, open connections, failed dials, bytes to endpoint, to client."""

DatagramRow = tuple[ServicePortName, Endpoint, int, int, int, int, int]
"""Service port, endpoint, sessions, open sessions, failed dials, bytes to endpoint, to client."""


class Report(_Message):
    """From a worker: what has changed since the last report, and which `Ask` it answers, or 0."""

    answers: int
    leads: list[LeadRow]
    datagrams: list[DatagramRow]
    host: HostCounts
    is_full: bool
    resident_bytes: int


FromWorker = Ready | WantsNext | GivenBack | DialFailed | NeedsPods | Complained | Said | Report
