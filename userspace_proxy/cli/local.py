"""`userspace-proxy local`: the services of files, or of the command line itself, on this machine."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import click

from userspace_proxy.cli.limits import limit_options
from userspace_proxy.cli.logs import LogFormat, set_up_logging
from userspace_proxy.cli.parsed import Parsed, not_negative_duration, positive_duration
from userspace_proxy.cli.running import run_until_stopped
from userspace_proxy.core.durations import format_duration
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePort
from userspace_proxy.core.placement import HostPort, PortReference, parse_port, parse_service
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.local import FileSource, LocalOptions, LocalProxy, NoSource, Row, SnapshotSource
from userspace_proxy.node.limits import backlog_warning, raise_descriptor_limit, usable_cpus

_SHOWN_ENDPOINTS = 4
_COLUMNS = ("SERVICE PORT", "PROTOCOL", "LOCAL ADDRESS", "ENDPOINTS", "AFFINITY")

_log = logging.getLogger(__name__)


def _hosts(text: str) -> tuple[HostPort, ...]:
    return tuple(HostPort.parse(part.strip()) for part in text.split(",") if part.strip())


def _split(text: str) -> tuple[str, str]:
    left, equals, right = text.rpartition("=")
    if not equals or not left or not right:
        raise ConfigError(f"{text!r} has nothing before or after a '='" if equals else f"{text!r} has no '='")
    return left, right


def _port_mapping(text: str) -> tuple[PortReference, int]:
    reference, port = _split(text)
    return PortReference.parse(reference), parse_port(port)


def _endpoints(text: str) -> tuple[PortReference, tuple[HostPort, ...]]:
    reference, hosts = _split(text)
    return PortReference.parse(reference), _hosts(hosts)


def _service(text: str) -> tuple[ServicePort, tuple[HostPort, ...]]:
    service, hosts = _split(text)
    return parse_service(service), _hosts(hosts)


def _ip_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        raise ConfigError(f"{text!r} is not an IP address") from None


def _refuse_overlapping(addresses: Sequence[str]) -> None:
    """Raise UsageError for a wildcard beside an address that it has already."""
    for one, other in itertools.combinations(dict.fromkeys(addresses), 2):
        if ListenAddress(one, 1).excludes(ListenAddress(other, 1)):
            raise click.UsageError(f"--listen-address: {one} and {other} overlap")


def _refuse_repeated(flag: str, subjects: Iterable[str]) -> None:
    for subject, times in Counter(subjects).items():
        if times > 1:
            raise click.UsageError(f"{flag}: {subject} is there {times} times, and only one can be meant")


def _service_name(text: str) -> str:
    reference = PortReference.parse(text)
    return f"{reference.namespace}/{reference.service}"


def _verbosity(text: str) -> int:
    digits = text.removeprefix("=")  # click leaves the sign in -v=2
    if not digits.isdigit():
        raise ConfigError(f"{digits!r} is not a number")
    return int(digits)


def _workers(text: str) -> int:
    if text == "auto":
        return usable_cpus()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{text!r} is neither a number of processes nor auto")
    return int(text)


_many: dict[str, Any] = {"multiple": True, "default": ()}


@click.command()
@click.option(
    "-f",
    "--filename",
    "paths",
    metavar="FILE",
    **_many,
    help="File or directory with Services and EndpointSlices or Endpoints, YAML or JSON, as kubectl prints them; "
    "- is stdin. Watched for changes.",
)
@click.option(
    "--service",
    "services",
    type=Parsed("NAME:PORT[/udp]=HOST:PORT,...", _service),
    **_many,
    help="Serve this, without any file.",
)
@click.option(
    "--endpoints",
    type=Parsed("NAMESPACE/SERVICE[:PORT]=HOST:PORT,...", _endpoints),
    **_many,
    help="Endpoints to use for a service instead of those in the files.",
)
@click.option(
    "--kubeconfig",
    metavar="FILE",
    help="Serve the services of the cluster that this file describes; the addresses of its pods must be reachable.",
)
@click.option(
    "--context",
    metavar="NAME",
    help="Context to use instead of the current one. Without --kubeconfig, of the files that KUBECONFIG names.",
)
@click.option("--namespace", "-n", "namespaces", **_many, help="Serve the services of this namespace only.")
@click.option("--only", type=Parsed("NAMESPACE/SERVICE", _service_name), **_many, help="Serve this service only.")
@click.option(
    "--listen-address",
    "listen_addresses",
    type=Parsed("IP", _ip_address),
    multiple=True,
    default=("127.0.0.1",),
    help="Local address to listen on, 127.0.0.1 if none is given.",
)
@click.option(
    "--port-map",
    type=Parsed("NAMESPACE/SERVICE:PORT=LOCALPORT", _port_mapping),
    **_many,
    help="Local port of a service port, given by name or number and optional /udp.",
)
@click.option("--auto-ports", is_flag=True, help="Choose a free local port where the service's own cannot be had.")
@click.option("--keep-going", is_flag=True, help="Serve the rest where some ports cannot be listened on.")
@click.option(
    "--wake-scale",
    is_flag=True,
    help="Scale up the workloads of an idled service of the cluster when a client comes.",
)
@click.option(
    "--udp-timeout",
    type=Parsed("DURATION", positive_duration),
    default="60s",
    show_default=True,
    help="How long an idle UDP session lasts.",
)
@click.option(
    "--drain-timeout",
    type=Parsed("DURATION", not_negative_duration),
    default="5s",
    show_default=True,
    help="How long open connections may go on after SIGTERM or Ctrl-C.",
)
@click.option(
    "--workers",
    type=Parsed("N", _workers),
    default="1",
    show_default=True,
    help="Processes that move the bytes; auto means one per CPU.",
)
@limit_options
@click.option(
    "-v",
    "--v",
    "verbosity",
    type=Parsed("N", _verbosity),
    default="0",
    help="Verbosity: from 2 on a line per connection.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def local(
    paths: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
    services: tuple[tuple[ServicePort, tuple[HostPort, ...]], ...],
    endpoints: tuple[tuple[PortReference, tuple[HostPort, ...]], ...],
    namespaces: tuple[str, ...],
    only: tuple[str, ...],
    listen_addresses: tuple[str, ...],
    port_map: tuple[tuple[PortReference, int], ...],
    auto_ports: bool,
    keep_going: bool,
    wake_scale: bool,
    udp_timeout: float,
    drain_timeout: float,
    workers: int,
    verbosity: int,
    log_format: LogFormat,
    **limits: Any,
) -> None:
    """Serve Kubernetes services on local ports, without root, from files or from a cluster.

    Options may be repeated.
    """
    is_from_cluster = kubeconfig is not None or context is not None
    if not (paths or services or is_from_cluster):
        raise click.UsageError(
            "nothing to serve: give a file with -f, a service with --service, or a cluster with --kubeconfig"
        )
    if paths and is_from_cluster:
        raise click.UsageError("services come from files (-f) or from a cluster (--kubeconfig), not from both")
    if wake_scale and not is_from_cluster:
        raise click.UsageError("--wake-scale: there is nothing to scale without a cluster (--kubeconfig)")
    _refuse_repeated("--service", (f"{port.name} ({port.name.protocol})" for port, _ in services))
    _refuse_repeated("--endpoints", (str(reference) for reference, _ in endpoints))
    _refuse_repeated("--port-map", (str(reference) for reference, _ in port_map))
    _refuse_overlapping(listen_addresses)
    set_up_logging(verbosity, log_format)
    for warning in filter(None, (raise_descriptor_limit(), backlog_warning(limits["listen_backlog"]))):
        _log.warning(warning)
    options = LocalOptions(
        listen_addresses=tuple(dict.fromkeys(listen_addresses)),
        port_map=dict(port_map),
        services=dict(services),
        endpoints=dict(endpoints),
        namespaces=namespaces,
        only=only,
        auto_ports=auto_ports,
        keep_going=keep_going,
        drain_timeout_s=drain_timeout,
        settings=DataPlaneSettings(udp_idle_timeout_s=udp_timeout, workers=workers, **limits),
    )
    source: SnapshotSource = FileSource(paths) if paths else NoSource()
    if is_from_cluster:
        source = _cluster_source(kubeconfig or "", context or "", namespaces, wake_scale, limits["hold_timeout_s"])
    run_until_stopped(LocalProxy(options, source).run(print_table))


def _cluster_source(
    kubeconfig: str, context: str, namespaces: tuple[str, ...], scales: bool, hold_timeout_s: float
) -> SnapshotSource:
    """Return the source that follows a cluster. Only here is the Kubernetes client loaded, which takes a while."""
    from userspace_proxy.sources.cluster import ClusterSource
    from userspace_proxy.sources.kubeconfig import load_access

    return ClusterSource(
        load_access(kubeconfig, context=context), namespaces, scales=scales, hold_timeout_s=hold_timeout_s
    )


def print_table(rows: Sequence[Row]) -> None:
    """Print what is served, and what is not, to stdout, with an empty line at the end.

    Services do not depend on somebody reading that: where it cannot be written, a warning says so.
    """
    try:
        _print(rows)
    except OSError as error:
        _log.warning("the table could not be written to stdout: %s", error.strerror)
        with open(os.devnull, "wb") as nowhere:  # what stdout still holds goes there at the end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _print(rows: Sequence[Row]) -> None:
    lines = [_COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for row in rows:
        for failure in row.failures:
            print(f"{row.service_port.name} ({row.service_port.protocol}): {failure}")
    print(flush=True)


def _cells(row: Row) -> tuple[str, ...]:
    port = row.service_port
    return (
        str(port.name),
        str(port.protocol),
        ", ".join(map(str, row.addresses)) or "not served",
        _endpoints_text(port),
        "none" if port.session_affinity_s is None else f"ClientIP {format_duration(port.session_affinity_s)}",
    )


def _endpoints_text(port: ServicePort) -> str:
    shown = [str(endpoint) for endpoint in port.endpoints[:_SHOWN_ENDPOINTS]]
    more = len(port.endpoints) - len(shown)
    if port.is_idled:
        return "none: the first client asks for pods"
    if not shown:
        return "none: connections are closed" if port.protocol is L4Protocol.TCP else "none: datagrams are dropped"
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
