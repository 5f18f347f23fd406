"""The daemon's flags, as one table: kube-proxy's of 1.25 and of later versions up to 1.36, and our own.

A flag is written here once; the parser, `--help` and the loading of the configuration read this table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from userspace_proxy.core.config import DEFAULTS, HEALTHZ_PORT, METRICS_PORT, OWN_KEY, field_at


class Kind(enum.Enum):
    """How a value is read. The text is what stands for a value in `--help`."""

    BOOL = ""
    VERSION = "[=raw]"
    STRING = "string"
    INT32 = "int"
    FLOAT = "float"
    DURATION = "duration"
    DURATIONS = "duration,..."
    IP = "ip"
    IP_PORT = "ip:port"
    PORT_RANGE = "port-range"
    LIST = "string,..."
    GATES = "name=true|false,..."
    LEVEL = "level"
    LEVELS = "pattern=level,..."
    WORDS = "word"
    WORKERS = "number|auto"

    @property
    def bare_value(self) -> str | None:
        """What a flag means that has no value. None: it needs one."""
        return "true" if self in (Kind.BOOL, Kind.VERSION) else None


class Era(enum.Enum):
    """Which kube-proxy has the flag."""

    ALL = ""
    UNTIL_1_25 = "kube-proxy until 1.25"
    LATER = "kube-proxy after 1.25"
    OWN = "not in kube-proxy"


class Unused(enum.Enum):
    """Why a flag is accepted and then has no effect: the rest of a sentence about such flags."""

    OTHER_MODES = "belong to other proxy modes"
    LOG_FILES = "are about log files and log headers, while this log goes to standard error"
    RETIRED = "are no longer in use"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `path` is the field of the configuration that it sets; without one, `cli.load` knows what it does."""

    name: str
    kind: Kind
    path: str
    help: str
    era: Era = Era.ALL
    shorthand: str = ""
    default: str = ""
    unused: Unused | None = None
    deprecated: str = ""

    @property
    def spelled(self) -> str:
        """The flag as people write it."""
        return f"--{self.name}"

    @property
    def is_own(self) -> bool:
        return self.path.startswith(f"{OWN_KEY}.")

    @property
    def outranks_file(self) -> bool:
        """Whether the flag counts beside `--config`, too: flags for the log do, and our own."""
        return self.is_own or self.path.startswith("logging.") or not self.path

    @property
    def shown_default(self) -> str:
        """The default as `--help` shows it. Empty where there is nothing to say."""
        value = field_at(DEFAULTS, self.path) if self.path and not self.default else self.default
        match value:
            case bool():
                return "true" if value else ""
            case tuple():
                return ",".join(map(str, value))
            case dict():
                return ""
            case float() if not str(value).endswith("s"):
                return f"{value:g}"
            case _:
                return str(value)


_B, _S, _I, _D = Kind.BOOL, Kind.STRING, Kind.INT32, Kind.DURATION
_OLD, _NEW, _OWN = Era.UNTIL_1_25, Era.LATER, Era.OWN


def _other(name: str, kind: Kind, path: str, era: Era = Era.ALL) -> Flag:
    return Flag(name, kind, path, "", era, unused=Unused.OTHER_MODES)


def _log(name: str, kind: Kind, era: Era = _OLD) -> Flag:
    return Flag(name, kind, "", "", era, unused=Unused.LOG_FILES)


def _retired(name: str, kind: Kind) -> Flag:
    return Flag(name, kind, "", "", _OLD, unused=Unused.RETIRED)


def _own(name: str, kind: Kind, field: str, text: str) -> Flag:
    return Flag(name, kind, f"{OWN_KEY}.{field}", text, _OWN)


