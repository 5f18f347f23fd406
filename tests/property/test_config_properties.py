"""Whatever a file holds, it is read or refused with its place; and what is written is read back."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from userspace_proxy.core.config import API_VERSION, DEFAULTS, KIND, KubeProxyConfiguration, fields_of, with_field
from userspace_proxy.core.config_changes import changes, taken_up
from userspace_proxy.core.config_file import UNWRITTEN, decode, encode
from userspace_proxy.core.config_validation import problems
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.errors import ConfigError

PATHS = [path for path, _ in fields_of(DEFAULTS)]

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1s", "10.0.0.1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND}
    for path, value in fields.items():
        *outer, last = path.split(".")
        section = data
        for name in outer:
            section = section.setdefault(name, {})
        section[last] = value
    return data


def read_or_refused(text: str) -> None:
    try:
        decoded = decode(text, "some.conf")
    except ConfigError as error:
        places = [str(error)]
    else:
        places = [decoded.tree.where(problem.path) for problem in problems(decoded.document) if str(problem)]
    assert all(place.startswith("some.conf") for place in places)


@given(st.text())
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    read_or_refused(text)


@given(anything)
def test_any_yaml_is_read_or_refused_with_its_place(value: object) -> None:
    read_or_refused(yaml.safe_dump(value))


@given(st.dictionaries(st.sampled_from(PATHS) | st.text(max_size=5), anything, max_size=4))
@settings(max_examples=300)
def test_any_values_of_our_fields_are_read_or_refused_with_their_place(fields: dict[str, Any]) -> None:
    try:
        data = nested(fields)
    except (AttributeError, TypeError):
        return  # a name that is a section here and a value there
    read_or_refused(yaml.safe_dump(data))


def _like(value: object) -> st.SearchStrategy[Any]:
    match value:
        case bool():
            return st.booleans()
        case Duration():
            return st.integers(1, 10**9).map(lambda milliseconds: Duration(milliseconds / 1000))
        case int():
            return st.integers(1, 2**31 - 1)
        case float():
            return st.floats(0.5, 1000)
        case str():
            return st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=8)
        case tuple() | dict():
            return st.just(value)
        case _:
            raise AssertionError(value)


_WRITTEN = [
    (path, value)
    for path, value in fields_of(DEFAULTS)
    if not path.startswith((*UNWRITTEN, "healthzBindAddress", "metricsBindAddress", "bindAddress"))
    and path not in ("userspaceProxy.ruleStyle", "userspaceProxy.iptablesBackend", "userspaceProxy.unidling")
]


@st.composite
def documents(draw: st.DrawFn) -> KubeProxyConfiguration:
    document = DEFAULTS
    for path, value in draw(st.lists(st.sampled_from(_WRITTEN), max_size=8)):
        document = with_field(document, path, draw(_like(value)))
    return document


@given(documents())
def test_a_written_configuration_is_read_back_equal_and_without_a_warning(document: KubeProxyConfiguration) -> None:
    decoded = decode(encode(document), "written.conf")
    assert decoded.document == document
    assert decoded.warnings == ()


@given(documents(), documents())
def test_what_is_taken_up_leaves_only_what_needs_a_restart(
    running: KubeProxyConfiguration, wanted: KubeProxyConfiguration
) -> None:
    left = changes(taken_up(running, wanted), wanted)
    assert left.applicable == ()
    assert left.needs_restart == changes(running, wanted).needs_restart
