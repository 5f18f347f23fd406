"""What the data path has counted, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from userspace_proxy.core.model import Endpoint, ServicePortName


@dataclass(frozen=True, slots=True)
class EndpointCounters:
    """Totals of one endpoint since it became one, and what is open now. Bytes are payload."""

    connections: int = 0
    open_connections: int = 0
    dial_failures: int = 0
    sessions: int = 0
    open_sessions: int = 0
    bytes_to_endpoint: int = 0
    bytes_to_client: int = 0


@dataclass(frozen=True, slots=True)
class Counters:
    """A reading of all counters of a data path at one moment."""

    endpoints: Mapping[ServicePortName, Mapping[Endpoint, EndpointCounters]]
    open_connections: int = 0
    open_sessions: int = 0
    accept_errors: int = 0
    dropped_datagrams: int = 0
    evicted_sessions: int = 0