GROUPS: Final[dict[str, tuple[Flag, ...]]] = {
    "Configuration": (
        Flag("config", _S, "", "Configuration file (KubeProxyConfiguration v1alpha1). With it, flags for its fields "
             "have no effect, except those for logging, those that kube-proxy does not have, and "
             "--hostname-override."),
        _own("config-reload", _B, "configReload", "Apply a changed configuration file as far as possible, instead of "
             "ending when it changes."),
        Flag("write-config-to", _S, "", "Write the configuration to this file, and exit."),
    ),
    "Cluster": (
        Flag("kubeconfig", _S, "clientConnection.kubeconfig", "Kubeconfig file. Without it and --master: in-cluster."),
        Flag("master", _S, "", "URL of the API server; overrides the kubeconfig's."),
        Flag("hostname-override", _S, "", "Name of this node's Node object, instead of the host name."),
        Flag("config-sync-period", _D, "configSyncPeriod", "How often everything is listed anew. Greater than 0."),
        Flag("kube-api-qps", Kind.FLOAT, "clientConnection.qps", "Requests per second to the API server."),
        Flag("kube-api-burst", _I, "clientConnection.burst", "Requests at once to the API server."),
        Flag("kube-api-content-type", _S, "clientConnection.contentType", "Content type that is asked for."),
    ),
    "Proxying": (
        Flag("bind-address", Kind.IP, "bindAddress", "Address to listen on, which also says what this node's own "
             "address is; 0.0.0.0 and :: mean all."),
        Flag("proxy-port-range", Kind.PORT_RANGE, "portRange", "Ports to listen on: A-B, A+offset or A, both ends "
             "included; empty or 0 means any free ones.", _OLD),
        Flag("nodeport-addresses", Kind.LIST, "nodePortAddresses", "Networks on whose addresses node ports are served, "
             "or the word primary for the node's own addresses alone; unset means all."),
        Flag("cluster-cidr", _S, "clusterCIDR", "Network of the pods, or a pair of both families."),
        Flag("udp-timeout", _D, "udpIdleTimeout", "How long an idle UDP session lasts. Greater than 0.", _OLD),
        _own("max-udp-sessions", _I, "maxUdpSessions", "UDP sessions at once; 0 means min(10000, a quarter of the "
             "files that may be open)."),
        _own("tcp-idle-timeout", _D, "tcpIdleTimeout", "How long a TCP connection lasts on which nothing moves; 0 "
             "means forever."),
        _own("half-close-timeout", _D, "halfCloseTimeout", "How long a half-closed connection lasts on which nothing "
             "moves."),
        _own("tcp-user-timeout", _D, "tcpUserTimeout", "How long a TCP connection lasts whose peer acknowledges "
             "nothing, or takes nothing; 0 leaves that to the system."),
        _own("dial-ladder", Kind.DURATIONS, "dialLadder", "Time limits of the attempts to reach an endpoint."),
        _own("max-connections", _I, "maxConnections", "TCP connections at once, beyond which clients wait to be "
             "accepted; 0 means no limit."),
        _own("max-connections-per-service-port", _I, "maxConnectionsPerServicePort", "The same for each service port."),
        _own("listen-backlog", _I, "listenBacklog", "Connections that may wait to be accepted."),
        _own("workers", Kind.WORKERS, "workers", "Processes that move the bytes; auto means one per CPU."),
        _own("unidling", Kind.WORDS, "unidling", "Wake idled services: off, on, or hybrid, which serves idled services "
             "alone beside a kube-proxy in another mode."),
        _own("unidling-max-connections", _I, "unidlingMaxConnections", "Connections that are held per idled service "
             "port."),
        _own("unidling-hold-timeout", _D, "unidlingHoldTimeout", "How long they are held."),
        _own("wake-scale", _B, "wake.scale", "Scale up the workloads of an idled service when a client comes."),
        Flag("proxy-mode", _S, "mode", "userspace or empty, which means the same here."),
    ),
    "Kernel rules": (
        _own("rule-style", Kind.WORDS, "ruleStyle", "faithful: the rules of kube-proxy 1.25; dnat: rules that also "
             "work with pods on routed links, bridge netfilter, and an INPUT chain that drops."),
        _own("iptables-backend", Kind.WORDS, "iptablesBackend", "What writes the rules: auto, nft, legacy, libiptc, or "
             "none, which writes none."),
        Flag("iptables-sync-period", _D, "iptables.syncPeriod", "How often the rules are written anew at least. "
             "Greater than 0."),
        Flag("iptables-min-sync-period", _D, "iptables.minSyncPeriod", "How long to wait between two such writes."),
    ),
    "Health and metrics": (
        Flag("healthz-bind-address", Kind.IP_PORT, "healthzBindAddress", "Where /healthz and /livez are served; empty "
             "switches them off."),
        Flag("metrics-bind-address", Kind.IP_PORT, "metricsBindAddress", "Where /metrics is served; empty switches it "
             "off."),
        Flag("bind-address-hard-fail", _B, "bindAddressHardFail", "End when one of these ports cannot be had, instead "
             "of trying again."),
        Flag("profiling", _B, "enableProfiling", "Serve profiles under /debug."),
        _own("metrics-endpoints", _B, "metricsEndpoints", "Count for each endpoint, too."),
        _own("metrics-port-limit", _I, "metricsPortLimit", "Service ports with counters of their own."),
        Flag("show-hidden-metrics-for-version", _S, "showHiddenMetricsForVersion", "Accepted: there are no hidden "
             "metrics."),
        Flag("healthz-port", _I, "", "Port of --healthz-bind-address where that has none; 0 switches it off.",
             default=str(HEALTHZ_PORT), deprecated="use --healthz-bind-address"),
        Flag("metrics-port", _I, "", "Port of --metrics-bind-address where that has none; 0 switches it off.",
             default=str(METRICS_PORT), deprecated="use --metrics-bind-address"),
    ),
    "Process and connection tracking": (
        Flag("oom-score-adj", _I, "oomScoreAdj", "oom_score_adj of this process, from -1000 to 1000."),
        Flag("conntrack-max-per-core", _I, "conntrack.maxPerCore", "Tracked connections per CPU; 0 leaves the limit "
             "as it is."),
        Flag("conntrack-min", _I, "conntrack.min", "Tracked connections at least, whatever --conntrack-max-per-core "
             "says."),
        Flag("conntrack-tcp-timeout-established", _D, "conntrack.tcpEstablishedTimeout", "Idle time-out of TCP "
             "connections; 0 leaves it as it is."),
        Flag("conntrack-tcp-timeout-close-wait", _D, "conntrack.tcpCloseWaitTimeout", "Time-out of half-closed TCP "
             "connections; 0 leaves it as it is."),
        Flag("conntrack-tcp-be-liberal", _B, "conntrack.tcpBeLiberal", "Do not mark packets outside the window as "
             "invalid.", _NEW),
        Flag("conntrack-udp-timeout", _D, "conntrack.udpTimeout", "Time-out of unanswered UDP; 0 leaves it as it is.",
             _NEW),
        Flag("conntrack-udp-timeout-stream", _D, "conntrack.udpStreamTimeout", "Time-out of answered UDP; 0 leaves it "
             "as it is.", _NEW),
    ),
    "Instead of running": (
        Flag("cleanup", _B, "", "Remove the rules of the userspace and the iptables mode, and exit."),
        Flag("init-only", _B, "", "Do what needs full privileges, and exit.", _NEW),
        Flag("version", Kind.VERSION, "", "Print the version, and exit."),
        Flag("help", _B, "", "Print this, and exit.", shorthand="h"),
    ),
    "Log": (
        Flag("v", Kind.LEVEL, "logging.verbosity", "Verbosity: from 2 on a line per connection.", shorthand="v"),
        Flag("logging-format", _S, "logging.format", "text or json."),
        Flag("vmodule", Kind.LEVELS, "logging.vmodule", "Accepted: verbosity is the same for all modules."),
        Flag("log-flush-frequency", _D, "logging.flushFrequency", "Accepted: every line is written at once."),
        Flag("logtostderr", _B, "", "Accepted: the log goes to standard error.", _OLD, default="true"),
    ),
    "Accepted without effect": (
        Flag("feature-gates", Kind.GATES, "featureGates", "Gates of kube-proxy."),
        _other("iptables-localhost-nodeports", _B, "iptables.localhostNodePorts", _NEW),
        _other("iptables-masquerade-bit", _I, "iptables.masqueradeBit"),
        _other("masquerade-all", _B, "iptables.masqueradeAll"),
        _other("detect-local-mode", _S, "detectLocalMode"),
        _other("pod-bridge-interface", _S, "detectLocal.bridgeInterface"),
        _other("pod-interface-name-prefix", _S, "detectLocal.interfaceNamePrefix"),
        _other("ipvs-exclude-cidrs", Kind.LIST, "ipvs.excludeCIDRs"),
        _other("ipvs-min-sync-period", _D, "ipvs.minSyncPeriod"),
        _other("ipvs-scheduler", _S, "ipvs.scheduler"),
        _other("ipvs-strict-arp", _B, "ipvs.strictARP"),
        _other("ipvs-sync-period", _D, "ipvs.syncPeriod"),
        _other("ipvs-tcp-timeout", _D, "ipvs.tcpTimeout"),
        _other("ipvs-tcpfin-timeout", _D, "ipvs.tcpFinTimeout"),
        _other("ipvs-udp-timeout", _D, "ipvs.udpTimeout"),
        _log("add-dir-header", _B),
        _log("alsologtostderr", _B),
        _log("log-backtrace-at", _S),
        _log("log-dir", _S),
        _log("log-file", _S),
        _log("log-file-max-size", _I),
        _log("one-output", _B),
        _log("skip-headers", _B),
        _log("skip-log-headers", _B),
        _log("stderrthreshold", _S),
        _log("log-json-info-buffer-size", _S, Era.ALL),
        _log("log-json-split-stream", _B, Era.ALL),
        _log("log-text-info-buffer-size", _S, _NEW),
        _log("log-text-split-stream", _B, _NEW),
        _retired("boot-id-file", _S),
        _retired("machine-id-file", _S),
        _retired("cleanup-iptables", _B),
        _retired("cleanup-ipvs", _B),
        _retired("conntrack-max", _I),
        _retired("resource-container", _S),
    ),
}  # fmt: skip

FLAGS: Final = {flag.name: flag for flags in GROUPS.values() for flag in flags}
SHORTHANDS: Final = {flag.shorthand: flag for flag in FLAGS.values() if flag.shorthand}
