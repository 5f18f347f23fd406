"""YAML as kube-proxy's reader takes it, with the place of everything."""

from __future__ import annotations

import pytest

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.yaml_tree import MAX_NODES, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2001-01-01", "2001-01-01"),
        ("a: 1:30", "1:30"),
        ("a: 1:30.5", "1:30.5"),
        ("a: 0x10", 16),
        ("a: on", True),
        ("a: 'on'", "on"),
        ("a: 1.5", 1.5),
        ('{"a": "json"}', "json"),
        ("a: [1, null]", [1, None]),
        ("b: &x {c: 1}\na: *x", {"c": 1}),
        ("b: &x {c: 1, d: 2}\na: {<<: *x, c: 3}", {"c": 3, "d": 2}),
    ],
)
def test_values_are_those_that_kube_proxy_sees(text: str, value: object) -> None:
    tree = read(text, "f")
    assert tree.value["a"] == value
    assert tree.duplicates == []


def test_null_is_the_same_as_nothing() -> None:
    assert read("a: null\nb: ~\nc: 1\n", "f").value == {"c": 1}


def test_a_place_is_the_line_of_the_field_or_of_the_closest_around_it() -> None:
    tree = read("a:\n  b:\n  - c: 1\n  - d\n", "f")
    assert tree.where("a.b[0].c") == "f:3"
    assert tree.where("a.b[1]") == "f:4"
    assert tree.where("a.b[7]") == "f:2"
    assert tree.where("a.x.y") == "f:1"
    assert tree.where("x") == tree.where() == "f:1"
    assert read("", "f").where("x") == "f"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [", "f:2: failed to decode: no valid YAML"),
        ("a: 1\nb: \x00", "f:2: failed to decode: the character '\\x00' is not allowed"),
        ("? [a]\n: 1", "f:1: failed to decode: a key must be text"),
        ("a: 1\nb: !!int x", "f:2: failed to decode: invalid literal"),
        ("a: 1\nb: .nan", "f:2: failed to decode: .nan is no number"),
        ("a: !weird x", "f:1: failed to decode: the tag '!weird' is not supported"),
        ("a: &x [*x]", "f:1: failed to decode: an alias refers to nothing, or to what it is part of"),
        ("[" * 2000 + "]" * 2000, "f:1: failed to decode: "),
        ("[" * 201 + "]" * 201, "f:1: failed to decode: nested deeper than 200 levels"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "f")
    assert str(caught.value).startswith(message)


def test_aliases_cannot_blow_a_small_file_up() -> None:
    lines = ["a: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"b{n}: &x{n + 1} [{', '.join([f'*x{n}'] * 10)}]" for n in range(9)]
    with pytest.raises(ConfigError, match=f"more than {MAX_NODES} values"):
        read("\n".join(lines), "f")
