"""The node daemon: wires configuration, cluster, node, proxy and servers together, from start to end.

It holds the TaskGroup that lives as long as the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from userspace_proxy import __version__
from userspace_proxy.admin.health import health_server
from userspace_proxy.admin.monitoring import metrics_server
from userspace_proxy.admin.server import HttpServer
from userspace_proxy.admin.service_health import ServiceHealthServers
from userspace_proxy.core.config import DEFAULTS, Config
from userspace_proxy.core.config_addresses import NodeAddresses, check_addresses, node_addresses
from userspace_proxy.core.config_file import as_mapping
from userspace_proxy.core.errors import CleanUpFailed, ConfigError, ListenFailed, RedirectFailed, ServerFailed, leaves
from userspace_proxy.core.health import ProxyHealth, ServiceKey, service_health_checks
from userspace_proxy.core.model import IPFamily, ServicePortName, Snapshot
from userspace_proxy.core.rules import JUMPS_IN_FRONT, USUAL_JUMPS, Jumps, Style
from userspace_proxy.dataplane.interface import MakeDataPath
from userspace_proxy.metrics import Metrics
from userspace_proxy.metrics.processes import ReadProcesses, just_this_one
from userspace_proxy.node import systemd
from userspace_proxy.node.capabilities import capability_warnings, effective_capabilities
from userspace_proxy.node.limits import backlog_warning
from userspace_proxy.node.setup import (
    ConntrackSettings,
    Step,
    is_sys_read_only,
    log_steps,
    set_up_host,
)
from userspace_proxy.node.systemd import READY, STOPPING
from userspace_proxy.node_proxy import NodeProxy, served_families
from userspace_proxy.proxy import in_this_process
from userspace_proxy.redirect import cleanup, conntrack
from userspace_proxy.redirect.keeper import RuleKeeper
from userspace_proxy.redirect.opening import BackendChoice, Opened, open_redirectors
from userspace_proxy.sources.config_file import end_when_updated, reloads
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.events import (
    READ_ONLY_SYS,
    STARTING,
    ApiEvents,
    EventRecorder,
    ObjectReference,
    node_port_unavailable,
    node_reference,
    server_failed,
    service_health_failed,
)
from userspace_proxy.sources.kubeconfig import Access, load_access
from userspace_proxy.sources.kubernetes import KubernetesSettings, KubernetesSource
from userspace_proxy.sources.this_node import ThisNode, node_name, wait_for_node
from userspace_proxy.sources.waking import Waker, WakeSettings

SetUpLogging = Callable[[int, str], None]

_LAST_WORDS_S = 3.0
_OPEN_AGAIN_S = 5.0
_WITHDRAW_S = 1.5
_IN_CLUSTER = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")

_log = logging.getLogger(__name__)


async def clean_up(config: Config) -> None:
    """Remove the rules of all modes of kube-proxy, and ours; in hybrid mode ours alone.

    Raises CleanUpFailed when something is left.
    """
    result = await cleanup.clean_up(owns=_leftovers(config))
    for removed in result.removed:
        _log.info("removed %s", removed)
    if result.errors:
        raise CleanUpFailed(result.errors)


def init_only(config: Config) -> None:
    """Do what needs privileges that the daemon can do without later."""
    if not config.is_hybrid:  # else the other kube-proxy sets up the host
        log_steps(set_up_host(_conntrack_settings(config)))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else there is: by default nothing, which is when traffic is relayed in this process.

    `make_data_path` makes the data path, `notify` tells whoever started the daemon what it is doing, and
    `read_processes` returns the processes that belong to it.
    """

    make_data_path: MakeDataPath = in_this_process
    notify: Callable[[str], object] = systemd.notify
    read_processes: ReadProcesses = just_this_one


