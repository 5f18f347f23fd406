"""The HTML report."""

from __future__ import annotations

from userspace_proxy.bench.results import Report


def page_of(report: Report) -> str:
    return "<!doctype html>"
