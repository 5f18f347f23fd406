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


class UsageError(ConfigError):
    """The command line cannot be understood."""


class ConfigFileUpdated(ProxyError):
    """The configuration file has changed, which ends the process, as whoever started it starts it again."""

    def __init__(self) -> None:
        super().__init__("content of the proxy server's configuration file was updated")


class NoEndpoints(ProxyError):
    """The service port has no endpoint that could be picked. The text goes on after "as"."""

    def __init__(self, reason: str = "it has no endpoints") -> None:
        super().__init__(reason)


class ListenFailed(ProxyError):
    """The operating system refused a listening socket. `errno_name` is the symbolic code, such as EADDRINUSE."""

    def __init__(self, address: str, reason: str, errno_name: str) -> None:
        self.address, self.reason, self.errno_name = address, reason, errno_name
        super().__init__(f"cannot listen on {address}: {reason}")


class CredentialsFailed(ProxyError):
    """Who we are to the API server cannot be found out: a token file or a credential plugin failed."""


class ApiUnreachable(ProxyError):
    """The API server gave no answer, or stopped in the middle of one."""

    def __init__(self, server: str, reason: str) -> None:
        self.server, self.reason = server, reason
        super().__init__(f"the API server {server} cannot be reached: {reason}")


class ApiRefused(ProxyError):
    """The API server answered with an error. `status` is the HTTP status, also where it came inside a watch.

    `retry_after_s` is the time that the server asked us to wait, if it did.
    """

    def __init__(
        self, verb: str, resource: str, status: int, reason: str, *, retry_after_s: float | None = None
    ) -> None:
        self.verb, self.resource, self.status, self.reason = verb, resource, status, reason
        self.retry_after_s = retry_after_s
        super().__init__(f"cannot {verb} {resource}: {status} {reason}")


class StreamBroken(ProxyError):
    """What the API server sent is no list or watch event."""

    def __init__(self, verb: str, resource: str, reason: str) -> None:
        self.verb, self.resource, self.reason = verb, resource, reason
        super().__init__(f"cannot {verb} {resource}: {reason}")


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


class ServerFailed(ProxyError):
    """A server of ours that must be there cannot listen. `event_reason` is that of the Event that tells so."""

    def __init__(self, title: str, event_reason: str, cause: ListenFailed) -> None:
        self.title, self.event_reason, self.cause = title, event_reason, cause
        super().__init__(f"{title} failed: {cause}")


class CleanUpFailed(ProxyError):
    """Some rules could not be removed, or it is not known whether there are any."""

    def __init__(self, reasons: Sequence[Exception]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("encountered an error while tearing down rules: " + "; ".join(map(str, reasons)))


class RedirectFailed(ProxyError):
    """The kernel's rules could not be read or written. `command` is what was tried, `stderr` what it answered."""

    def __init__(self, command: str, stderr: str) -> None:
        self.command, self.stderr = command, stderr.strip()
        super().__init__(f"{command}: {self.stderr or 'failed without a word'}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.command, self.stderr)


class RuleNotUnderstood(RedirectFailed):
    """A rule of ours was not understood: the fault is ours, or the host lacks an extension. `line` is its text."""

    def __init__(self, command: str, stderr: str, line: str) -> None:
        self.line = line
        super().__init__(command, stderr)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.command, self.stderr, self.line)


class KernelRefused(RedirectFailed):
    """The kernel refused a block of rules. Which rule it was is not known for certain."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors that an exception group holds, at any depth; another error by itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
