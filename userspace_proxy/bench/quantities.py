"""Quantities as people write them (`250ms`, `1000/s`, `64KiB`), kept as numbers of one base unit each."""

from __future__ import annotations

import re
from typing import Any

from userspace_proxy.core.durations import format_duration, parse_duration
from userspace_proxy.core.errors import ConfigError

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*/\s*(s|m)")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(B|kB|KB|KiB|MB|MiB|GB|GiB)?")
_SIZE_UNITS = {
    None: 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "KiB": 2**10,
    "MB": 10**6,
    "MiB": 2**20,
    "GB": 10**9,
    "GiB": 2**30,
}
_MAX_RATE = 10_000_000


class Seconds(float):
    """A duration, not negative, written as in Go: `250ms`, `1m30s`."""

    @classmethod
    def parse(cls, text: object) -> Seconds:
        """Return the duration. Raises ConfigError, also for a number without a unit."""
        seconds = parse_duration(str(text))
        if seconds < 0:
            raise ConfigError("must not be negative")
        return cls(seconds)

    def __str__(self) -> str:
        return format_duration(self)


class Rate(float):
    """How often a second, more than never: `1000/s` or `30/m`."""

    @classmethod
    def parse(cls, text: object) -> Rate:
        """Return the rate. Raises ConfigError."""
        match = _RATE.fullmatch(str(text).strip())
        if not match:
            raise ConfigError(f"{text!r} is not a rate such as 1000/s or 30/m")
        rate = cls(float(match[1]) / (60 if match[2] == "m" else 1))
        if not 0 < rate <= _MAX_RATE:
            raise ConfigError(f"{text!r} is not between 0 and {_MAX_RATE}/s")
        return rate

    def __str__(self) -> str:
        return f"{float(self):g}/s"


class Size(int):
    """A number of bytes: `64`, `64B`, `1KiB`, `1MB`."""

    @classmethod
    def parse(cls, text: object) -> Size:
        """Return the size. Raises ConfigError."""
        match = _SIZE.fullmatch(str(text).strip())
        if not match or isinstance(text, bool):
            raise ConfigError(f"{text!r} is not a size such as 64, 1KiB or 1MB")
        return cls(float(match[1]) * _SIZE_UNITS[match[2]])


def quantity_from_text(kind: type, value: object) -> object:
    """Return the value as msgspec's hook for types of ours does. Raises ValueError with what is wrong."""
    if kind in (Seconds, Rate, Size):
        try:
            return kind.parse(value)
        except ConfigError as error:
            raise ValueError(error.reason) from None
    raise NotImplementedError(kind)


def quantity_from_number(kind: type, value: Any) -> object:
    """Return the quantity that a number in base units stands for, as in JSON between our own processes."""
    if kind in (Seconds, Rate, Size):
        return kind(value)
    raise NotImplementedError(kind)


def number_of_quantity(value: object) -> object:
    """Return the number to encode for a quantity: msgspec's hook for the other direction."""
    if isinstance(value, Size):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise NotImplementedError(type(value))
