"""Scenario files: the defaults, the template, and errors with file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from userspace_proxy.bench.analysis.thresholds import Threshold
from userspace_proxy.bench.scenario import ThisProxy
from userspace_proxy.bench.scenario_file import read_scenario, scenario_from_yaml, template
from userspace_proxy.core.errors import ConfigError


def test_an_empty_file_is_the_default_scenario() -> None:
    scenario = scenario_from_yaml("")
    assert [target.name for target in scenario.targets] == ["direct", "proxy"]
    assert {test.load.kind for test in scenario.tests} == {"connect", "requests", "download", "udp", "endings"}


def test_the_template_validates_and_is_commented() -> None:
    scenario = scenario_from_yaml(template())
    assert isinstance(scenario.targets[1], ThisProxy)
    assert template().count("#") > 40


@pytest.mark.parametrize("path", sorted(Path("benchmarks/scenarios").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_standard_scenarios_validate(path: Path) -> None:
    assert read_scenario(str(path)).name == path.stem


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("repetitions: many", "bench.yaml:1: repetitions: expected `int`, got `str`"),
        ("\nrepetitions: 0", "bench.yaml:2: repetitions: expected `int` >= 1"),
        ("targets:\n- kind: proxy\n- kind: apache", "bench.yaml:3: targets[1].kind: invalid value 'apache'"),
        ("targets:\n- kind: proxy\n  colour: red", "bench.yaml:3: targets[0].colour: there is no such field here"),
        ("targets:\n- name: x", "bench.yaml:2: targets[0].kind: is required"),
        ("targets:\n- kind: proxy\n- kind: proxy", "bench.yaml:3: targets[1].name: there are two targets called"),
        ("duration: 5", "bench.yaml:1: duration: '5' is not a duration such as 250ms"),
        ("tests:\n- name: a\n  load:\n    kind: connect\n    rate: 10", "bench.yaml:5: tests[0].load.rate: 10 is"),
        ("tests:\n- name: a\n  load: {kind: connect}\n  thresholds:\n  - speed < 3",
         "bench.yaml:5: tests[0].thresholds[0]: there is no metric 'speed'"),
        ("tests:\n- name: a\n  load: {kind: connect}\n  thresholds:\n  - p99 < 3 %",
         "bench.yaml:5: tests[0].thresholds[0]: p99 is given in ns"),
        ("tests:\n- name: a\n  load: {kind: connect}\n  events:\n  - {kind: kill, at: 1s, backend: 9}",
         "bench.yaml:5: tests[0].events[0].backend: there are only 4 backends"),
        ("tests:\n- name: a\n  load: {kind: connect, duration: 1s}\n  events:\n  - {kind: kill, at: 3s}",
         "bench.yaml:5: tests[0].events[0].at: is after the end of the test"),
        ("targets:\n- kind: address\n  address: 127.0.0.1", "bench.yaml:3: targets[0].address: '127.0.0.1' is"),
        ("a: [", "bench.yaml:1: expected the node content"),
        ("seed: 1\nseed: 2", "bench.yaml:2: 'seed' stands here twice"),
        ("- 1", "bench.yaml:1: expected `object`, got `array`"),
    ],
)  # fmt: skip
def test_errors_say_file_line_and_field(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario_from_yaml(text, "bench.yaml")
    assert str(caught.value).startswith(error)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        read_scenario("nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "name", "limit"),
    [
        ("p99 < 5 ms", "p99", 0.005),
        ("p99.9<=1.5s", "p99.9", 1.5),
        ("errors == 0", "errors", 0.0),
        ("Affinity Violations == 0", "affinity violations", 0.0),
        ("error rate < 5 %", "error rate", 0.05),
        ("memory < 64 MiB", "memory", 64 * 2**20),
        ("rate >= 10_000", "rate", 10_000.0),
        ("throughput > 1 Gbit/s", "throughput", 1e9),
        ("udp-loss < 0.1 %", "udp loss", 0.001),
    ],
)
def test_thresholds_are_read_as_people_write_them(text: str, name: str, limit: float) -> None:
    threshold = Threshold.parse(text)
    assert threshold.metric.name == name
    assert threshold.limit == pytest.approx(limit)
