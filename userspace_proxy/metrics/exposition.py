"""The text format of Prometheus, version 0.0.4, in pieces that are each made in microseconds.

Whoever sends them decides when to rest, so a large exposition holds nothing up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def header(name: str, kind: str, documentation: str) -> str:
    """Return the two lines that stand before the samples of a metric."""
    return f"# HELP {name} {documentation.translate(_HELP_ESCAPES)}\n# TYPE {name} {kind}\n"


def label_set(labels: Mapping[str, str]) -> str:
    """Return labels in braces, or nothing where there are none."""
    pairs = ",".join(f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def number(value: float) -> str:
    """Return a sample's value: whole numbers without a fraction."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def registry_pieces(registry: CollectorRegistry) -> Iterator[str]:
    """Yield the metrics of a registry, one after the other."""
    for metric in registry.collect():
        yield _metric_text(metric)


def _metric_text(metric: Metric) -> str:
    """Return a metric as text, without the `_created` samples: in this format they would be metrics of their own."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    created = f"{metric.name}_created"
    samples = (
        f"{each.name}{label_set(each.labels)} {number(each.value)}\n" for each in metric.samples if each.name != created
    )
    return header(name, metric.type, metric.documentation) + "".join(samples)
