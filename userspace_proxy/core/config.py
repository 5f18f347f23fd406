"""KubeProxyConfiguration v1alpha1 as immutable values, with kube-proxy's defaults, and the `Config` that is made of it.

One rule: a name here is the name in the file, in snake case. `wire_name` is the way back.

Our own settings live in the same file under `userspaceProxy`, which kube-proxy's lenient decoder passes over.
Source: kube-proxy 1.25, and the fields that later versions up to 1.36 added.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from userspace_proxy.core.addresses import parse_network
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.host_ports import PRIMARY, parse_port_range, split_host_port
from userspace_proxy.core.model import IPNetwork, ListenAddress

API_VERSION: Final = "kubeproxy.config.k8s.io/v1alpha1"
KIND: Final = "KubeProxyConfiguration"
OWN_KEY: Final = "userspaceProxy"

HEALTHZ_PORT: Final = 10256
METRICS_PORT: Final = 10249
HYBRID_PORT_OFFSET: Final = 100
"""In hybrid mode the two ports above are the other kube-proxy's, and those that are higher by this take their place."""

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
RuleStyle = Literal["faithful", "dnat"]
IPTablesBackend = Literal["auto", "nft", "legacy", "libiptc", "none"]
Unidling = Literal["off", "on", "hybrid"]

_CAPITALS = {"cidr": "CIDR", "cidrs": "CIDRs", "arp": "ARP", "dsr": "DSR", "ip": "IP"}
_HOUR = 3600.0


def wire_name(name: str) -> str:
    """Return how a field is written in the file: `cluster_cidr` is `clusterCIDR`."""
    first, *rest = name.split("_")
    return first + "".join(_CAPITALS.get(word, word.capitalize()) for word in rest)


class Section(msgspec.Struct, frozen=True, kw_only=True, rename=wire_name):
    """A mapping of the file."""


class ClientConnection(Section, frozen=True):
    accept_content_types: str = ""
    burst: Int32 = 10
    content_type: str = "application/vnd.kubernetes.protobuf"
    kubeconfig: str = ""
    qps: float = 5.0


class Conntrack(Section, frozen=True):
    """What is set in the kernel's connection tracking. Zero leaves a value as it is."""

    max_per_core: Int32 = 32768
    min: Int32 = 131072
    tcp_be_liberal: bool = False
    tcp_close_wait_timeout: Duration = Duration(_HOUR)
    tcp_established_timeout: Duration = Duration(24 * _HOUR)
    udp_stream_timeout: Duration = Duration(0)
    udp_timeout: Duration = Duration(0)


class DetectLocal(Section, frozen=True):
    bridge_interface: str = ""
    interface_name_prefix: str = ""


class IPTables(Section, frozen=True):
    """Only the periods matter to the userspace mode."""

    localhost_node_ports: bool = True
    masquerade_all: bool = False
    masquerade_bit: Int32 = 14
    min_sync_period: Duration = Duration(1)
    snat_node_internal_ip: bool = False
    sync_period: Duration = Duration(30)


class IPVS(Section, frozen=True):
    exclude_cidrs: tuple[str, ...] = ()
    min_sync_period: Duration = Duration(0)
    scheduler: str = ""
    strict_arp: bool = False
    sync_period: Duration = Duration(30)
    tcp_fin_timeout: Duration = Duration(0)
    tcp_timeout: Duration = Duration(0)
    udp_timeout: Duration = Duration(0)


class NFTables(Section, frozen=True):
    masquerade_all: bool = False
    masquerade_bit: Int32 = 14
    min_sync_period: Duration = Duration(1)
    sync_period: Duration = Duration(30)


class Winkernel(Section, frozen=True):
    enable_dsr: bool = False
    forward_health_check_vip: bool = False
    network_name: str = ""
    root_hns_endpoint_name: str = ""
    source_vip: str = ""


class VModule(Section, frozen=True):
    file_pattern: str = ""
    verbosity: Int32 = 0


class Logging(Section, frozen=True):
    """`options` are those of kube-proxy's writers, which have no counterpart here."""

    flush_frequency: Duration = Duration(5)
    format: str = "text"
    options: dict[str, Any] = {}
    verbosity: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    vmodule: tuple[VModule, ...] = ()


class Wake(Section, frozen=True):
    """What is done to wake a service, beside telling the cluster."""

    scale: bool = False


class OwnSettings(Section, frozen=True):
    """What kube-proxy has no settings for. In the file they stand under `userspaceProxy`.

    Zero means no limit, or never, except for `max_udp_sessions`, where it means min(10,000, a quarter of the files
    that may be open).
    """

    config_reload: bool = False
    dial_ladder: tuple[Duration, ...] = (Duration(0.25), Duration(0.5), Duration(1), Duration(2))
    half_close_timeout: Duration = Duration(_HOUR)
    iptables_backend: IPTablesBackend = "auto"
    listen_backlog: Int32 = 4096
    max_connections: Int32 = 0
    max_connections_per_service_port: Int32 = 0
    max_udp_sessions: Int32 = 0
    metrics_endpoints: bool = False
    metrics_port_limit: Int32 = 2000
    rule_style: RuleStyle = "faithful"
    tcp_idle_timeout: Duration = Duration(0)
    tcp_user_timeout: Duration = Duration(0)
    unidling: Unidling = "on"
    unidling_hold_timeout: Duration = Duration(120)
    unidling_max_connections: Int32 = 16
    wake: Wake = Wake()
    workers: Int32 | Literal["auto"] = 1


