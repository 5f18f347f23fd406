"""docs/configuration.md lists every setting of our own, with its flag, its default, and whether it is taken up."""

from __future__ import annotations

from pathlib import Path

from userspace_proxy.cli.flags import FLAGS
from userspace_proxy.core.config_changes import APPLICABLE

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_table_of_our_own_settings_is_complete_and_true() -> None:
    section = PAGE.read_text().partition("## Settings that kube-proxy does not have")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in section.splitlines() if line.startswith("| `")]
    expected = []
    for flag in sorted(FLAGS.values(), key=lambda flag: flag.path):
        if flag.is_own:
            name = flag.path.partition(".")[2]
            mark = " +" if flag.path in APPLICABLE else ""
            expected.append([f"`{name}`{mark}", f"`{flag.spelled}`", f"`{flag.shown_default or 'false'}`"])
    assert rows == expected
