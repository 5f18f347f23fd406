"""kube-proxy's userspace mode on asyncio and uvloop. The public Python API is what `__all__` names."""

from userspace_proxy.core.balancer import Balancer, RoundRobin
from userspace_proxy.core.counters import Counters, EndpointCounters, LimitCounters, LiveCounters, WakingCounters
from userspace_proxy.core.errors import ConfigError, ListenFailed, NoEndpoints, ProxyError
from userspace_proxy.core.model import Endpoint, L4Protocol, ListenAddress, ServicePort, ServicePortName, Snapshot
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.proxy import Proxy

__version__ = "0.1.0"

__all__ = [
    "Balancer",
    "ConfigError",
    "Counters",
    "DataPlaneSettings",
    "Endpoint",
    "EndpointCounters",
    "L4Protocol",
    "LimitCounters",
    "ListenAddress",
    "ListenFailed",
    "LiveCounters",
    "NoEndpoints",
    "Proxy",
    "ProxyError",
    "RoundRobin",
    "ServicePort",
    "ServicePortName",
    "Snapshot",
    "WakingCounters",
]
