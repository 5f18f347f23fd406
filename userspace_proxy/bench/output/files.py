"""Result files: JSON is the whole report, CSV and .hgrm are what other programs like to read."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import msgspec

from userspace_proxy.bench.analysis.metrics import METRICS
from userspace_proxy.bench.histograms import as_hgrm, merged
from userspace_proxy.bench.output.page import page_of
from userspace_proxy.bench.quantities import number_of_quantity
from userspace_proxy.bench.results import SCHEMA_VERSION, Report
from userspace_proxy.core.errors import ConfigError

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def write_report(report: Report, directory: Path) -> list[Path]:
    """Write all files of a report. Return their paths, the most useful first. Raises ConfigError."""
    name = safe_name(report.name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"{name}{suffix}" for suffix in (".html", ".json", ".csv")]
        for path, content in zip(paths, (page_of(report), as_json(report), as_csv(report)), strict=True):
            path.write_text(content, encoding="utf-8")
        return paths + _write_histograms(report, directory / f"{name}-hgrm")
    except OSError as error:
        raise ConfigError(
            f"results cannot be written: {error.strerror}", where=str(error.filename or directory)
        ) from None


def read_report(path: str) -> Report:
    """Return the report of a JSON file. Raises ConfigError."""
    try:
        data = Path(path).read_bytes()
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise ConfigError(f"has schema version {version}, this program reads {SCHEMA_VERSION}", where=path)
        return msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=path) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"is not a result of `bench run`: {error}", where=path) from None


def as_json(report: Report) -> str:
    """Return the whole report."""
    encoded = msgspec.json.encode(report, enc_hook=number_of_quantity)
    return msgspec.json.format(encoded, indent=1).decode() + "\n"


def as_csv(report: Report) -> str:
    """Return one line per repetition, test and target, with every metric in its base unit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ["p50", "p90", "p99", "p99.9", *(name for name in METRICS if not re.fullmatch(r"p[0-9.]+", name))]
    writer.writerow(["target", "test", "repetition", "valid", *(f"{name} ({METRICS[name].unit})" for name in names)])
    for run in report.runs:
        values = [METRICS[name].of([run]) for name in names]
        cells = ["" if value is None else repr(value) for value in values]
        valid = "; ".join(sorted({f"not {limit.affects}" for limit in run.limits})) or "yes"
        writer.writerow([run.target, run.test, run.repetition, valid, *cells])
    return out.getvalue()


def safe_name(text: str) -> str:
    """Return the text as part of a file name."""
    return _UNSAFE.sub("-", text).strip("-.") or "results"


class _Version(msgspec.Struct):
    schema_version: int


def _write_histograms(report: Report, directory: Path) -> list[Path]:
    paths = []
    for target in report.targets:
        for test in report.tests:
            histogram = merged(run.load.histogram for run in report.of(target.name, test.name))
            if histogram.get_total_count():
                directory.mkdir(parents=True, exist_ok=True)
                path = directory / f"{safe_name(test.name)}-{safe_name(target.name)}.hgrm"
                path.write_bytes(as_hgrm(histogram))
                paths.append(path)
    return paths
