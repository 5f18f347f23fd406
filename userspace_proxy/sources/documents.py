"""YAML and JSON text in, plain values out; and where a value is at fault, the line on which it stands.

JSON is tried first where the text looks like it, since it is faster to read. Whatever the text holds, the only
exception is ConfigError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.yaml_reader import YamlReader, line_of

_MARKER = re.compile(r"^(?:%.*\n)*---(?=\s|\Z)|^\.\.\.(?=\s|\Z)|(?<=\}\n)(?=\{)", re.MULTILINE)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


@dataclass(frozen=True, slots=True)
class Document:
    """The text of one value in a file. `line` is the number of its first line, from 1."""

    origin: str
    line: int
    text: str

    def value(self) -> object:
        """Return what the document holds, None when that is nothing. Raises ConfigError."""
        if self._looks_like_json:
            try:
                return json.loads(
                    self.text.removeprefix("---"), object_pairs_hook=_unique, parse_constant=_refuse_constant
                )
            except (ValueError, RecursionError):
                pass  # flow-style YAML looks like JSON too; and of what is neither, the YAML reader knows the line
        return YamlReader(self._yaml, self.origin, self.line).value()

    def where(self, path: str = "") -> str:
        """Return `FILE:LINE` of the field at `path`, such as `spec.ports[0].port`, or of its closest ancestor."""
        return f"{self.origin}:{line_of(path, self._yaml, self.line)}"

    @property
    def _looks_like_json(self) -> bool:
        return self.text.removeprefix("---").lstrip()[:1] in ("{", "[")

    @property
    def _yaml(self) -> str:
        """The text as YAML. JSON is YAML, but for its surrogate pairs, which never hold a place."""
        return _SURROGATE_ESCAPE.sub(r"\\ufffd", self.text) if self._looks_like_json else self.text


def documents(text: str, origin: str) -> Iterator[Document]:
    """Yield the documents of a file. They are parted as YAML has it, or by a line break between two JSON objects."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    start, line = 0, 1
    for marker in (*_MARKER.finditer(text), None):
        end = marker.start() if marker else len(text)
        if not text[start:end].isspace() and start != end:
            yield Document(origin, line, text[start:end])
        next_start = marker.end() if marker and marker[0] == "..." else end
        line += text.count("\n", start, next_start)
        start = next_start


def decode(data: bytes, origin: str) -> str:
    """Return the text of a file: UTF-8, or UTF-16 where a byte order mark says so. Raises ConfigError."""
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"no valid {error.encoding.upper()}: {error.reason}", where=f"{origin}:{line}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("duplicate key")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
