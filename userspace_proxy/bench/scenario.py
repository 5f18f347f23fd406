"""The schema of a scenario: what is measured, how, and what is expected. Plain data, all with defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from userspace_proxy.bench.quantities import Rate, Seconds, Size

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,:()+_-]{0,49}$")]

Balance = Literal["round_robin", "even", "any"]


class Base(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the file. Fields that do not exist are errors."""


# Targets


class TargetBase(Base, tag_field="kind", frozen=True, kw_only=True):
    """What all targets have. `judged: false` shows a target's faults, but they do not decide the exit code."""

    name: str = ""
    judged: bool = True

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class Direct(TargetBase, tag="direct", frozen=True, kw_only=True):
    """No balancer: the generator goes to the backends itself. Shows the limit of the harness."""

    judged: bool = False


class ThisProxy(TargetBase, tag="proxy", frozen=True, kw_only=True):
    """`userspace-proxy local` with options of one's own. `program` is another installation to compare with."""

    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()


class HAProxy(TargetBase, tag="haproxy", frozen=True, kw_only=True):
    """HAProxy, in TCP mode. `splice` moves bytes best and requests worse: no configuration wins everywhere."""

    threads: Positive = 1
    splice: bool = False
    program: str = "haproxy"


class Nginx(TargetBase, tag="nginx", frozen=True, kw_only=True):
    """nginx with its stream module."""

    workers: Positive = 1
    program: str = "nginx"


class Command(TargetBase, tag="command", frozen=True, kw_only=True):
    """Any program that we start. In its arguments `{host}`, `{port}`, `{listen}` (host:port), `{backends}`
    (host:port,...), `{backends_spaced}` and `{backends_file}` (one a line) are filled in.

    Where `reload` is given, the file is rewritten when endpoints change, and then the program gets that signal.
    `udp: true` makes silence a fault, `false` sends no datagrams; without, it depends on whether it answers.
    """

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    reload: Literal["none", "SIGHUP", "SIGUSR1", "SIGUSR2", "file"] = "none"
    udp: bool | None = None


class Address(TargetBase, tag="address", frozen=True, kw_only=True):
    """Something that runs already, `host:port`. `pid` lets its cost be measured.

    With `own_backends` it has backends of its own, which are told apart by `identify`: a regular expression with one
    group, searched in each reply. Without, it must balance over the backends of the scenario, at fixed `addresses`.
    """

    address: str
    udp_address: str = ""
    pid: Count = 0
    own_backends: bool = False
    request: str = "ping\n"
    reply_ends: Literal["newline", "close", "any"] = "newline"
    identify: str = r"(\S+)"
    endpoints: Count = 0


Target = Direct | ThisProxy | HAProxy | Nginx | Command | Address


class Backends(Base, frozen=True, kw_only=True):
    """The servers behind the targets, one process each. `spare` ones get no traffic until an `add` event."""

    count: Annotated[int, Meta(ge=1, le=64)] = 4
    spare: Annotated[int, Meta(ge=0, le=64)] = 0
    addresses: tuple[str, ...] = ()


# Load


class LoadBase(Base, tag_field="kind", frozen=True, kw_only=True):
    """What all loads have. Without `duration` and `warm_up` those of the scenario count."""

    duration: Seconds | None = None
    warm_up: Seconds | None = None
    clients: Annotated[int, Meta(ge=1, le=60_000)] = 64
    timeout: Seconds = Seconds(5)

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class Paced(LoadBase, frozen=True, kw_only=True):
    """Loads of requests. Without `rate` a closed loop: each connection asks again as soon as it was answered.

    With `rate` an open loop: requests are due at fixed times whatever the target does, and latency counts from there.
    """

    connections: Positive = 16
    rate: Rate | None = None
    arrivals: Literal["constant", "poisson"] = "constant"
    request_size: Size = Size(64)
    reply_size: Size = Size(64)


class Connect(Paced, tag="connect", frozen=True, kw_only=True):
    """TCP: connect, one request, close."""


class Requests(Paced, tag="requests", frozen=True, kw_only=True):
    """TCP: requests on connections that are kept. `requests_per_connection: 0` keeps them for good."""

    requests_per_connection: Count = 0


class Http(Paced, tag="http", frozen=True, kw_only=True):
    """HTTP/1.1 GET requests."""

    path: str = "/"
    headers: dict[str, str] = field(default_factory=dict)
    keep_alive: bool = True
    engine: Literal["python", "wrk"] = "python"


class Download(LoadBase, tag="download", frozen=True, kw_only=True):
    """TCP: bytes from the backend, as fast as they come."""

    streams: Positive = 4
    engine: Literal["python", "iperf3"] = "python"


class Upload(LoadBase, tag="upload", frozen=True, kw_only=True):
    """TCP: bytes to the backend, as fast as they go."""

    streams: Positive = 4
    engine: Literal["python", "iperf3"] = "python"


class Hold(LoadBase, tag="hold", frozen=True, kw_only=True):
    """TCP: long-lived connections, almost idle: each is asked something once per `ping`, and never opened again."""

    connections: Positive = 100
    ping: Seconds = Seconds(0.5)


class Visits(LoadBase, tag="visits", frozen=True, kw_only=True):
    """TCP: every client connects once at each of the times `at`, in random order. Made for affinity."""

    at: Annotated[tuple[Seconds, ...], Meta(min_length=1)] = (Seconds(0), Seconds(0.3), Seconds(0.6))


