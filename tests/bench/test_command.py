"""The command line: defaults, errors, the guard against other machines, Ctrl-C, results that can be read again."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.bench.conftest import PROGRAM, Outcome, run_bench, run_scenario
from tests.bench.scenarios import a_test, faulty
from userspace_proxy.bench.histograms import merged
from userspace_proxy.bench.output.files import read_report
from userspace_proxy.bench.results import SCHEMA_VERSION

pytestmark = pytest.mark.timeout(240)


def test_init_writes_a_scenario_that_validates(tmp_path: Path) -> None:
    assert run_bench(["init"], tmp_path).returncode == 0
    assert "2 targets, 6 tests" in run_bench(["validate", "bench.yaml"], tmp_path).stdout
    again = run_bench(["init"], tmp_path)
    assert (again.returncode, again.stderr) == (
        1, "userspace-proxy: bench.yaml: exists already; --force replaces it\n",
    )  # fmt: skip


def test_a_wrong_scenario_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("targets:\n- kind: proxy\n  optoins: [x]\n")
    done = run_bench(["run", "-f", "bad.yaml"], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "userspace-proxy: bad.yaml:3: targets[0].optoins: there is no such field here\n"


@pytest.mark.parametrize("address", ["192.0.2.1:80", "[2001:db8::1]:80"])
def test_no_load_goes_to_another_machine_unless_that_is_allowed(address: str, tmp_path: Path) -> None:
    done = run_bench(["run", "--target", f"other={address}", "--only", "round robin"], tmp_path)
    assert done.returncode == 1
    assert "is not a loopback address" in done.stderr


def test_backends_are_never_started_on_other_addresses(tmp_path: Path) -> None:
    done = run_bench(["run", "--target", "proxy", "--backend", "192.0.2.1:80"], tmp_path)
    assert done.returncode == 1
    assert "is not a loopback address" in done.stderr


def test_help_and_local_do_not_pay_for_the_harness(tmp_path: Path) -> None:
    program = "import sys; sys.argv[1:] = ['local', '--help']\nfrom userspace_proxy.cli.main import main\n"
    program += "try: main()\nexcept SystemExit: pass\nprint(sorted({'hdrh', 'rich'} & set(sys.modules)))\n"
    program += "print([name for name in sys.modules if name.startswith('userspace_proxy.bench')])"
    done = subprocess.run([PROGRAM[0], "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]


def test_ctrl_c_keeps_what_was_measured_and_marks_it_partial(tmp_path: Path) -> None:
    scenario = {
        "name": "test", "repetitions": 50, "pin": False, "targets": [{"kind": "direct"}],
        "tests": [a_test("short", {"kind": "connect", "rate": "100/s", "duration": "300ms"})],
    }  # fmt: skip
    (tmp_path / "scenario.yaml").write_text(json.dumps(scenario))
    command = [*PROGRAM, "run", "-f", "scenario.yaml", "-o", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "these results are partial" in output
    report = read_report(str(tmp_path / "out" / "test.json"))
    assert report.partial
    assert 0 < len(report.runs) < 50
    assert "partial" in (tmp_path / "out" / "test.html").read_text()


class Shop(threading.Thread):
    """A balancer with backends of its own that answers lines, and is skewed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self.listener.getsockname()[1]

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        answered = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal answered
            if await reader.readline():
                answered += 1
                writer.write(b"hello from shop-%d\n" % min(2, answered % 4))
            writer.close()

        server = await asyncio.start_server(answer, sock=self.listener)
        async with server:
            await server.serve_forever()


@pytest.fixture(scope="module")
def shop() -> Shop:
    shop = Shop()
    shop.start()
    return shop


def test_backends_of_the_users_own_are_told_apart_by_what_they_say(shop: Shop, tmp_path: Path) -> None:
    target = {
        "kind": "address", "name": "shop", "address": f"127.0.0.1:{shop.port}", "own_backends": True,
        "identify": r"from (\S+)", "endpoints": 3,
    }  # fmt: skip
    load = {"kind": "connect", "rate": "400/s", "connections": 32, "duration": "1500ms"}
    outcome = run_scenario({"targets": [target], "tests": [a_test("connect", load)]}, tmp_path)
    assert set(outcome.faults("shop")) == {"distribution"}
    (run,) = outcome.report.runs
    assert run.load.balance is not None
    assert set(run.load.balance.counts) == {"shop-0", "shop-1", "shop-2"}


