"""The limits and time-outs of TCP and of waking as options of `local`. The daemon's are in its table of flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from userspace_proxy.cli.parsed import Parsed, not_negative_duration, positive_duration
from userspace_proxy.core.durations import format_duration
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.limits import MAX_BACKLOG, MAX_USER_TIMEOUT_S
from userspace_proxy.dataplane.settings import DIAL_LADDER_S

Command = TypeVar("Command", bound=Callable[..., Any])

_COUNT = click.IntRange(min=0, max=2**31 - 1)


def _user_timeout(text: str) -> float:
    seconds = not_negative_duration(text)
    if seconds > MAX_USER_TIMEOUT_S:
        raise ConfigError(f"must be less than or equal to {format_duration(MAX_USER_TIMEOUT_S)}")
    return seconds


def _ladder(text: str) -> tuple[float, ...]:
    limits = []
    for number, part in enumerate(text.split(","), 1):
        try:
            limits.append(positive_duration(part.strip()))
        except ConfigError as error:
            raise ConfigError(f"time limit {number} ({part.strip()}): {error}") from None
    return tuple(limits)


_OPTIONS = (
    click.option(
        "--max-connections",
        type=_COUNT,
        default=0,
        metavar="N",
        help="TCP connections at once, beyond which clients wait to be accepted; 0, the default, means no limit.",
    ),
    click.option(
        "--max-connections-per-service-port",
        type=_COUNT,
        default=0,
        metavar="N",
        help="The same for each service port.",
    ),
    click.option(
        "--listen-backlog",
        type=click.IntRange(min=1, max=MAX_BACKLOG),
        default=4096,
        metavar="N",
        show_default=True,
        help="TCP connections that may wait to be accepted; the system has a maximum of its own (net.core.somaxconn).",
    ),
    click.option(
        "--tcp-idle-timeout",
        "tcp_idle_timeout_s",
        type=Parsed("DURATION", not_negative_duration),
        default="0s",
        help="How long a TCP connection lasts on which nothing moves; 0, the default, means forever.",
    ),
    click.option(
        "--half-close-timeout",
        "half_close_timeout_s",
        type=Parsed("DURATION", positive_duration),
        default="1h",
        show_default=True,
        help="How long a half-closed TCP connection lasts on which nothing moves.",
    ),
    click.option(
        "--tcp-user-timeout",
        "tcp_user_timeout_s",
        type=Parsed("DURATION", _user_timeout),
        default="0s",
        help="How long a TCP connection lasts whose peer acknowledges or takes nothing; 0, the default, leaves that to "
        "the system.",
    ),
    click.option(
        "--dial-ladder",
        "dial_ladder_s",
        type=Parsed("DURATION,...", _ladder),
        default=",".join(map(format_duration, DIAL_LADDER_S)),
        show_default=True,
        help="Time limits of the attempts to reach an endpoint.",
    ),
    click.option(
        "--unidling-max-connections",
        "max_held",
        type=click.IntRange(min=1, max=2**31 - 1),
        default=16,
        metavar="N",
        show_default=True,
        help="Clients that are held per idled service port.",
    ),
    click.option(
        "--unidling-hold-timeout",
        "hold_timeout_s",
        type=Parsed("DURATION", positive_duration),
        default="2m",
        show_default=True,
        help="How long they are held.",
    ),
)


def limit_options(command: Command) -> Command:
    """Give a command these options. Their names in the command are those of DataPlaneSettings."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
