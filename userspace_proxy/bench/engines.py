"""Other programs as generators: wrk for HTTP, iperf3 for bulk. Their own words are kept, nothing is added to them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from userspace_proxy.bench.addresses import Address
from userspace_proxy.bench.fleet import Fleet
from userspace_proxy.bench.histograms import encode, histogram_of
from userspace_proxy.bench.processes import StartFailed, on_cpus
from userspace_proxy.bench.results import LoadResult
from userspace_proxy.bench.scenario import Download, Http, Load, Upload
from userspace_proxy.bench.targets.base import Target

_GRACE_S = 15.0
_WRK_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_WRK_PERCENTILE = re.compile(r"^\s+(\d+(?:\.\d+)?)%\s+([\d.]+)(us|ms|s|m)\s*$", re.MULTILINE)
_WRK_REQUESTS = re.compile(r"(\d+) requests in ([\d.]+)(us|ms|s|m)")
_WRK_ERRORS = re.compile(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)")
_WRK_STATUS = re.compile(r"Non-2xx or 3xx responses: (\d+)")


def is_foreign(load: Load) -> bool:
    """Tell whether another program makes the load."""
    return engine_of(load) != "python"


def engine_of(load: Load) -> str:
    """Return the name of the engine."""
    return load.engine if isinstance(load, Http | Download | Upload) else "python"


def why_not(load: Load) -> str | None:
    """Return what has to be installed first, or None."""
    engine = engine_of(load)
    return None if engine == "python" or shutil.which(engine) else f"{engine} is not installed"


async def run(
    load: Load, address: Address, duration_s: float, cpus: Collection[int], fleet: Fleet, target: Target,
    endpoints: Sequence[int],
) -> LoadResult:  # fmt: skip
    """Return what another program has measured. Raises StartFailed with what it complained about."""
    if isinstance(load, Http):
        return wrk_result(await _output(_wrk_command(load, address, duration_s), cpus))
    assert isinstance(load, Download | Upload)
    return await _run_iperf3(load, duration_s, cpus, fleet, target, endpoints)


def wrk_result(text: str) -> LoadResult:
    """Return wrk's summary as a result.

    wrk prints a handful of percentiles only: the histogram has one sample for each, so that they can be shown, and is
    no basis for others. Its loop is closed, so its latencies leave out what a stall would have done to other clients.
    """
    requests = _WRK_REQUESTS.search(text)
    if requests is None:
        raise StartFailed(f"wrk said something else than expected: {text[-500:]}")
    done, took_s = int(requests[1]), float(requests[2]) * _WRK_UNITS[requests[3]]
    failures = {}
    if errors := _WRK_ERRORS.search(text):
        failures = dict(zip(("connect", "read", "write", "time-out"), map(int, errors.groups()), strict=True))
    if status := _WRK_STATUS.search(text):
        failures["status"] = int(status[1])
    points = {float(p): float(v) * _WRK_UNITS[unit] for p, v, unit in _WRK_PERCENTILE.findall(text)}
    return LoadResult(
        kind="http (wrk)",
        sent=done + sum(failures.values()),
        completed=done,
        rate=done / took_s,
        histogram=encode(histogram_of(_samples_with(points))),
        is_coarse=True,
        failures={kind: count for kind, count in failures.items() if count},
    )


def iperf3_result(text: str, kind: str) -> LoadResult:
    """Return iperf3's summary as a result."""
    try:
        summary = json.loads(text)
        received = summary["end"]["sum_received"]
        streams = [float(stream["receiver"]["bytes"]) for stream in summary["end"]["streams"]]
    except (ValueError, KeyError, TypeError):
        raise StartFailed(f"iperf3 said something else than expected: {text[-500:]}") from None
    return LoadResult(kind=f"{kind} (iperf3)", moved_bytes=float(received["bytes"]), streams=streams)


def _samples_with(points: dict[float, float]) -> list[float]:
    """Return a thousand values that have these percentiles."""
    samples: list[float] = []
    for percent, value in sorted(points.items()):
        samples += [value] * (round(percent * 10) - len(samples))
    return samples + samples[-1:] * (1000 - len(samples))


def _wrk_command(load: Http, address: Address, duration_s: float) -> list[str]:
    host, port = address
    path = load.path + ("&" if "?" in load.path else "?") + f"size={load.reply_size}"
    headers = [word for name, value in load.headers.items() for word in ("-H", f"{name}: {value}")]
    close = [] if load.keep_alive else ["-H", "Connection: close"]
    seconds = max(1, round(duration_s))
    return [
        "wrk",
        "-t1",
        f"-c{load.connections}",
        f"-d{seconds}s",
        "--latency",
        *headers,
        *close,
        f"http://{host}:{port}{path}",
    ]


async def _run_iperf3(
    load: Download | Upload, duration_s: float, cpus: Collection[int], fleet: Fleet, target: Target,
    endpoints: Sequence[int],
) -> LoadResult:  # fmt: skip
    """Run iperf3 through the target to a server of its own that takes the place of one backend.

    iperf3 needs all its connections to meet one server, so the target gets a single endpoint for the time.
    """
    backend = fleet[endpoints[0]]
    host, port = backend.address
    others = [fleet[number].address for number in endpoints]
    await backend.kill()
    with on_cpus(cpus):
        server = await asyncio.create_subprocess_exec(
            "iperf3", "-s", "-B", host, "-p", str(port), stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
    try:
        await target.set_endpoints([backend.address])
        await asyncio.sleep(1.5)  # until every kind of target has learnt of it, and the server listens
        to_host, to_port = target.addresses([backend.address], udp=False)[0]
        reverse = ["-R"] if isinstance(load, Download) else []
        seconds = max(1, round(duration_s))
        command = [
            "iperf3",
            "-c",
            to_host,
            "-p",
            str(to_port),
            "-P",
            str(load.streams),
            "-t",
            str(seconds),
            "-J",
            *reverse,
        ]
        return iperf3_result(await _output(command, cpus), load.kind)
    finally:
        server.kill()
        await server.wait()
        await backend.restore()
        await target.set_endpoints(others)


async def _output(command: Sequence[str], cpus: Collection[int]) -> str:
    with on_cpus(cpus):
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True, cwd=Path("/"),
        )  # fmt: skip
    try:
        async with asyncio.timeout(_GRACE_S + 60):
            out, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return out.decode(errors="replace")