class Daemon:
    """This node's proxy. `load_again` reads a changed configuration, `set_up_logging` is told verbosity and format."""

    def __init__(
        self,
        config: Config,
        load_again: Callable[[], Config],
        set_up_logging: SetUpLogging,
        surroundings: Surroundings = Surroundings(),  # it is frozen
    ) -> None:
        self._config = config
        self._load_again = load_again
        self._set_up_logging = set_up_logging
        self._surroundings = surroundings
        self._name = node_name(config.document.hostname_override)
        own = config.document.userspace_proxy
        self._metrics = Metrics(
            __version__,
            read_processes=surroundings.read_processes,
            service_port_limit=own.metrics_port_limit,
            with_endpoints=own.metrics_endpoints,
        )
        self._health = ProxyHealth(config.document.iptables.sync_period)
        self._node_proxy: NodeProxy | None = None

    async def run(self) -> None:
        """Run until cancelled.

        Raises ConfigError for what cannot work, ServerFailed for a server that must be there, and ConfigFileUpdated
        when the configuration file was written and changes are not taken up while running.
        """
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP is ignored")
        steps = _set_up(self._config)
        log_steps(steps)
        _warn(filter(None, (backlog_warning(self._config.own.listen_backlog),)))
        client = self._config.document.client_connection
        async with ApiConnection(
            _access(self._config), qps=client.qps, burst=client.burst, on_answer=self._metrics.rest_client.answered
        ) as connection:
            events = EventRecorder(ApiEvents(connection), self._name)
            events.record(node_reference(self._name), STARTING)
            if is_sys_read_only(steps):
                events.record(node_reference(self._name), READ_ONLY_SYS)
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(events.run())
                try:
                    await self._run(connection, events)
                except* ServerFailed as failures:
                    for failure in leaves(failures):
                        assert isinstance(failure, ServerFailed)
                        events.record(node_reference(self._name), server_failed(failure.event_reason, str(failure)))
                    await events.flush(_LAST_WORDS_S)
                    raise
                finally:
                    self._surroundings.notify(STOPPING)
                    sending.cancel()

    async def _run(self, connection: ApiConnection, events: EventRecorder) -> None:
        followed = KubernetesSettings(node_name=self._name, unidling=self._config.own.unidling != "off")
        source = KubernetesSource(
            connection,
            followed,
            on_node=self._know_node,
            linger_s=lambda: self._config.own.unidling_hold_timeout,
        )
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers():
                tasks.create_task(server.run())
            tasks.create_task(self._watch_config_file())
            tasks.create_task(self._serve(connection, source, events))
            self._surroundings.notify(READY)

    def _servers(self) -> Iterator[HttpServer]:
        config = self._config
        hard_fail = config.document.bind_address_hard_fail
        if config.healthz_address is not None:
            yield health_server(
                config.healthz_address,
                self._health,
                self._metrics,
                hard_fail=hard_fail,
                advice=_port_advice(config, "--healthz-bind-address", "healthzBindAddress"),
            )
        if config.metrics_address is not None:
            yield metrics_server(
                config.metrics_address,
                self._metrics,
                lambda: as_mapping(self._config.document),
                set_verbosity=self._set_verbosity if config.document.enable_profiling else None,
                hard_fail=hard_fail,
                advice=_port_advice(config, "--metrics-bind-address", "metricsBindAddress"),
            )

    async def _serve(self, connection: ApiConnection, source: KubernetesSource, events: EventRecorder) -> None:
        """Learn who this node is and what is wanted, and only then touch anything."""

        def tell(name: ServicePortName, failure: ListenFailed) -> None:
            regarding = ObjectReference("Service", name.service, name.namespace)
            events.record(regarding, node_port_unavailable(self._name, str(name), str(failure)))

        waker = Waker(connection, self._name, source.idled, self._wake_settings, on_result=self._metrics.waking.count)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(source.run())
            tasks.create_task(waker.run())
            snapshot = await source.next_snapshot()
            node = await wait_for_node(connection, self._name) or source.node or ThisNode(self._name)
            if source.node is None and node.ips:
                self._know_node(node)
            addresses = node_addresses(self._config.document.bind_address, node.ips)
            self._health.queued(addresses.primary_family, now=time.monotonic())
            async with self._keeper(addresses, node.pod_cidrs) as keeper, asyncio.TaskGroup() as proxying:
                self._node_proxy = NodeProxy(
                    self._config,
                    addresses,
                    keeper,
                    self._health,
                    self._metrics,
                    tell,
                    waker.needs_pods,
                    make_data_path=self._surroundings.make_data_path,
                )
                proxying.create_task(self._node_proxy.run())
                await self._follow(source, snapshot, self._node_proxy, events)

    async def _follow(
        self, source: KubernetesSource, snapshot: Snapshot, node_proxy: NodeProxy, events: EventRecorder
    ) -> None:
        def tell(key: ServiceKey, port: int, failure: ListenFailed) -> None:
            namespace, service = key
            regarding = ObjectReference("Service", service, namespace)
            events.record(regarding, service_health_failed(self._name, f"{namespace}/{service}", port, str(failure)))

        health_checks = ServiceHealthServers(lambda: self._health.is_healthy(now=time.monotonic()), on_failure=tell)
        try:
            while True:
                node_proxy.want(snapshot, source.take_trigger_times())
                if not self._config.is_hybrid:  # else the other proxy has these ports
                    await health_checks.apply(service_health_checks(snapshot))
                snapshot = await source.next_snapshot()
        finally:
            await health_checks.close()

    @asynccontextmanager
    async def _keeper(self, addresses: NodeAddresses, pod_cidrs: Sequence[str]) -> AsyncIterator[RuleKeeper]:
        """Yield the keeper of this node's kernel rules. Raises ConfigError where the configuration does not fit."""
        config = self._config
        families = served_families(addresses)
        report = check_addresses(
            config, addresses.primary_family, has_both_families=len(families) > 1, pod_cidrs=pod_cidrs
        )
        _warn(filter(None, (addresses.warning, *report.warnings)))
        if report.fatal:
            raise ConfigError("; ".join(report.fatal))
        choice = BackendChoice(config.own.iptables_backend)
        effective = effective_capabilities()
        lacking = list(capability_warnings("nft" if choice is BackendChoice.AUTO else choice, effective))
        _warn(lacking)
        opened = await _open(choice, families, JUMPS_IN_FRONT if config.is_hybrid else USUAL_JUMPS)
        keeper = RuleKeeper(
            opened.redirectors,
            style=Style(config.own.rule_style),
            conntrack=conntrack.available(),
            leftovers=_leftovers(config),
        )
        found = [text for name in keeper.backend_names for text in capability_warnings(name, effective)]
        _warn([*opened.warnings, *(text for text in found if text not in lacking)])
        try:
            yield keeper
        finally:
            if config.is_hybrid:
                await _withdraw(keeper)
            await keeper.close()

    def _know_node(self, node: ThisNode) -> None:
        """Keep what /healthz says of the node up to date."""
        self._health.is_node_eligible = node.is_eligible

    def _wake_settings(self) -> WakeSettings:
        own = self._config.own
        return WakeSettings(own.unidling_hold_timeout, own.wake.scale)

    async def _watch_config_file(self) -> None:
        path = self._config.config_file
        if not path:
            return
        if not self._config.own.config_reload:
            await end_when_updated(path)
        async for reload in reloads(self._config, self._load_again):
            self._config = reload.config
            self._set_verbosity(reload.config.document.logging.verbosity)
            self._metrics.reconfigure(
                service_port_limit=self._config.own.metrics_port_limit,
                with_endpoints=self._config.own.metrics_endpoints,
            )
            if self._node_proxy is not None:
                self._node_proxy.reconfigure(reload.config)
            _log.info("the configuration has changed: %s", ", ".join(reload.changes.applicable) or "nothing to take up")
            if reload.changes.needs_restart:
                _log.warning("these changes need a restart: %s", ", ".join(reload.changes.needs_restart))

    def _set_verbosity(self, verbosity: int) -> None:
        self._set_up_logging(verbosity, self._config.document.logging.format)


