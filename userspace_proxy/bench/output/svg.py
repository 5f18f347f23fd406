"""Just enough SVG: elements, scales with round ticks, axes. Colours come from the page, so light and dark work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


def element(name: str, /, *children: str, **attributes: object) -> str:
    """Return an element. Underscores in attribute names are hyphens; a trailing one is dropped (`class_`)."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{shown}>{''.join(children)}</{name}>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """Return a line of text."""
    return element("text", escape(content), x=x, y=y, **attributes)


def polyline(points: Iterable[Point], **attributes: object) -> str:
    """Return an open line through the points."""
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return element("polyline", points=path, fill="none", **attributes)


def picture(width: int, height: int, label: str, *children: str) -> str:
    """Return a whole picture, which scales with the page and says to screen readers what it shows."""
    return element(
        "svg", *children, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_="plot",
        xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places."""

    place: Callable[[float], float]
    ticks: Sequence[float]


def linear(low: float, high: float, from_: float, to: float, *, count: int = 5) -> Scale:
    """Return an even scale with about so many round ticks."""
    high = high if high > low else low + 1
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    ticks = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    return Scale(lambda value: from_ + (value - low) / (high - low) * (to - from_), ticks)


def logarithmic(low: float, high: float, from_: float, to: float) -> Scale:
    """Return a scale of decades that begins and ends with 1, 2 or 5 times a power of ten."""
    steps = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5)]
    low = max((step for step in steps if step <= low * 1.0001), default=steps[0])
    high = min((step for step in steps if step >= max(high, low * 2) * 0.9999), default=steps[-1])
    inside = [step for step in steps if low * 0.9999 <= step <= high * 1.0001]
    if len(inside) > 7:
        inside = [step for step in inside if round(math.log10(step), 6) == round(math.log10(step))]
    span = math.log10(high / low)
    return Scale(lambda value: from_ + math.log10(max(value, low) / low) / span * (to - from_), inside)


def _round_step(rough: float) -> float:
    magnitude: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
