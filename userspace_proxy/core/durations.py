"""Durations as Go writes them, such as `1h30m0s` and `250ms`, in and out. Seconds elsewhere."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Self

from userspace_proxy.core.errors import ConfigError

_UNIT_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_MAX_NS = 2**63 - 1


class Duration(float):
    """Seconds that print as Go's durations do: `str(Duration(5400))` is `1h30m0s`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a Go duration. Raises ConfigError."""
        return cls(parse_duration(text))

    def __str__(self) -> str:
        return format_duration(self)

    def __repr__(self) -> str:
        return f"Duration({float(self)!r})"


def parse_duration(text: str) -> float:
    """Return the seconds that a Go duration stands for. Raises ConfigError, also for a number without a unit."""
    unsigned = text[1:] if text[:1] in ("+", "-") else text
    if unsigned == "0":
        return 0.0
    parts = _PART.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        hint = "; it needs a unit" if unsigned.isdigit() else ""
        raise ConfigError(f"{text!r} is not a duration such as 250ms, 30s or 1h30m{hint}")
    nanoseconds = sum(int(Decimal(number) * _UNIT_NS[unit]) for number, unit in parts)
    if nanoseconds > _MAX_NS:
        raise ConfigError(f"{text!r} is too long a duration")
    return (-nanoseconds if text[0] == "-" else nanoseconds) / 10**9


def format_duration(seconds: float) -> str:
    """Return the duration as Go prints it: `1h30m0s`, `1.5s`, `250ms`, `0s`."""
    nanoseconds = round(abs(seconds) * 10**9)
    sign = "-" if seconds < 0 and nanoseconds else ""
    if nanoseconds == 0:
        return "0s"
    for unit, limit in (("ns", 10**3), ("µs", 10**6), ("ms", 10**9)):
        if nanoseconds < limit:
            return f"{sign}{_decimal(nanoseconds, _UNIT_NS[unit])}{unit}"
    minutes, rest = divmod(nanoseconds, _UNIT_NS["m"])
    hours, minutes = divmod(minutes, 60)
    large = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{sign}{large}{_decimal(rest, _UNIT_NS['s'])}s"


def _decimal(amount: int, unit: int) -> str:
    text = format(Decimal(amount) / unit, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
