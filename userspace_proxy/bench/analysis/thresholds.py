"""Thresholds of a scenario: `p99 < 5 ms`, `errors == 0`. They decide the exit code."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from userspace_proxy.bench.analysis.metrics import METRICS, Metric, Unit, metric_called, valid_for
from userspace_proxy.bench.results import RunResult
from userspace_proxy.core.errors import ConfigError

_TEXT = re.compile(
    r"\s*(?P<name>[A-Za-z][A-Za-z0-9 ._/-]*?)\s*(?P<op><=|>=|==|!=|<|>)"
    r"\s*(?P<number>[0-9][0-9_,]*(?:\.[0-9]+)?)\s*(?P<unit>\S*)\s*"
)
_OPERATORS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_UNITS: dict[Unit, dict[str, float]] = {
    "seconds": {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0},
    "per second": {"/s": 1.0, "": 1.0},
    "share": {"%": 0.01, "": 1.0},
    "bytes": {"B": 1, "kB": 1e3, "KB": 1e3, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30},
    "bits per second": {"bit/s": 1, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9},
    "count": {"": 1.0},
    "ratio": {"": 1.0},
}


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit on a metric, in its base unit."""

    metric: Metric
    operator: str
    limit: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Return the threshold. Raises ConfigError with what is wrong, and what there is."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a threshold such as 'p99 < 5 ms' or 'errors == 0'")
        metric = metric_called(match["name"])
        if metric is None:
            raise ConfigError(
                f"there is no metric {match['name']!r}; there are p50 (any percentile), {', '.join(METRICS)}"
            )
        units = _UNITS[metric.unit]
        number = float(match["number"].replace(",", "").replace("_", ""))
        if match["unit"] not in units and number != 0:
            known = ", ".join(unit or "none" for unit in units)
            raise ConfigError(f"{metric.name} is given in {known}, not in {match['unit'] or 'nothing'}")
        return cls(metric, match["op"], number * units.get(match["unit"], 1.0), " ".join(text.split()))

    def measure(self, runs: Sequence[RunResult]) -> tuple[str, float | None]:
        """Return whether the runs met it (met, missed, invalid, unknown), and the value."""
        value = self.metric.of(runs)
        if value is None:
            return "unknown", None
        usable = valid_for(self.metric, runs)
        if not usable:
            return "invalid", value
        value = self.metric.of(usable)
        if value is None:
            return "unknown", None
        return ("met" if _OPERATORS[self.operator](value, self.limit) else "missed"), value


def effective(of_scenario: Sequence[str], of_test: Sequence[str]) -> list[Threshold]:
    """Return the thresholds of a test: its own, and those of the scenario on other metrics."""
    own = [Threshold.parse(text) for text in of_test]
    taken = {threshold.metric.name for threshold in own}
    return own + [t for t in (Threshold.parse(text) for text in of_scenario) if t.metric.name not in taken]
