"""The daemon's command line, as a process: what is printed where, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.conftest import RunToEnd
from tests.unit.core.configs import HEADER, golden


async def test_the_defaults_are_written_and_that_is_said(run_to_end: RunToEnd, tmp_path: Path) -> None:
    path = tmp_path / "written.yaml"
    ended = await run_to_end("--write-config-to", path)
    assert ended.exit_code == 0
    assert f"Wrote configuration to {path}" in ended.stderr
    assert path.read_text() == golden("default-config.yaml")


async def test_a_file_that_cannot_be_written_is_an_error(run_to_end: RunToEnd) -> None:
    ended = await run_to_end("--write-config-to=/absent/directory/file")
    assert ended.exit_code == 1
    assert "/absent/directory/file: cannot be written: No such file or directory" in ended.stderr


async def test_version_and_help_are_printed(run_to_end: RunToEnd) -> None:
    version, help_text = await run_to_end("--version"), await run_to_end("-h")
    assert version.exit_code == help_text.exit_code == 0
    assert version.stdout.startswith("userspace-proxy 0.")
    assert "Health and metrics:" in help_text.stdout
    assert "local" in help_text.stdout
    assert version.stderr == help_text.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "userspace-proxy: unknown flag: --nonsense\nSee 'userspace-proxy --help'.\n"),
        (["locale"], 'userspace-proxy: "userspace-proxy" does not take any arguments, got ["locale"]'),
        (["--proxy-mode=nftables"], "for nftables, run kube-proxy 1.29 or later"),
        (["--config=/absent"], "userspace-proxy: /absent: cannot be read: No such file or directory\n"),
    ],
)
async def test_bad_usage_and_a_bad_configuration_exit_with_1(
    run_to_end: RunToEnd, arguments: list[str], message: str
) -> None:
    ended = await run_to_end(*arguments)
    assert ended.exit_code == 1
    assert message in ended.stderr
    assert ended.stdout == ""


async def test_a_written_configuration_can_be_the_next_ones_input(run_to_end: RunToEnd, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(HEADER + "resourceContainer: /x\nuserspaceProxy: {workers: 2}\nudpIdleTimeout: 1s\n")
    ended = await run_to_end(f"--config={first}", f"--write-config-to={second}", "--logging-format=json")
    assert ended.exit_code == 0
    warning, written = ended.stderr.splitlines()
    assert "Using lenient decoding as strict decoding failed" in warning
    assert "Wrote configuration" in written
    assert "udpIdleTimeout: 1s\nuserspaceProxy:\n  workers: 2\n" in second.read_text()
    assert (await run_to_end(f"--config={second}", f"--write-config-to={first}")).exit_code == 0
    assert first.read_text() == second.read_text()
