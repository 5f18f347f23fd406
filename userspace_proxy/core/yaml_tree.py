"""The configuration file as plain values, with what stands there twice.

Values are what JSON could hold, as kube-proxy's reader makes of them; null is the same as nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.yaml_reader import YamlReader, line_of

MAX_NODES: Final = 20_000
"""More than any configuration needs. Aliases let a small file ask for billions."""

_NOT_FINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)


@dataclass(slots=True)
class Tree:
    """What the first document of a file holds. Paths look like `iptables.syncPeriod` and `nodePortAddresses[0]`."""

    origin: str
    text: str
    value: Any = None
    duplicates: list[str] = field(default_factory=list)
    has_more: bool = False
    """Whether further documents follow, which kube-proxy does not look at."""

    def where(self, path: str = "") -> str:
        """Return `FILE:LINE` of a field, or of the closest that is around it."""
        return self.origin if self.value is None else f"{self.origin}:{line_of(path, self.text)}"


def read(text: str, origin: str) -> Tree:
    """Return what the text holds. Raises ConfigError with the line of what is no YAML."""
    reader = YamlReader(text, origin, keeps_duplicates=True)
    try:
        value = reader.first_value()
        tree = Tree(origin, text, value, reader.duplicates, has_more=reader.next_document() is not None)
    except ConfigError as error:
        raise ConfigError(f"failed to decode: {error.reason}", where=error.where) from error
    tree.value = _Cleaning(tree).cleaned(value, "")
    return tree


class _Cleaning:
    """One pass over the values, which looks at those behind an alias once more each time."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._nodes = 0

    def cleaned(self, value: object, path: str) -> object:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fail(path, f"more than {MAX_NODES} values")
        match value:
            case dict():
                inner = ((name, self.cleaned(each, f"{path}.{name}" if path else name)) for name, each in value.items())
                return {name: each for name, each in inner if each is not None}
            case list():
                return [self.cleaned(each, f"{path}[{index}]") for index, each in enumerate(value)]
        if (isinstance(value, float) and not math.isfinite(value)) or _NOT_FINITE.fullmatch(str(value)):
            self._fail(path, f"{value} is no number that JSON could hold")
        return value

    def _fail(self, path: str, reason: str) -> NoReturn:
        raise ConfigError(f"failed to decode: {reason}", where=self._tree.where(path))
