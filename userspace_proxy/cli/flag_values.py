"""The text behind a flag as a value, in the forms that Go's flags take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from userspace_proxy.cli.flags import Flag, Kind
from userspace_proxy.core.config import VModule, choices_of
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.host_ports import is_address, parse_port_range, split_host_port

BOOLS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


def read_value(flag: Flag, text: str) -> Any:
    """Return the value that the text stands for. Raises ValueError or ConfigError, with the reason."""
    if flag.kind is Kind.WORDS:
        return _word(text, choices_of(flag.path))
    return _READERS[flag.kind](text)


def _bool(text: str) -> bool:
    try:
        return BOOLS[text]
    except KeyError:
        raise ValueError("it must be true or false") from None


def _int32(text: str) -> int:
    """Read a number as Go does, with the base in front: 0x10, 0b1, 0o7 and 017."""
    sign, digits = (text[0], text[1:]) if text[:1] in ("-", "+") else ("", text)
    if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        digits = f"0o{digits[1:]}"
    if not digits.isascii() or not digits[:1].isdigit():
        raise ValueError("it must be a whole number")
    try:
        number = int(f"{sign}{digits}", 0)
    except ValueError:
        raise ValueError("it must be a whole number") from None
    if not -(2**31) <= number < 2**31:
        raise ValueError("it must fit in 32 bits")
    return number


def _float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("it must be a number") from None
    if not abs(number) < float("inf"):
        raise ValueError("it must be a finite number")
    return number


def _ip(text: str) -> str:
    if text and not is_address(text):
        raise ValueError("it must be an IP address")
    return text


def _ip_port(text: str) -> str:
    if text and not is_address(text):
        try:
            split_host_port(text)
        except ValueError as error:
            raise ValueError(f"{error.args[0]}, or an IP address alone") from None
    return text


def _port_range(text: str) -> str:
    parse_port_range(text)
    return text


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _gates(text: str) -> dict[str, bool]:
    gates = dict[str, bool]()
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or value.strip() not in BOOLS:
            raise ValueError(f"{part} is not of the form name=true or name=false")
        gates[name.strip()] = BOOLS[value.strip()]
    return gates


def _level(text: str) -> int:
    level = _int32(text)
    if level < 0:
        raise ValueError("it must not be negative")
    return level


def _levels(text: str) -> tuple[VModule, ...]:
    levels = []
    for part in filter(None, text.split(",")):
        pattern, equals, level = part.partition("=")
        if not equals or not pattern:
            raise ValueError(f"{part} is not of the form pattern=level")
        levels.append(VModule(file_pattern=pattern, verbosity=_level(level)))
    return tuple(levels)


def _word(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ValueError(f"it must be one of {', '.join(choices)}")
    return text


def _workers(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return _int32(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def _version(text: str) -> str | bool:
    return BOOLS.get(text, text)


_READERS: Final[dict[Kind, Callable[[str], Any]]] = {
    Kind.BOOL: _bool,
    Kind.VERSION: _version,
    Kind.STRING: str,
    Kind.INT32: _int32,
    Kind.FLOAT: _float,
    Kind.DURATION: Duration.parse,
    Kind.DURATIONS: lambda text: tuple(Duration.parse(part) for part in text.split(",")),
    Kind.IP: _ip,
    Kind.IP_PORT: _ip_port,
    Kind.PORT_RANGE: _port_range,
    Kind.LIST: _list,
    Kind.GATES: _gates,
    Kind.LEVEL: _level,
    Kind.LEVELS: _levels,
    Kind.WORKERS: _workers,
}
