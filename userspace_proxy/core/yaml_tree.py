"""YAML or JSON text as plain values, with the line of each field and what stands there twice.

Values are what kube-proxy's reader makes of them: a date is text, and so is `1:30`; null is the same as nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from userspace_proxy.core.errors import ConfigError

MAX_NODES: Final = 20_000
"""More than any configuration needs. Aliases let a small file ask for billions."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's way of setting them)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(slots=True)
class Tree:
    """What the first document of a file holds. Paths look like `iptables.syncPeriod` and `nodePortAddresses[0]`."""

    origin: str
    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)
    has_more: bool = False
    """Whether further documents follow, which kube-proxy does not look at."""

    def where(self, path: str = "") -> str:
        """Return `FILE:LINE` of a field, or of the closest that is around it."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return f"{self.origin}:{self.lines[path]}" if path in self.lines else self.origin


def read(text: str, origin: str) -> Tree:
    """Return what the text holds. Raises ConfigError with the line of what is no YAML."""
    tree = Tree(origin)
    try:
        loader = _Loader(text)
        if loader.check_node() and (root := loader.get_node()):
            tree.value = _Reading(loader, tree).value_of(root, "")
            tree.has_more = loader.check_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}:{mark.line + 1}" if mark else origin
        raise ConfigError(f"failed to decode: no valid YAML: {error.problem}", where=where) from error
    except yaml.reader.ReaderError as error:
        where = f"{origin}:{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError("failed to decode: no valid YAML: a character that is not allowed", where=where) from error
    except RecursionError as error:
        raise ConfigError("failed to decode: nested too deeply", where=origin) from error
    return tree


class _Reading:
    """One pass over the nodes of a document."""

    def __init__(self, loader: _Loader, tree: Tree) -> None:
        self._loader, self._tree = loader, tree
        self._nodes = 0

    def value_of(self, node: Node, path: str) -> Any:
        self._tree.lines.setdefault(path, node.start_mark.line + 1)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fail(node, f"more than {MAX_NODES} values")
        match node:
            case MappingNode():
                return self._mapping(node, path)
            case SequenceNode():
                return [self.value_of(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
            case ScalarNode():
                return self._scalar(node)
            case _:  # pragma: no cover (PyYAML has no other nodes)
                raise AssertionError(node)

    def _mapping(self, node: MappingNode, path: str) -> dict[str, Any]:
        seen = set[str]()
        for key_node, _ in node.value:
            name = self._key(key_node)
            if name in seen:
                self._tree.duplicates.append(f"{path}.{name}" if path else name)
            seen.add(name)
        self._loader.flatten_mapping(node)
        values = dict[str, Any]()
        for key_node, value_node in node.value:
            name = self._key(key_node)
            inner = f"{path}.{name}" if path else name
            self._tree.lines[inner] = key_node.start_mark.line + 1
            values[name] = self.value_of(value_node, inner)
        return {name: value for name, value in values.items() if value is not None}

    def _key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            self._fail(node, "a key must be text")
        return str(node.value)

    def _scalar(self, node: ScalarNode) -> Any:
        if node.tag.endswith((":int", ":float")) and ":" in node.value:
            return node.value  # base 60, as YAML had it once
        try:
            value = self._loader.construct_object(node)
        except ValueError as error:
            self._fail(node, str(error))
        if isinstance(value, float) and not math.isfinite(value):
            self._fail(node, f"{node.value} is no number that JSON could hold")
        return value

    def _fail(self, node: Node, reason: str) -> NoReturn:
        raise ConfigError(f"failed to decode: {reason}", where=f"{self._tree.origin}:{node.start_mark.line + 1}")
