"""YAML event by event, so that not even a dump of a whole cluster is ever held as a tree of nodes.

A scalar is a number, a boolean, null, or text; whatever else YAML knows, dates above all, stays text. Aliases and merge
keys are followed; tags of other types are refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from userspace_proxy.core.errors import ConfigError

MAX_DEPTH: Final = 200
"""How deep YAML may be nested. Kubernetes objects stay below 20."""

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INTEGER = re.compile(r"[-+]?(?:0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+|[0-9][0-9_]*)")
_OCTAL = re.compile(r"[-+]?0[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")

_TEXT = "tag:yaml.org,2002:str"
_PLAIN = frozenset((None, "!", *(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))))
_COLLECTIONS = frozenset((None, "!", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"))
_WORDS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **{form: True for word in ("true", "yes", "on") for form in (word, word.title(), word.upper())},
    **{form: False for word in ("false", "no", "off") for form in (word, word.title(), word.upper())},
}


class _PythonParser(Reader, Scanner, Parser):
    """Stands in for libyaml's parser where that is missing, many times slower."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)


_PARSER: type[_PythonParser | CParser]
try:
    from yaml._yaml import CParser
except ImportError:
    _PARSER = _PythonParser
else:
    _PARSER = CParser


class YamlReader:
    """Reads one document, once: its value, or the line of a field. Raises ConfigError."""

    def __init__(self, text: str, origin: str, first_line: int) -> None:
        self._text, self._origin, self._first_line = text, origin, first_line
        self._anchors: dict[str, object] = {}
        self._depth = 0
        if unprintable := _UNPRINTABLE.search(text):
            line = text.count("\n", 0, unprintable.start()) + first_line
            raise ConfigError(f"the character {unprintable[0]!r} is not allowed", where=f"{origin}:{line}")
        self._parser = _PARSER(text)

    def value(self) -> object:
        """Return what the document holds, None when that is nothing."""
        root = self._root()
        value = None if root is None else self._value(root)
        while not isinstance(event := self._next(), StreamEndEvent):
            if isinstance(event, DocumentStartEvent):
                self._fail(event, "a document begins without a line `---` before it")
        return value

    def line_of(self, steps: Sequence[str | int]) -> int:
        """Return the line of what the steps lead to, as far as they lead: of its key, in a mapping."""
        event, line = self._root(), self._first_line
        if event is not None:
            line = self._line(event)
        for step in steps:
            found = self._find(event, step)
            if found is None:
                break
            line, event = found
        return line

    def _root(self) -> Event | None:
        """Return the event with which the value of the document begins, None when there is no document."""
        while not isinstance(event := self._next(), StreamEndEvent):
            if isinstance(event, DocumentStartEvent):
                return self._next()
        return None

    def _next(self) -> Event:
        try:
            event = self._parser.get_event()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = min(mark.line if mark else 0, self._text.count("\n")) + self._first_line
            raise ConfigError(error.problem or "no valid YAML", where=f"{self._origin}:{line}") from error
        except (yaml.YAMLError, ValueError) as error:
            reason = f"no valid YAML: {error}".partition("\n")[0]
            raise ConfigError(reason, where=f"{self._origin}:{self._first_line}") from error
        return event or StreamEndEvent()

    def _value(self, event: Event) -> object:
        """Return the value that begins with an event."""
        match event:
            case ScalarEvent():
                value = self._scalar(event)
            case CollectionStartEvent():
                value = self._collection(event)
            case AliasEvent() if event.anchor in self._anchors:
                return self._anchors[event.anchor]
            case _:
                self._fail(event, "an alias refers to nothing, or to what it is part of")
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _scalar(self, event: ScalarEvent) -> object:
        if event.tag in _PLAIN:
            return _plain_value(event.value) if event.implicit[0] or event.tag not in (None, "!") else event.value
        return event.value if event.tag == _TEXT else self._fail(event, f"the tag {event.tag!r} is not supported")

    def _collection(self, event: CollectionStartEvent) -> object:
        if event.tag not in _COLLECTIONS:
            self._fail(event, f"the tag {event.tag!r} is not supported")
        if self._depth == MAX_DEPTH:
            self._fail(event, f"nested deeper than {MAX_DEPTH} levels")
        if event.anchor is not None:
            self._anchors.pop(event.anchor, None)
        self._depth += 1
        value = self._mapping() if isinstance(event, MappingStartEvent) else self._sequence()
        self._depth -= 1
        return value

    def _sequence(self) -> list[object]:
        items = list[object]()
        while not isinstance(event := self._next(), SequenceEndEvent):
            items.append(self._value(event))
        return items

    def _mapping(self) -> dict[str, object]:
        own: dict[str, object] = {}
        merged: dict[str, object] = {}
        while not isinstance(key := self._next(), MappingEndEvent):
            if not isinstance(key, ScalarEvent):
                self._fail(key, "a key must be text")
            elif key.value == "<<" and key.implicit[0]:
                merged = {**self._merged(self._next()), **merged}
            elif key.value in own:
                self._fail(key, f"the key {key.value!r} is there twice")
            else:
                own[key.value] = self._value(self._next())
        return {**merged, **own} if merged else own

    def _merged(self, event: Event) -> dict[str, object]:
        """Return what `<<` brings in: a mapping, or several of which the first one wins."""
        value = self._value(event)
        merged: dict[str, object] = {}
        for each in reversed(value if isinstance(value, list) else [value]):
            if not isinstance(each, dict):
                self._fail(event, "only mappings can be merged")
            merged.update(each)
        return merged

    def _find(self, start: Event | None, step: str | int) -> tuple[int, Event] | None:
        """Read on to the step's value in a collection. Return its line and first event, None when it has no such step.

        The step `...` is any value that is not text: it comes from where only text is allowed.
        """
        if isinstance(start, SequenceStartEvent):
            for index in itertools.count():
                if isinstance(item := self._next(), SequenceEndEvent):
                    break
                if index == step:
                    return self._line(item), item
                self._skip(item)
        elif isinstance(start, MappingStartEvent):
            while not isinstance(key := self._next(), MappingEndEvent):
                value = self._next()
                is_text = isinstance(value, ScalarEvent) and isinstance(self._scalar(value), str)
                has_name = isinstance(key, ScalarEvent) and key.value == step
                if has_name or (step == "..." and not is_text):
                    return self._line(key), value
                self._skip(value)
        return None

    def _skip(self, event: Event) -> None:
        """Read on to the end of the value that begins with an event."""
        depth = int(isinstance(event, CollectionStartEvent))
        while depth:
            event = self._next()
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)

    def _line(self, event: Event) -> int:
        return self._first_line + (event.start_mark.line if event.start_mark else 0)

    def _fail(self, event: Event, reason: str) -> NoReturn:
        raise ConfigError(reason, where=f"{self._origin}:{self._line(event)}")


def _plain_value(text: str) -> str | int | float | bool | None:
    """Return what a scalar without quotes means. `yes` and `on` are booleans, as in YAML 1.1 and in kubectl."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in "+-.0123456789":
        try:
            if _INTEGER.fullmatch(text):
                return int(text, 8 if _OCTAL.fullmatch(text) else 0)
            if _FLOAT.fullmatch(text):
                return float(text)
        except ValueError:
            pass  # no number after all, such as 0x_, or one of more digits than Python converts
    return text
