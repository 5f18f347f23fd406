"""What a changed configuration means for a process that runs: which fields it can take up, and which it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from userspace_proxy.core.config import KubeProxyConfiguration, field_at, fields_of, with_field

APPLICABLE: Final = frozenset(
    {
        "clusterCIDR",
        "iptables.minSyncPeriod",
        "iptables.syncPeriod",
        "logging.format",
        "logging.verbosity",
        "nodePortAddresses",
        "udpIdleTimeout",
        "userspaceProxy.dialLadder",
        "userspaceProxy.halfCloseTimeout",
        "userspaceProxy.listenBacklog",
        "userspaceProxy.maxConnections",
        "userspaceProxy.maxConnectionsPerServicePort",
        "userspaceProxy.maxUdpSessions",
        "userspaceProxy.metricsEndpoints",
        "userspaceProxy.metricsPortLimit",
        "userspaceProxy.tcpIdleTimeout",
        "userspaceProxy.tcpUserTimeout",
        "userspaceProxy.unidlingHoldTimeout",
        "userspaceProxy.unidlingMaxConnections",
        "userspaceProxy.wake.scale",
    }
)
"""Fields whose values are looked up each time they are needed. All others were used once, at the start."""

WITHOUT_EFFECT: Final = (
    "detectLocal.",
    "detectLocalMode",
    "featureGates",
    "iptables.localhostNodePorts",
    "iptables.masqueradeAll",
    "iptables.masqueradeBit",
    "iptables.snatNodeInternalIP",
    "ipvs.",
    "logging.flushFrequency",
    "logging.options",
    "logging.vmodule",
    "nftables.",
    "showHiddenMetricsForVersion",
    "windowsRunAsService",
    "winkernel.",
)
"""Beginnings of the paths of what this mode does not use, so that a change is no reason for a restart."""


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """Paths of the fields that differ between two configurations."""

    applicable: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.applicable or self.needs_restart)


def changes(running: KubeProxyConfiguration, wanted: KubeProxyConfiguration) -> ConfigChanges:
    """Return what differs and has an effect."""
    before = dict(fields_of(running))
    changed = [
        path for path, value in fields_of(wanted) if value != before[path] and not path.startswith(WITHOUT_EFFECT)
    ]
    return ConfigChanges(
        tuple(path for path in changed if path in APPLICABLE),
        tuple(path for path in changed if path not in APPLICABLE),
    )


def taken_up(running: KubeProxyConfiguration, wanted: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Return the running configuration with what it can take up of the other."""
    for path in changes(running, wanted).applicable:
        running = with_field(running, path, field_at(wanted, path))
    return running
