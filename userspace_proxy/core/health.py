"""When this proxy and its node count as healthy, and what /healthz, /livez and a service's health check say about it.

The rules are kube-proxy's: the proxy is unhealthy when the oldest change that is not applied has waited for two sync
periods; on /healthz the node counts, too. `now` is monotonic seconds throughout, so a step of the wall clock makes
nobody unhealthy; `wall_now`, seconds since the epoch, is for showing times only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from userspace_proxy.core.model import IPFamily, Snapshot

_NEVER = "0001-01-01T00:00:00Z"  # how Go writes a time that was not set
_FAMILY_NAME = {IPFamily.IPV4: "IPv4", IPFamily.IPV6: "IPv6"}


@dataclass(slots=True)
class _Family:
    last_updated: float | None = None
    oldest_pending: float | None = None


class ProxyHealth:
    """What has been queued and applied, by address family, and whether the node should get traffic.

    `is_node_eligible` is None while the node is not known, which counts as not eligible.
    """

    def __init__(self, sync_period_s: float) -> None:
        self.is_node_eligible: bool | None = None
        self._limit_s = 2 * sync_period_s
        self._families: dict[IPFamily, _Family] = {}

    def queued(self, family: IPFamily, *, now: float) -> None:
        """A change has arrived that is not applied yet."""
        known = self._families.setdefault(family, _Family())
        if known.oldest_pending is None:
            known.oldest_pending = now

    def updated(self, family: IPFamily, *, now: float) -> None:
        """All changes that had arrived are applied."""
        self._families[family] = _Family(last_updated=now)

    def is_healthy(self, *, now: float) -> bool:
        """Tell whether no change has waited too long. A proxy that starts is healthy."""
        return all(self._is_in_time(family, now) for family in self._families.values())

    def healthz(self, *, now: float, wall_now: float) -> HealthAnswer:
        """Return the answer of /healthz: whether traffic should come here."""
        is_eligible = bool(self.is_node_eligible)
        return self._answer(is_eligible and self.is_healthy(now=now), {"nodeEligible": is_eligible}, now, wall_now)

    def livez(self, *, now: float, wall_now: float) -> HealthAnswer:
        """Return the answer of /livez: whether this process does its work, whatever becomes of the node."""
        return self._answer(self.is_healthy(now=now), {}, now, wall_now)

    def _is_in_time(self, family: _Family, now: float) -> bool:
        return family.oldest_pending is None or now - family.oldest_pending < self._limit_s

    def _answer(self, is_ok: bool, node: Mapping[str, bool], now: float, wall_now: float) -> HealthAnswer:
        def shown(moment: float | None) -> str:
            return _NEVER if moment is None else rfc3339(wall_now - (now - moment))

        updates = [each.last_updated for each in self._families.values() if each.last_updated is not None]
        document: dict[str, object] = {
            "lastUpdated": shown(now if is_ok else max(updates, default=None)),
            "currentTime": shown(now),
            **node,
            "healthy": self.is_healthy(now=now),
        }
        if self._families:
            document["status"] = {
                _FAMILY_NAME[family]: {
                    "lastUpdated": shown(known.last_updated),
                    "healthy": self._is_in_time(known, now),
                }
                for family, known in sorted(self._families.items())
            }
        return HealthAnswer(200 if is_ok else 503, document)


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """An HTTP status and the JSON document that goes with it."""

    status: int
    document: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ServiceHealthCheck:
    """What a load balancer outside is told on a service's `healthCheckNodePort`."""

    port: int
    local_endpoints: int


ServiceKey = tuple[str, str]
"""The namespace and the name of a service."""


def service_health_checks(snapshot: Snapshot) -> dict[ServiceKey, ServiceHealthCheck]:
    """Return the health checks of all services that ask for one. An address counts once, however many ports it has."""
    ports: dict[ServiceKey, int] = {}
    addresses: dict[ServiceKey, set[str]] = {}
    for name, service_port in snapshot.service_ports.items():
        if service_port.health_check_node_port:
            key = (name.namespace, name.service)
            outside = service_port.external_endpoints
            local = service_port.endpoints if outside is None else outside
            ports[key] = service_port.health_check_node_port
            addresses.setdefault(key, set()).update(each.address for each in local)
    return {key: ServiceHealthCheck(port, len(addresses[key])) for key, port in ports.items()}


def service_health_answer(key: ServiceKey, local_endpoints: int, *, is_proxy_healthy: bool) -> HealthAnswer:
    """Return the answer of a service's health check. Traffic should come where there are endpoints to take it."""
    namespace, name = key
    return HealthAnswer(
        200 if local_endpoints and is_proxy_healthy else 503,
        {
            "service": {"namespace": namespace, "name": name},
            "localEndpoints": local_endpoints,
            "serviceProxyHealthy": is_proxy_healthy,
        },
    )


def rfc3339(wall_s: float) -> str:
    """Return seconds since the epoch as RFC 3339 in UTC, with as many digits of a second as are not zero."""
    moment = datetime.fromtimestamp(wall_s, UTC)
    fraction = f"{moment.microsecond:06}".rstrip("0")
    return f"{moment:%Y-%m-%dT%H:%M:%S}{'.' + fraction if fraction else ''}Z"
