"""The daemon's help."""

from __future__ import annotations

import pytest

from userspace_proxy.cli.flag_help import render
from userspace_proxy.cli.flags import FLAGS, GROUPS


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_every_flag_is_in_the_help_and_none_is_torn(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = render({"local": "Serve services."}).replace(",", " ").split()
    assert [flag.name for flag in FLAGS.values() if not {flag.spelled, f"{flag.spelled}[=raw]"} & set(words)] == []


def test_the_help_shows_groups_defaults_and_the_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = render({"local": "Serve services."})
    assert all(f"\n{title}:\n" in text for title in GROUPS)
    assert "local  Serve services." in text
    words = " ".join(text.split())
    assert "(default 250ms; " in words
    assert "(default 250ms,500ms,1s,2s)" in words
    assert "(default -999)" in words
