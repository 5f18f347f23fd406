"""Rules through `iptables-save` and `iptables-restore`: the primary way, for both variants and both families."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from userspace_proxy.core.errors import KernelRefused, RedirectFailed, RuleNotUnderstood
from userspace_proxy.core.model import IPFamily
from userspace_proxy.redirect import fingerprints
from userspace_proxy.redirect.fingerprints import Fingerprint
from userspace_proxy.redirect.programs import TIME_LIMIT_S, Finished, Programs, Variant, run
from userspace_proxy.redirect.tables import TableChange, Tables

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
_LINE = re.compile(r"^Error occurred at line: (\d+)$", re.MULTILINE)


class RestoreBackend:
    """The tables of one family through the programs of one variant."""

    def __init__(self, programs: Programs, fingerprint: Fingerprint | None = None) -> None:
        self._programs = programs
        self._fingerprint = fingerprint or fingerprints.opened(programs.variant is Variant.NFT, programs.family)

    @property
    def name(self) -> str:
        return self._programs.variant.value

    @property
    def family(self) -> IPFamily:
        return self._programs.family

    @property
    def fingerprint_skips_own_writes(self) -> bool:
        return self._programs.variant is Variant.NFT

    async def read(self) -> Tables:
        return await self._programs.read()

    async def write(self, changes: Sequence[TableChange]) -> None:
        lines: list[str] = []
        for change in changes:
            lines += change.lines()
            await asyncio.sleep(0)  # with thousands of services this takes milliseconds: let others have a turn
        text = "\n".join([*lines, ""]).encode()
        await asyncio.sleep(0)
        command = [self._programs.restore, "--noflush", *self._programs.wait_arguments]
        pause_s = FIRST_PAUSE_S
        deadline = asyncio.get_running_loop().time() + TIME_LIMIT_S
        while True:
            finished = await run(*command, stdin=text)
            if finished.code == 0:
                self._fingerprint.note_own(len(changes))
                return
            if not _is_locked_out(finished) or asyncio.get_running_loop().time() + pause_s > deadline:
                raise failure(" ".join(command), finished, lines)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def fingerprint(self) -> int | None:
        return self._fingerprint()

    async def close(self) -> None:
        self._fingerprint.close()


def _is_locked_out(finished: Finished) -> bool:
    return finished.code == 4 and "xtables lock" in finished.stderr


def failure(command: str, finished: Finished, lines: Sequence[str]) -> RedirectFailed:
    """Return what the end of a restore program means: 2 is a rule not understood, other codes mostly a refusal."""
    if "Permission denied" in finished.stderr or _is_locked_out(finished):
        return RedirectFailed(command, finished.stderr)
    found = _LINE.search(finished.stderr)
    if finished.code == 2 and found and 0 < int(found[1]) <= len(lines):
        return RuleNotUnderstood(command, finished.stderr, lines[int(found[1]) - 1])
    if finished.code in (1, 4):
        return KernelRefused(command, finished.stderr)
    return RedirectFailed(command, f"exit code {finished.code}: {finished.stderr}")
