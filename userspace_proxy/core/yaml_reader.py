"""The one reader of YAML, event by event, so that not even a dump of a whole cluster is ever held as a tree of nodes.

A scalar is a number, a boolean, null, or text; whatever else YAML knows, dates above all, stays text. Aliases and merge
keys are followed; tags of other types are refused. Lines are looked up by reading again, since only faults need them.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Final, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)

from userspace_proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from yaml._yaml import CParser

MAX_DEPTH: Final = 200
"""How deep YAML may be nested. Kubernetes objects stay below 20."""

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INTEGER = re.compile(r"[-+]?(?:0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+|[0-9][0-9_]*)")
_OCTAL = re.compile(r"[-+]?0[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")

_TEXT = "tag:yaml.org,2002:str"
_PLAIN = frozenset(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
_COLLECTIONS = frozenset((None, "!", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"))
_WORDS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **{form: True for word in ("true", "yes", "on") for form in (word, word.title(), word.upper())},
    **{form: False for word in ("false", "no", "off") for form in (word, word.title(), word.upper())},
}

Step = ScalarEvent | int | None
"""A key, an index, or None for the whole."""

_PARSER: type[CParser | yaml.BaseLoader]
_PARSER = yaml.cyaml.CParser if yaml.__with_libyaml__ else yaml.BaseLoader  # type: ignore[attr-defined]
"""libyaml's parser, or where that is missing, one that is many times slower. Only its events are used."""


class YamlReader:
    """Reads one text, once. Raises ConfigError, and nothing else.

    A key that is there twice is a fault, or with `keeps_duplicates` only noted in `duplicates`: the last one counts.
    """

    def __init__(self, text: str, origin: str, first_line: int = 1, *, keeps_duplicates: bool = False) -> None:
        self._text, self._origin, self._first_line = text, origin, first_line
        self._keeps_duplicates = keeps_duplicates
        self.duplicates: list[str] = []
        """The paths of keys that were there before, such as `spec.ports[0].port`."""
        self._anchors: dict[str, object] = {}
        self._path: list[Step] = []

    def value(self) -> object:
        """Return what the text holds, None when that is nothing."""
        value = self.first_value()
        if more := self.next_document():
            self._fail(more, "a document begins without a line `---` before it")
        return value

    def first_value(self) -> object:
        """Return what the first document holds, None when that is nothing. Whether there are more is left open."""
        if unprintable := _UNPRINTABLE.search(self._text):
            line = self._text.count("\n", 0, unprintable.start()) + self._first_line
            raise ConfigError(f"the character {unprintable[0]!r} is not allowed", where=f"{self._origin}:{line}")
        self._parser = _PARSER(self._text)
        return self._value(self._next()) if self.next_document() else None

    def next_document(self) -> Event | None:
        """Return the event with which the next document begins, None after the last one."""
        while not isinstance(event := self._next(), StreamEndEvent):
            if isinstance(event, DocumentStartEvent):
                return event
        return None

    def _next(self) -> Event:
        try:
            event = self._parser.get_event()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = min(mark.line if mark else 0, self._text.count("\n")) + self._first_line
            raise ConfigError(f"no valid YAML: {error.problem}", where=f"{self._origin}:{line}") from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            reason = f"no valid YAML: {error}".partition("\n")[0]
            raise ConfigError(reason, where=f"{self._origin}:{self._first_line}") from error
        return event or StreamEndEvent()

    def _value(self, event: Event, step: Step = None) -> object:
        """Return the value that begins with an event, a step from what is around it."""
        match event:
            case ScalarEvent():
                value = self._scalar(event)
            case CollectionStartEvent():
                value = self._collection(event, step)
            case AliasEvent() if event.anchor in self._anchors:
                return self._anchors[event.anchor]
            case _:
                self._fail(event, "an alias refers to nothing, or to what it is part of")
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _scalar(self, event: ScalarEvent) -> object:
        tag, text = event.tag, event.value
        if tag in (None, "!"):
            return plain_value(text) if event.implicit[0] else text
        if tag == _TEXT:
            return text
        if tag not in _PLAIN:
            self._fail(event, f"the tag {tag!r} is not supported")
        value = plain_value(text)
        return value if not isinstance(value, str) else self._fail(event, f"invalid literal {text!r} for {tag!r}")

    def _collection(self, event: CollectionStartEvent, step: Step) -> object:
        if event.tag not in _COLLECTIONS:
            self._fail(event, f"the tag {event.tag!r} is not supported")
        if len(self._path) == MAX_DEPTH:
            self._fail(event, f"nested deeper than {MAX_DEPTH} levels")
        if event.anchor is not None:
            self._anchors.pop(event.anchor, None)
        self._path.append(step)
        value = self._mapping() if isinstance(event, MappingStartEvent) else self._sequence()
        self._path.pop()
        return value

    def _sequence(self) -> list[object]:
        items = list[object]()
        while not isinstance(event := self._next(), SequenceEndEvent):
            items.append(self._value(event, len(items)))
        return items

    def _mapping(self) -> dict[str, object]:
        own: dict[str, object] = {}
        merged: dict[str, object] = {}
        while not isinstance(key := self._next(), MappingEndEvent):
            if not isinstance(key, ScalarEvent):
                self._fail(key, "a key must be text")
            if key.value == "<<" and key.implicit[0]:
                merged = {**self._merged(self._next(), key), **merged}
            else:
                if key.value in own:
                    self._note_duplicate(key)
                own[key.value] = self._value(self._next(), key)
        return {**merged, **own} if merged else own

    def _note_duplicate(self, key: ScalarEvent) -> None:
        if not self._keeps_duplicates:
            self._fail(key, f"the key {key.value!r} is there twice")
        self.duplicates.append(_joined(*self._path, key).removeprefix("."))

    def _merged(self, event: Event, key: ScalarEvent) -> dict[str, object]:
        """Return what `<<` brings in: a mapping, or several of which the first one wins."""
        value = self._value(event, key)
        merged: dict[str, object] = {}
        for each in reversed(value if isinstance(value, list) else [value]):
            if not isinstance(each, dict):
                self._fail(event, "only mappings can be merged")
            merged.update(each)
        return merged

    def _line(self, event: Event) -> int:
        return self._first_line + (event.start_mark.line if event.start_mark else 0)

    def _fail(self, event: Event, reason: str) -> NoReturn:
        raise ConfigError(reason, where=f"{self._origin}:{self._line(event)}")