def _leftovers(config: Config) -> cleanup.Owns:
    """Return what is to be removed where it was left: nothing of another mode while that one has the node."""
    return cleanup.of_userspace_mode if config.is_hybrid else cleanup.of_any_mode


def _port_advice(config: Config, flag: str, field: str) -> str:
    """Return what to do about a server's address that another program has."""
    owner = "the other kube-proxy of this node may have it: " if config.is_hybrid else ""
    return f"{owner}{flag} ({field}) chooses another one, or none"


async def _withdraw(keeper: RuleKeeper) -> None:
    """Leave the services to the other proxy, in time for an orderly end."""
    try:
        async with asyncio.timeout(_WITHDRAW_S):
            await keeper.withdraw()
    except TimeoutError:
        _log.error("kernel rules could not be removed in time; --cleanup --unidling=hybrid removes them")


async def _open(choice: BackendChoice, families: tuple[IPFamily, ...], jumps: Jumps) -> Opened:
    """Return the way into the kernel's rules, as soon as there is one. Raises ConfigError where there can be none."""
    told = ""
    while True:
        try:
            return await open_redirectors(choice, families, jumps=jumps)
        except RedirectFailed as error:
            if told != str(error):
                told = str(error)
                _log.error("kernel rules cannot be read: %s; trying again", told)
        await asyncio.sleep(_OPEN_AGAIN_S)


def _warn(texts: Iterable[str]) -> None:
    for text in texts:
        _log.warning("%s", text)


def _access(config: Config) -> Access:
    """Return the access to the API server. Raises ConfigError. Source: kube-proxy, which looks at no KUBECONFIG."""
    kubeconfig = config.document.client_connection.kubeconfig
    if not kubeconfig and not config.master:
        _log.info("Neither kubeconfig file nor master URL was specified, falling back to in-cluster config")
    environ = {name: os.environ[name] for name in _IN_CLUSTER if name in os.environ}
    return load_access(kubeconfig, master=config.master, environ=environ)


def _set_up(config: Config) -> tuple[Step, ...]:
    """Set up the host, but not in hybrid mode, where it is the other kube-proxy's."""
    if not config.is_hybrid:
        return set_up_host(_conntrack_settings(config))
    _log.info("hybrid mode: idled services alone are served, beside the kube-proxy of this node")
    if config.document.conntrack != DEFAULTS.conntrack:
        _log.warning("conntrack: without effect in hybrid mode, as the other kube-proxy sets it")
    return ()


def _conntrack_settings(config: Config) -> ConntrackSettings:
    wanted = config.document.conntrack
    return ConntrackSettings(
        max_per_core=wanted.max_per_core,
        min=wanted.min,
        tcp_established_timeout_s=wanted.tcp_established_timeout,
        tcp_close_wait_timeout_s=wanted.tcp_close_wait_timeout,
        udp_timeout_s=wanted.udp_timeout,
        udp_stream_timeout_s=wanted.udp_stream_timeout,
        tcp_be_liberal=wanted.tcp_be_liberal,
    )