class Udp(LoadBase, tag="udp", frozen=True, kw_only=True):
    """UDP round trips. A flow is one socket; after `datagrams_per_flow` it is replaced by a new one.

    Without `rate` a closed loop with `window` datagrams under way per flow. What is not answered within `timeout`
    is lost.
    """

    flows: Annotated[int, Meta(ge=1, le=10_000)] = 64
    rate: Rate | None = None
    arrivals: Literal["constant", "poisson"] = "constant"
    window: Positive = 1
    sizes: Annotated[tuple[Size, ...], Meta(min_length=1)] = (Size(64), Size(512), Size(1400))
    datagrams_per_flow: Count = 10
    timeout: Seconds = Seconds(1)


class Endings(LoadBase, tag="endings", frozen=True, kw_only=True):
    """TCP: conversations that end in every way there is; is the end passed on as what it was?"""

    each: Positive = 5
    timeout: Seconds = Seconds(2)


Load = Connect | Requests | Http | Download | Upload | Hold | Visits | Udp | Endings


# Events


class Event(Base, tag_field="kind", frozen=True, kw_only=True):
    """Something that happens `at` a time after the warm-up."""

    at: Seconds = Seconds(0)

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class BackendEvent(Event, frozen=True, kw_only=True):
    """It happens to one backend (counted from 1), and is undone after `lasts`, where given."""

    backend: Positive = 1
    lasts: Seconds | None = None


class Kill(BackendEvent, tag="kill", frozen=True, kw_only=True):
    """The process dies (SIGKILL)."""


class Freeze(BackendEvent, tag="freeze", frozen=True, kw_only=True):
    """The process stops (SIGSTOP): its kernel goes on accepting connections, nobody answers."""


class Refuse(BackendEvent, tag="refuse", frozen=True, kw_only=True):
    """New connections are refused; open ones go on."""


class Reset(BackendEvent, tag="reset", frozen=True, kw_only=True):
    """New connections are reset as soon as they are accepted."""


class HalfClose(BackendEvent, tag="half_close", frozen=True, kw_only=True):
    """The backend sends FIN after its first reply, and goes on reading."""


class Delay(BackendEvent, tag="delay", frozen=True, kw_only=True):
    """Replies come `by` later."""

    by: Seconds = Seconds(0.1)


class Slow(BackendEvent, tag="slow", frozen=True, kw_only=True):
    """Replies come one byte per `per_byte`."""

    per_byte: Seconds = Seconds(0.005)


class Remove(BackendEvent, tag="remove", frozen=True, kw_only=True):
    """The target is told that the endpoint is gone; its process goes on."""


class Add(BackendEvent, tag="add", frozen=True, kw_only=True):
    """The target is told of one more endpoint, usually a spare one."""


class Churn(Event, tag="churn", frozen=True, kw_only=True):
    """The target is told `rate` times a second that an endpoint has come or gone, one of `backends` at a time."""

    rate: Rate = Rate(5)
    lasts: Seconds = Seconds(2)
    backend: Positive = 1


class FreezeTarget(Event, tag="freeze_target", frozen=True, kw_only=True):
    """All processes of the target stop (SIGSTOP) for a time."""

    lasts: Seconds = Seconds(1)


class Run(Event, tag="run", frozen=True, kw_only=True):
    """A shell command of the user's own, for what we cannot do to backends that are not ours."""

    command: str


AnyEvent = Kill | Freeze | Refuse | Reset | HalfClose | Delay | Slow | Remove | Add | Churn | FreezeTarget | Run


# What is expected


class Checks(Base, frozen=True, kw_only=True):
    """Which faults are looked for, and when something is one. A check that does not apply is silent by itself."""

    balance: Balance = "even"
    errors: bool = True
    stickiness: bool = True
    affinity: bool = True
    stalls: bool = True
    stall_limit: Seconds = Seconds(0.1)
    udp: bool = True
    udp_loss: Share = 0.0005
    endings: bool = True
    survival: bool = True
    failover: bool = True
    recovery_limit: Seconds = Seconds(2)


class Test(Base, frozen=True, kw_only=True):
    """One load on every target, with what happens meanwhile and what is expected.

    `affinity` asks targets that we configure for client-IP affinity with that time-out, and expects it.
    """

    name: Name
    load: Load
    background: Hold | None = None
    events: tuple[AnyEvent, ...] = ()
    affinity: Seconds | None = None
    checks: Checks = Checks()
    thresholds: tuple[str, ...] = ()


def default_tests() -> tuple[Test, ...]:
    """Return the tests of `bench run` alone: every kind of load, short enough for five rounds in a minute."""
    short = Seconds(0.4)
    return (
        Test(
            name="round robin",
            load=Connect(connections=1, duration=short),
            checks=Checks(balance="round_robin"),
        ),
        Test(name="connections", load=Connect(connections=16, duration=short)),
        Test(name="requests", load=Requests(connections=16, duration=short)),
        Test(name="fixed rate", load=Requests(connections=32, rate=Rate(1000), duration=short)),
        Test(name="download", load=Download(streams=4, duration=short)),
        Test(name="udp", load=Udp(flows=64, rate=Rate(2000), duration=short)),
        Test(name="endings", load=Endings(each=2)),
    )


class Scenario(Base, frozen=True, kw_only=True):
    """A whole scenario file."""

    name: str = "default"
    targets: Annotated[tuple[Target, ...], Meta(min_length=1)] = (Direct(), ThisProxy())
    backends: Backends = Backends()
    tests: Annotated[tuple[Test, ...], Meta(min_length=1)] = field(default_factory=default_tests)
    thresholds: tuple[str, ...] = ()
    repetitions: Annotated[int, Meta(ge=1, le=1000)] = 5
    seed: int = 1
    duration: Seconds = Seconds(2)
    warm_up: Seconds = Seconds(0.1)
    processes: Annotated[int, Meta(ge=0, le=64)] = 0
    pin: bool = True
    confidence: Annotated[float, Meta(gt=0.5, lt=1.0)] = 0.95
    margin: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.05
