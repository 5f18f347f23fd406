"""What operators and machines can ask this proxy over HTTP. Nothing can be changed but the verbosity of its log."""

from userspace_proxy.admin.health import health_server
from userspace_proxy.admin.monitoring import metrics_server
from userspace_proxy.admin.server import HttpServer
from userspace_proxy.admin.service_health import ServiceHealthServers

__all__ = ["HttpServer", "ServiceHealthServers", "health_server", "metrics_server"]
