"""Values of click's options that functions of ours read, whose ConfigErrors become click's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from userspace_proxy.core.durations import parse_duration
from userspace_proxy.core.errors import ConfigError

Value = TypeVar("Value")


class Parsed(click.ParamType[Value]):
    """A value that is read by `parse`. `name` is what stands for it in `--help`."""

    def __init__(self, name: str, parse: Callable[[str], Value]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Value:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def positive_duration(text: str) -> float:
    """Return the seconds of a Go duration. Raises ConfigError, also where it is not greater than 0."""
    seconds = parse_duration(text)
    if seconds <= 0:
        raise ConfigError("must be greater than 0")
    return seconds


def not_negative_duration(text: str) -> float:
    """Return the seconds of a Go duration. Raises ConfigError, also where it is less than 0."""
    seconds = parse_duration(text)
    if seconds < 0:
        raise ConfigError("must not be negative")
    return seconds
