"""Arguments to flags and their values, by the rules of pflag, which kube-proxy's command line follows.

`--flag=value` and `--flag value`; a flag for yes or no is true by itself and takes a value behind `=` only; `-v2`,
`-v=2` and `-v 2`; `_` is `-`; `--` ends the flags. The last of several values counts, except where they add up.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from userspace_proxy.cli import PROGRAM
from userspace_proxy.cli.flag_values import BOOLS, read_value
from userspace_proxy.cli.flags import FLAGS, SHORTHANDS, Flag, Kind
from userspace_proxy.core.errors import ConfigError, UsageError

_ADD_UP = (Kind.LIST, Kind.LEVELS, Kind.GATES)


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as it was given, its value still text."""

    flag: Flag
    text: str


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the value of each flag that is given, by name. Raises UsageError."""
    values = dict[str, Any]()
    strays = list[str]()
    before: Given | None = None
    for given in _flags(arguments):
        if isinstance(given, str):
            strays.append(given)
            if given in BOOLS and before and before.flag.kind is Kind.BOOL:
                hint = f"; the value of {before.flag.spelled} belongs behind a =: {before.flag.spelled}={given}"
                raise UsageError(_stray([given]) + hint)
            continue
        before, name = given, given.flag.name
        value = _value(given)
        if given.flag.kind in _ADD_UP and name in values:
            value = {**values[name], **value} if isinstance(value, dict) else (*values[name], *value)
        values[name] = value
    if strays:
        raise UsageError(_stray(strays))
    return values


def _flags(arguments: Sequence[str]) -> Iterator[Given | str]:
    """Yield the flags, and what is none, in order."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield from filter(None, rest)
        elif argument.startswith("--"):
            yield _long(argument, rest)
        elif argument.startswith("-") and argument != "-":
            yield from _short(argument, rest)
        elif argument:
            yield argument


def _long(argument: str, rest: Iterator[str]) -> Given:
    name, equals, text = argument[2:].partition("=")
    name = name.replace("_", "-")
    if not name or name.startswith("-"):
        raise UsageError(f"bad flag syntax: {argument}")
    flag = FLAGS.get(name)
    if flag is None:
        raise UsageError(f"unknown flag: --{name}" + _nearest(name))
    if not equals:
        text = _next(flag, rest, f"--{name}")
    return Given(flag, text)


def _short(argument: str, rest: Iterator[str]) -> Iterator[Given]:
    """Yield the flags of one argument: letters, the last of which may be followed by its value."""
    letters = argument[1:]
    while letters:
        flag = SHORTHANDS.get(letters[0])
        if flag is None:
            name = letters.partition("=")[0].replace("_", "-")
            hint = f"; with two dashes: --{name}" if name in FLAGS else ""
            raise UsageError(f"unknown shorthand flag: '{letters[0]}' in {argument}{hint}")
        letter, letters = letters[0], letters[1:]
        if letters.startswith("="):
            text, letters = letters[1:], ""
        elif flag.kind.bare_value is None and letters:
            text, letters = letters, ""
        else:
            text = _next(flag, rest, f"'{letter}' in {argument}")
        yield Given(flag, text)


def _next(flag: Flag, rest: Iterator[str], spelled: str) -> str:
    if flag.kind.bare_value is not None:
        return flag.kind.bare_value
    try:
        return next(rest)
    except StopIteration:
        raise UsageError(f"flag needs an argument: {spelled}") from None


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, FLAGS, n=1)
    return f"; did you mean --{near[0]}?" if near else ""


def _stray(arguments: list[str]) -> str:
    return f'"{PROGRAM}" does not take any arguments, got {json.dumps(arguments, ensure_ascii=False)}'


def _value(given: Given) -> Any:
    try:
        return read_value(given.flag, given.text)
    except ValueError as error:
        reason = str(error)
    except ConfigError as error:
        reason = error.reason
    spelled = f"-{given.flag.shorthand}, {given.flag.spelled}" if given.flag.shorthand else given.flag.spelled
    raise UsageError(f'invalid argument {json.dumps(given.text, ensure_ascii=False)} for "{spelled}" flag: {reason}')