def test_a_target_that_does_not_start_is_a_fault_and_the_others_go_on(tmp_path: Path) -> None:
    broken = {"kind": "command", "name": "broken", "command": [PROGRAM[0], "-c", "raise SystemExit('no')"]}
    load = {"kind": "connect", "rate": "50/s", "duration": "200ms"}
    scenario = {"targets": [broken, {"kind": "haproxy", "program": "no-such-program"}, faulty("none", udp=False)]}
    outcome = run_scenario({**scenario, "tests": [a_test("connect", load)]}, tmp_path)
    assert "ended at once. no" in outcome.faults("broken")["start"]
    assert "no-such-program is not installed" in outcome.faults("haproxy")["start"]
    assert outcome.faults("none") == {}


# What is written


def test_json_says_where_it_comes_from(same: Outcome) -> None:
    data = json.loads((same.directory / "test.json").read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    assert "bench run -f scenario.yaml" in data["command"]
    assert {"userspace-proxy", "python"} <= set(data["environment"]["versions"])
    assert data["environment"]["kernel"].startswith("Linux")
    assert data["environment"]["sysctls"]["net.core.somaxconn"]
    assert data["seed"] == 1
    assert not data["partial"]


def test_csv_has_a_line_for_each_repetition(same: Outcome) -> None:
    with (same.directory / "test.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["target"], row["repetition"]) for row in rows] == [
        (target, str(repetition)) for repetition in range(5) for target in ("one", "other")
    ]
    assert all(float(row["p99 (seconds)"]) > 0 for row in rows)


def test_histograms_hold_every_request_and_are_written_for_plotters(same: Outcome) -> None:
    runs = same.report.of("one", "requests")
    total = merged(run.load.histogram for run in runs).get_total_count()
    assert total == sum(run.load.completed for run in runs) == 5 * 150
    text = (same.directory / "test-hgrm" / "requests-one.hgrm").read_text()
    assert "Percentile" in text
    assert f"TotalCount     = {float(total):12.3f}" in text


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href")]


def test_the_page_is_one_file_that_loads_nothing(proxy: Outcome) -> None:
    text = (proxy.directory / "test.html").read_text()
    page = Page()
    page.feed(text)
    assert page.loaded == []
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 8
    assert not re.search(r"url\(|@import", text)
    assert "nan" not in re.findall(r'(?:x|y|points|height|width)="([^"]*)"', text)


if shutil.which("chromium"):  # not a skipped test where there is none: the page is checked above, too

    def test_the_page_is_shown_by_a_browser(proxy: Outcome, tmp_path: Path) -> None:
        page, picture = proxy.directory / "test.html", tmp_path / "page.png"
        quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", *quiet, "--no-first-run", f"--user-data-dir={tmp_path / 'p'}",
             "--window-size=1200,1600", f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True, timeout=90,
        )  # fmt: skip
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 30_000  # an empty page is a tenth of that


def test_a_result_compared_with_itself_has_no_difference(same: Outcome, tmp_path: Path) -> None:
    path = str(same.directory / "test.json")
    done = run_bench(["compare", path, path], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "no difference" in done.stdout
    assert not re.search("better|worse", done.stdout)


def test_a_slower_result_is_worse_than_the_one_before(same: Outcome, tmp_path: Path) -> None:
    data = json.loads((same.directory / "test.json").read_text())
    for run in data["runs"]:
        run["limits"] = []
    (tmp_path / "before.json").write_text(json.dumps(data))
    for run in data["runs"]:
        if run["cost"]:
            run["cost"]["run_s"] *= 100
    (tmp_path / "after.json").write_text(json.dumps(data))
    done = run_bench(["compare", "before.json", "after.json"], tmp_path)
    assert done.returncode == 1
    assert re.search(r"CPU/request .* worse", done.stdout)


def test_a_result_can_be_shown_again(same: Outcome, tmp_path: Path) -> None:
    done = run_bench(["report", str(same.directory / "test.json"), "-o", "again"], tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "again" / "test.html").read_text() == (same.directory / "test.html").read_text()


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = run_bench(["report", "x.json"], tmp_path)
    assert done.returncode == 1
    assert "x.json: is not a result of `bench run`" in done.stderr
