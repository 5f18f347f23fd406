"""Scenario files: YAML to `Scenario`, and every error with its file, line and field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import yaml

from userspace_proxy.bench.addresses import parse_address
from userspace_proxy.bench.analysis.thresholds import Threshold
from userspace_proxy.bench.quantities import number_of_quantity, quantity_from_text
from userspace_proxy.bench.scenario import (
    Add,
    Address,
    BackendEvent,
    Churn,
    Command,
    Direct,
    Download,
    FreezeTarget,
    Http,
    Remove,
    Run,
    Scenario,
    Test,
    Upload,
)
from userspace_proxy.core.errors import ConfigError

_PATH_STEP = re.compile(r"\.([A-Za-z0-9_-]+)|\[(\d+)\]|\[\.\.\.\]")
_MESSAGE = re.compile(r"(?P<reason>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.+)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(.+)`")

Path_ = tuple[str | int, ...]


def read_scenario(path: str) -> Scenario:
    """Return the scenario of a file. Raises ConfigError with file, line and field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(reason, where=path) from None
    return scenario_from_yaml(text, path)


def scenario_from_yaml(text: str, path: str = "scenario") -> Scenario:
    """Return the scenario of a YAML text; an empty one is the default. Raises ConfigError."""
    lines: dict[Path_, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree: Any = {} if node is None else _plain(node, (), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(error.problem or "is not YAML", where=f"{path}:{line}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {error}", where=path) from None
    try:
        scenario = msgspec.convert(tree, Scenario, dec_hook=quantity_from_text)
    except msgspec.ValidationError as error:
        raise _located(str(error), path, lines) from None
    for at, reason in problems(scenario):
        raise ConfigError(reason, where=f"{path}:{_line(at, lines)}", field=_dotted(at))
    return with_names(scenario)


def scenario_as_data(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario as plain data in base units, as it is kept with the results."""
    data: dict[str, Any] = msgspec.to_builtins(scenario, enc_hook=number_of_quantity)
    return data


def template() -> str:
    """Return a commented scenario file that validates and says what the defaults are."""
    return files("userspace_proxy.bench").joinpath("template.yaml").read_text(encoding="utf-8")


def with_names(scenario: Scenario) -> Scenario:
    """Return the scenario with a name for each target, its kind where it has none."""
    named = tuple(msgspec.structs.replace(target, name=target.name or target.kind) for target in scenario.targets)
    return msgspec.structs.replace(scenario, targets=named)


def problems(scenario: Scenario) -> Iterator[tuple[Path_, str]]:
    """Yield what the types cannot say: where it stands, and what is wrong."""
    names = [target.name or target.kind for target in scenario.targets]
    for index, (target, name) in enumerate(zip(scenario.targets, names, strict=True)):
        if name in names[:index]:
            yield ("targets", index, "name"), f"there are two targets called {name!r}: give each a name of its own"
        if isinstance(target, Address):
            yield from _address_problems(scenario, target, ("targets", index))
        if (
            isinstance(target, Command)
            and target.reload != "none"
            and "{backends_file}" not in " ".join(target.command)
        ):
            yield ("targets", index, "command"), "with `reload` it must be given {backends_file}"
    for index, address in enumerate(scenario.backends.addresses):
        if not _is_address(address):
            yield ("backends", "addresses", index), f"{address!r} is not IP:PORT"
    needed = scenario.backends.count + scenario.backends.spare
    if scenario.backends.addresses and len(scenario.backends.addresses) != needed:
        yield ("backends", "addresses"), f"needs {needed} addresses, one for each backend"
    yield from _threshold_problems(scenario.thresholds, ("thresholds",))
    test_names = [test.name for test in scenario.tests]
    for index, test in enumerate(scenario.tests):
        if test.name in test_names[:index]:
            yield ("tests", index, "name"), f"there are two tests called {test.name!r}"
        yield from _test_problems(scenario, test, ("tests", index))


def _test_problems(scenario: Scenario, test: Test, at: Path_) -> Iterator[tuple[Path_, str]]:
    yield from _threshold_problems(test.thresholds, (*at, "thresholds"))
    duration = scenario.duration if test.load.duration is None else test.load.duration
    if duration <= 0:
        yield (*at, "load", "duration"), "must be greater than 0"
    has_own = any(isinstance(target, Address) and target.own_backends for target in scenario.targets)
    for index, event in enumerate(test.events):
        place = (*at, "events", index)
        if event.at > duration:
            yield (*place, "at"), f"is after the end of the test ({duration})"
        if isinstance(event, BackendEvent | Churn):
            known = scenario.backends.count + scenario.backends.spare
            if event.backend > known:
                yield (*place, "backend"), f"there are only {known} backends"
        if has_own and not isinstance(event, FreezeTarget | Run):
            yield (*place, "kind"), "targets with own_backends allow only `run` and `freeze_target`"
        if isinstance(event, Remove | Add | Churn):
            deaf = [t.name or t.kind for t in scenario.targets if not hears_of_endpoints(t) and t.judged]
            if deaf:
                yield (*place, "kind"), f"target {deaf[0]!r} cannot be told of endpoints (see `reload`)"
    if isinstance(test.load, Http | Download | Upload) and test.load.engine != "python":
        if isinstance(test.load, Http) and test.load.rate is not None:
            yield (*at, "load", "rate"), "wrk has no open loop: use engine: python"
        if test.events:
            yield (*at, "events"), f"events need engine: python, as {test.load.engine} tells no times"


def hears_of_endpoints(target: object) -> bool:
    """Tell whether the target can be told that endpoints have come or gone."""
    return not isinstance(target, Direct | Address) and not (isinstance(target, Command) and target.reload == "none")


def _address_problems(scenario: Scenario, target: Address, at: Path_) -> Iterator[tuple[Path_, str]]:
    for name in ("address", "udp_address"):
        text = getattr(target, name)
        if (text or name == "address") and not _is_address(text, names_allowed=True):
            yield (*at, name), f"{text!r} is not HOST:PORT"
    if not target.own_backends and not scenario.backends.addresses:
        yield at, "it must balance over our backends at fixed `backends.addresses`, or have `own_backends: true`"
    try:
        groups = re.compile(target.identify).groups
    except re.error as error:
        yield (*at, "identify"), f"is not a regular expression: {error}"
    else:
        if groups != 1:
            yield (*at, "identify"), f"needs exactly one group, has {groups}"


def _threshold_problems(thresholds: tuple[str, ...], at: Path_) -> Iterator[tuple[Path_, str]]:
    for index, text in enumerate(thresholds):
        try:
            Threshold.parse(text)
        except ConfigError as error:
            yield (*at, index), error.reason


def _is_address(text: str, *, names_allowed: bool = False) -> bool:
    try:
        parse_address(text, names_allowed=names_allowed)
    except ConfigError:
        return False
    return True


# YAML with line numbers


def _plain(node: yaml.Node, path: Path_, lines: dict[Path_, int]) -> Any:
    """Return the node as plain data, and note the line of each path."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, index), lines) for index, item in enumerate(node.value)]
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    finally:
        loader.dispose()
    # A time such as 1:30 or a date is text to us.
    return value if isinstance(value, str | bool | int | float | None) else node.value


def _plain_mapping(node: yaml.MappingNode, path: Path_, lines: dict[Path_, int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if key in result:
            raise yaml.MarkedYAMLError(problem=f"{key!r} stands here twice", problem_mark=key_node.start_mark)
        lines[(*path, key)] = key_node.start_mark.line + 1
        result[key] = _plain(value_node, (*path, key), lines)
    return result


def _located(message: str, path: str, lines: dict[Path_, int]) -> ConfigError:
    """Return msgspec's error with the line of the field it is about."""
    match = _MESSAGE.fullmatch(message)
    assert match
    reason, at = match["reason"], _parse_path(match["path"] or "")
    unknown, missing = _UNKNOWN_FIELD.fullmatch(reason), _MISSING_FIELD.fullmatch(reason)
    if unknown:
        at, reason = (*at, unknown[1]), "there is no such field here"
    elif missing:
        at, reason = (*at, missing[1]), "is required"
    else:
        reason = reason[:1].lower() + reason[1:]
    return ConfigError(reason, where=f"{path}:{_line(at, lines)}", field=_dotted(at))


def _parse_path(text: str) -> Path_:
    return tuple(
        int(index) if index else name for name, index in (match.groups() for match in _PATH_STEP.finditer(text))
    )


def _line(at: Path_, lines: dict[Path_, int]) -> int:
    while at and at not in lines:
        at = at[:-1]
    return lines.get(at, 1)


def _dotted(at: Path_) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).lstrip(".")
