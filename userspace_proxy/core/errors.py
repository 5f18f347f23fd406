"""Every exception the package raises on purpose, named by whose fault it is."""

from __future__ import annotations


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
