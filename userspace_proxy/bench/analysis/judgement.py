"""What a check can say. `suspect` is what one look does not prove; `unknown` is what the samples cannot tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["fault", "suspect", "good", "unknown"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A status with its facts in words."""

    status: Status
    text: str


def fault(text: str) -> Judgement:
    return Judgement("fault", text)


def suspect(text: str) -> Judgement:
    return Judgement("suspect", text)


def good(text: str) -> Judgement:
    return Judgement("good", text)


def unknown(text: str) -> Judgement:
    return Judgement("unknown", text)