def line_of(path: str, text: str, first_line: int = 1) -> int:
    """Return the line of what is at a path, or comes closest: of its key, in a mapping. Of two, the last one counts.

    `[...]` in the path is the first value that is not text: it comes from where only text is allowed.
    """
    search = _Search(path, text, first_line)
    with contextlib.suppress(ConfigError):  # JSON has a few forms that YAML lacks; what was found before them counts
        search.first_value()
    return search.line


class _Search(YamlReader):
    """Reads on to the end, and has the line of what is wanted then."""

    def __init__(self, path: str, text: str, first_line: int) -> None:
        super().__init__(text, "", first_line, keeps_duplicates=True)
        self._wanted = path if path.startswith("[") else f".{path}"
        self._closest, self.line = "", first_line

    def _value(self, event: Event, step: Step = None) -> object:
        here = _joined(*self._path, step)
        around, wildcard, beyond = self._wanted.partition("[...]")
        if wildcard and here != around == _joined(*self._path) and not self._is_text(event):
            self._wanted = here + beyond
        if f"{self._wanted}.".startswith((f"{here}.", f"{here}[")) and len(here) >= len(self._closest):
            self._closest, self.line = here, self._line(step if isinstance(step, ScalarEvent) else event)
        return super()._value(event, step)

    def _is_text(self, event: Event) -> bool:
        return isinstance(event, ScalarEvent) and isinstance(self._scalar(event), str)


def _joined(*path: Step) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step.value}" for step in path if step is not None)


def plain_value(text: str) -> str | int | float | bool | None:
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
