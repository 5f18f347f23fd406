"""What wrk and iperf3 print, as they print it."""

from __future__ import annotations

import json

import pytest

from userspace_proxy.bench.analysis.metrics import metric_called
from userspace_proxy.bench.engines import iperf3_result, wrk_result
from userspace_proxy.bench.processes import StartFailed
from userspace_proxy.bench.results import RunResult

WRK = """Running 2s test @ http://127.0.1.1:43535/?size=64
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   193.57us  236.43us   5.15ms   98.23%
    Req/Sec    76.45k     4.62k   82.32k    85.00%
  Latency Distribution
     50%  167.00us
     75%  180.00us
     90%  205.00us
     99%    1.20ms
  152095 requests in 2.00s, 19.44MB read
  Socket errors: connect 0, read 3, write 0, timeout 1
  Non-2xx or 3xx responses: 2
Requests/sec:  76031.40
Transfer/sec:      9.72MB
"""


def test_wrks_summary_becomes_a_result() -> None:
    load = wrk_result(WRK)
    assert load.rate == pytest.approx(76047.5)
    assert load.failures == {"read": 3, "time-out": 1, "status": 2}
    run = RunResult(target="t", test="t", repetition=0, duration_s=2.0, load=load)
    percentiles = {name: metric_called(name) for name in ("p50", "p99", "p99.9", "max")}
    values = {name: metric.of([run]) for name, metric in percentiles.items() if metric}
    assert values["p50"] == pytest.approx(167e-6, rel=0.01)
    assert values["p99"] == pytest.approx(1.2e-3, rel=0.01)
    assert values["p99.9"] is values["max"] is None  # wrk does not say


def test_iperf3s_summary_becomes_a_result() -> None:
    summary = {
        "end": {"sum_received": {"bytes": 30}, "streams": [{"receiver": {"bytes": 10}}, {"receiver": {"bytes": 20}}]}
    }
    load = iperf3_result(json.dumps(summary), "download")
    assert (load.moved_bytes, load.streams) == (30.0, [10.0, 20.0])


def test_what_they_say_otherwise_is_an_error() -> None:
    with pytest.raises(StartFailed, match="unable to connect"):
        wrk_result("unable to connect to 127.0.0.1:1 Connection refused")
    with pytest.raises(StartFailed, match="busy"):
        iperf3_result('{"error": "the server is busy"}', "upload")
