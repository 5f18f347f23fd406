"""YAML in, plain values out, with libyaml and without."""

from __future__ import annotations

import pytest
import yaml

from userspace_proxy.core import yaml_reader
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.yaml_reader import MAX_DEPTH, YamlReader, line_of


@pytest.fixture(params=["libyaml", "python"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(yaml_reader, "_PARSER", yaml.BaseLoader)


def value_of(text: str) -> object:
    return YamlReader(text, "a.yaml", 1).value()


def fault_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        value_of(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing", None),
        ("~", None),
        ("80", 80),
        ("-1", -1),
        ("0x50", 80),
        ("0o17", 15),
        ("0777", 511),
        ("8_080", 8080),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("yes", True),
        ("Off", False),
        ("'80'", "80"),
        ('"yes"', "yes"),
        ("!!str 80", "80"),
        ("!!int '80'", 80),
        ("10.0.0.1", "10.0.0.1"),
        ("2001:10:10:10:10:10:10:10", "2001:10:10:10:10:10:10:10"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
        ("0x_", "0x_"),
        ("-", [None]),
        (".nan", ".nan"),
        ("9" * 5000, "9" * 5000),
        ("|\n a\n b\n", "a\nb\n"),
        ("{a: [1, {b: c}], d: }", {"a": [1, {"b": "c"}], "d": None}),
        ("!!map {a: !!seq [b]}", {"a": ["b"]}),
        ("1: a\nyes: b", {"1": "a", "yes": "b"}),
        ("a: &x {b: c}\nd: *x", {"a": {"b": "c"}, "d": {"b": "c"}}),
        ("a: &x 1\nb: &x 2\nc: *x", {"a": 1, "b": 2, "c": 2}),
        ("a: &x {b: 1, c: 1}\nd: {<<: *x, b: 2}", {"a": {"b": 1, "c": 1}, "d": {"b": 2, "c": 1}}),
        ("<<: [{a: 1}, {a: 2, b: 2}]\n'<<': 3", {"a": 1, "b": 2, "<<": 3}),
    ],
)
def test_text_gives_the_value_that_kubernetes_gives_it(text: str, value: object) -> None:
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a: 1\nb: 2\na: 3", 3, "the key 'a' is there twice"),
        ("a: 1\n[b]: 2", 2, "a key must be text"),
        ("a:\n  b: *x", 2, "an alias refers to nothing, or to what it is part of"),
        ("a: &x\n- *x", 2, "an alias refers to nothing, or to what it is part of"),
        ("a: &x 1\nb: &x [*x]", 2, "an alias refers to nothing, or to what it is part of"),
        ("a:\n  !secret b", 2, "the tag '!secret' is not supported"),
        ("a:\n  !secret {}", 2, "the tag '!secret' is not supported"),
        ("a: b\n<<: c", 2, "only mappings can be merged"),
        ("a: b\nc: \0", 2, "the character '\\x00' is not allowed"),
        ("a: b\nc: \ud800", 2, "the character '\\ud800' is not allowed"),
        (
            "\n".join(" " * level + "a:" for level in range(MAX_DEPTH + 2)),
            MAX_DEPTH + 1,
            f"nested deeper than {MAX_DEPTH} levels",
        ),
        ("a\u2028---\nb", 2, "a document begins without a line `---` before it"),
    ],
)
def test_a_fault_names_its_line(text: str, line: int, reason: str) -> None:
    assert fault_of(text) == f"a.yaml:{line}: {reason}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: b\n c: d", 2),
        ("a: 'b", 1),
        ("a: b\n\tc: d", 2),
        ("a: [b\nc: d", 2),
        ("%YAML 3.0\n--- a", 1),
        ('"\\x"', 1),
        ('"\\U00ffffff"', 1),
        ('"\\Uffffffff"', 1),
    ],
)
def test_broken_yaml_names_its_line(text: str, line: int) -> None:
    assert fault_of(text).startswith(f"a.yaml:{line}: ")


def test_lines_count_from_where_the_document_begins_in_its_file() -> None:
    with pytest.raises(ConfigError, match=r"^a\.yaml:12: "):
        YamlReader("a: 1\nb: *x", "a.yaml", 11).value()


DOCUMENT = """\
kind: Service
metadata:
  labels:
    a: b
    c: 1
spec: {
  ports: [
    {name: x},
    {port: 1}]}
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("", 1),
        ("kind", 1),
        ("kind.deeper", 1),
        ("metadata.labels", 3),
        ("metadata.labels[...]", 5),
        ("metadata.name", 2),
        ("spec.ports[1].port", 9),
        ("spec.ports[1].protocol", 9),
        ("spec.ports[7]", 7),
        ("spec.ports.name", 7),
    ],
)
def test_the_line_of_a_field_is_that_of_its_key_or_of_what_comes_closest(path: str, line: int) -> None:
    assert line_of(path, DOCUMENT) == line


def test_the_line_of_nothing_is_where_it_would_be() -> None:
    assert line_of("a", "# nothing", 7) == 7