class KubeProxyConfiguration(Section, frozen=True):
    """The file. An empty `healthz_bind_address` or `metrics_bind_address` switches that server off."""

    bind_address: str = "0.0.0.0"
    bind_address_hard_fail: bool = False
    client_connection: ClientConnection = ClientConnection()
    cluster_cidr: str = ""
    config_sync_period: Duration = Duration(15 * 60)
    conntrack: Conntrack = Conntrack()
    detect_local: DetectLocal = DetectLocal()
    detect_local_mode: str = ""
    enable_profiling: bool = False
    feature_gates: dict[str, bool] = {}
    healthz_bind_address: str = f"0.0.0.0:{HEALTHZ_PORT}"
    hostname_override: str = ""
    iptables: IPTables = IPTables()
    ipvs: IPVS = IPVS()
    logging: Logging = Logging()
    metrics_bind_address: str = f"127.0.0.1:{METRICS_PORT}"
    mode: str = ""
    nftables: NFTables = NFTables()
    node_port_addresses: tuple[str, ...] = ()
    oom_score_adj: Int32 = -999
    port_range: str = ""
    show_hidden_metrics_for_version: str = ""
    udp_idle_timeout: Duration = Duration(0.25)
    userspace_proxy: OwnSettings = OwnSettings()
    windows_run_as_service: bool = False
    winkernel: Winkernel = Winkernel()


DEFAULTS: Final = KubeProxyConfiguration()

SectionT = TypeVar("SectionT", bound=Section)


class Action(enum.Enum):
    """What the process is for."""

    RUN = "run"
    WRITE_CONFIG = "write-config-to"
    CLEANUP = "cleanup"
    INIT_ONLY = "init-only"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All that the command line and the configuration file say: complete, and valid.

    `warnings` are for the operator, who is to see each of them once, in the log.
    """

    document: KubeProxyConfiguration = DEFAULTS
    action: Action = Action.RUN
    config_file: str = ""
    write_config_to: str = ""
    master: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def own(self) -> OwnSettings:
        """The settings that kube-proxy does not have."""
        return self.document.userspace_proxy

    @property
    def is_hybrid(self) -> bool:
        """Whether a kube-proxy in another mode has this node, and only idled services are for this proxy."""
        return self.own.unidling == "hybrid"

    @property
    def healthz_address(self) -> ListenAddress | None:
        """Where the health server listens. None: it is switched off."""
        return self._beside_another(_listen_address(self.document.healthz_bind_address))

    @property
    def metrics_address(self) -> ListenAddress | None:
        """Where the metrics server listens. None: it is switched off."""
        return self._beside_another(_listen_address(self.document.metrics_bind_address))

    @property
    def proxy_ports(self) -> range | None:
        """The ports to listen on for service ports. None: any free ones."""
        return parse_port_range(self.document.port_range)

    @property
    def cluster_networks(self) -> tuple[IPNetwork, ...]:
        """Where the pods are: one network of each family at most."""
        return tuple(parse_network(cidr) for cidr in self.document.cluster_cidr.split(",") if cidr)

    @property
    def node_ports_on_primary(self) -> bool:
        """Whether node ports are served on the node's own addresses alone."""
        return self.document.node_port_addresses == (PRIMARY,)

    def _beside_another(self, address: ListenAddress | None) -> ListenAddress | None:
        """Return the address with another port where its own is for the other kube-proxy."""
        if address is None or not self.is_hybrid or address.port not in (HEALTHZ_PORT, METRICS_PORT):
            return address
        return ListenAddress(address.address, address.port + HYBRID_PORT_OFFSET)


def fields_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting as its path in the file, such as `iptables.syncPeriod`, with its value."""
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            yield from fields_of(value, f"{prefix}{field.encode_name}.")
        else:
            yield prefix + field.encode_name, value


def field_at(document: Section, path: str) -> Any:
    """Return the value of the field at a path such as `iptables.syncPeriod`. Raises KeyError when there is none."""
    first, _, rest = path.partition(".")
    value = getattr(document, _attribute(document, first))
    return field_at(value, rest) if rest else value


def with_field(document: SectionT, path: str, value: object) -> SectionT:
    """Return the document with another value at a path such as `iptables.syncPeriod`. Raises KeyError."""
    first, _, rest = path.partition(".")
    name = _attribute(document, first)
    inner = with_field(getattr(document, name), rest, value) if rest else value
    return msgspec.structs.replace(document, **{name: inner})


def choices_of(path: str) -> tuple[str, ...]:
    """Return the words that a field takes, where only some do."""
    *outer, last = path.split(".")
    section: Section = DEFAULTS
    try:
        for name in outer:
            section = field_at(section, name)
        kind = next(field.type for field in msgspec.structs.fields(section) if field.encode_name == last)
    except (KeyError, StopIteration, TypeError):
        return ()
    return get_args(kind) if get_origin(kind) is Literal else ()


def _attribute(section: Section, encode_name: str) -> str:
    for field in msgspec.structs.fields(section):
        if field.encode_name == encode_name:
            return field.name
    raise KeyError(encode_name)


def _listen_address(text: str) -> ListenAddress | None:
    return ListenAddress(*split_host_port(text)) if text else None
