"""Every exception the package raises on purpose, named by whose fault it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from userspace_proxy.core.model import ServicePortName


class ProxyError(Exception):
    """Base of all errors of this package."""


class ConfigError(ProxyError):
    """What the user wrote cannot be used. The message names the place and the reason.

    `where` is as exact as is known: `FILE:LINE`, a flag's name, or an object's name.
    """

    def __init__(self, reason: str, *, where: str = "", subject: str = "", field: str = "") -> None:
        self.reason, self.where, self.subject, self.field = reason, where, subject, field
        super().__init__(": ".join(part for part in (where, subject, field, reason) if part))


class NoEndpoints(ProxyError):
    """The service port has no endpoint that could be picked. The text goes on after "as"."""

    def __init__(self, reason: str = "it has no endpoints") -> None:
        super().__init__(reason)


class ListenFailed(ProxyError):
    """The operating system refused a listening socket. `errno_name` is the symbolic code, such as EADDRINUSE."""

    def __init__(self, address: str, reason: str, errno_name: str) -> None:
        self.address, self.reason, self.errno_name = address, reason, errno_name
        super().__init__(f"cannot listen on {address}: {reason}")


class PortsExhausted(ProxyError):
    """Every port of the proxy port range is taken."""


class PortsRefused(ProxyError):
    """Service ports that cannot be listened on, all in one message, with options that would help.

    `suggestions` are values for `--port-map` that move them to free ports.
    """

    def __init__(
        self,
        failures: Mapping[ServicePortName, tuple[ListenFailed, ...]],
        suggestions: Sequence[str],
    ) -> None:
        self.failures, self.suggestions = failures, suggestions
        lines = [f"{len(failures)} service port{'s' if len(failures) > 1 else ''} cannot be served:"]
        lines += [
            f"  {name} ({name.protocol}) on {failure.address}: {failure.reason}"
            for name, of_port in failures.items()
            for failure in of_port
        ]
        if any(failure.errno_name == "EACCES" for of_port in failures.values() for failure in of_port):
            lines.append("Ports below 1024 need root or the capability CAP_NET_BIND_SERVICE.")
        if suggestions:
            lines.append(
                "Give them other ports (--auto-ports chooses such by itself, --keep-going serves only the rest):"
            )
            lines.append("  " + " ".join(f"--port-map {suggestion}" for suggestion in suggestions))
        super().__init__("\n".join(lines))
