"""The scenarios that the tests look at. They run side by side: nothing here is asked about speed."""

from __future__ import annotations

import sys
from pathlib import Path

BALANCER = [sys.executable, str(Path(__file__).with_name("balancer.py"))]

TCP_FAULTS = ["none", "skewed", "sticky", "runs", "resetting", "closing", "corrupting", "refusing", "frozen",
              "slow-sometimes"]  # fmt: skip
UDP_FAULTS = ["none", "dropping", "doubling", "damaging", "wandering", "one-endpoint-ignored"]

AFFINITY_FAULTS = ["none", "affinity", "forgetful-affinity"]


def faulty(fault: str, **options: object) -> dict[str, object]:
    """Return the target that has this fault, called after it."""
    command = [*BALANCER, fault, "{listen}", "{backends}"]
    return {"kind": "command", "name": fault, "command": command, **options}


def a_test(name: str, load: dict[str, object], **more: object) -> dict[str, object]:
    return {"name": name, "load": load, **more}


def event_test(kind: str, **event: object) -> dict[str, object]:
    """Return a test in which something happens to backend 2, with connections that are held meanwhile."""
    load = {"kind": "connect", "connections": 32, "rate": "100/s", "duration": "2s", "timeout": "1s"}
    return a_test(
        kind, load, background={"kind": "hold", "connections": 12, "ping": "200ms"},
        events=[{"at": "400ms", "kind": kind, **event}],
    )  # fmt: skip


_PACED = {"kind": "connect", "connections": 32, "rate": "500/s", "duration": "1200ms", "timeout": "1s"}
_VISITS = {"kind": "visits", "clients": 48, "at": ["0s", "200ms", "400ms", "2600ms"], "duration": "2800ms"}

SCENARIOS: dict[str, dict[str, object]] = {
    "stall": {
        "targets": [faulty("none", udp=False)],
        "tests": [
            a_test(
                "freeze", {"kind": "requests", "connections": 16, "rate": "100/s", "duration": "10s"},
                events=[{"at": "4s", "kind": "freeze_target", "lasts": "2s"}],
            )
        ],
    },
    "tcp": {"targets": [faulty(fault, udp=False) for fault in TCP_FAULTS], "tests": [a_test("connect", _PACED)]},
    "udp": {
        "targets": [faulty(fault) for fault in UDP_FAULTS],
        "tests": [
            a_test("udp", {"kind": "udp", "rate": "800/s", "duration": "1500ms", "datagrams_per_flow": 5}),
        ],
    },
    "standing_still": {
        "targets": [faulty("stalling", udp=False)],
        "tests": [a_test("requests", {"kind": "requests", "connections": 8, "rate": "200/s", "duration": "2500ms"})],
    },
    "affinity": {
        "targets": [*(faulty(fault, udp=False) for fault in AFFINITY_FAULTS), {"kind": "proxy"}],
        "tests": [a_test("affinity", _VISITS, affinity="1s", thresholds=["affinity violations == 0"])],
    },
    "held": {
        "targets": [faulty("none", udp=False), faulty("breaking", udp=False)],
        "tests": [a_test("hold", {"kind": "hold", "connections": 20, "ping": "200ms", "duration": "1s"})],
    },
    "endings": {
        "targets": [faulty("half-deaf", udp=False), {"kind": "proxy"}],
        "tests": [a_test("endings", {"kind": "endings", "each": 2})],
    },
    "direct": {
        "targets": [{"kind": "direct", "judged": True}],
        "processes": 2,
        "duration": "500ms",
        "tests": [
            a_test("connect", {"kind": "connect", "connections": 8}),
            a_test("requests", {"kind": "requests", "connections": 8, "reply_size": "100KB"}),
            a_test("poisson", {"kind": "requests", "rate": "300/s", "arrivals": "poisson"}),
            a_test("several", {"kind": "requests", "connections": 4, "requests_per_connection": 5}),
            a_test("http", {"kind": "http", "connections": 8}),
            a_test("http close", {"kind": "http", "connections": 8, "keep_alive": False}),
            a_test("download", {"kind": "download", "streams": 3}),
            a_test("upload", {"kind": "upload", "streams": 3}),
            a_test("hold", {"kind": "hold", "connections": 50, "ping": "100ms"}),
            a_test("udp", {"kind": "udp", "flows": 16}),
            a_test("udp rate", {"kind": "udp", "flows": 16, "rate": "500/s"}),
            a_test("endings", {"kind": "endings", "each": 2}),
        ],
    },
    "proxy": {
        "targets": [{"kind": "proxy"}],
        "backends": {"count": 3, "spare": 1},
        "tests": [
            a_test("round robin", {"kind": "connect", "connections": 1, "duration": "400ms"},
                 checks={"balance": "round_robin"}, thresholds=["round robin violations == 0", "errors == 0"]),
            event_test("kill", backend=2, lasts="800ms"),
            event_test("freeze", backend=2, lasts="800ms"),
            event_test("refuse", backend=2),
            event_test("reset", backend=2, lasts="800ms"),
            event_test("add", backend=4),
            event_test("remove", backend=2),
            event_test("churn", rate="5/s", lasts="1s", backend=4),
        ],
    },
    "peers": {
        "targets": [{"kind": "haproxy"}, {"kind": "nginx"}],
        "backends": {"count": 3, "spare": 1},
        "tests": [
            a_test("connect", {"kind": "connect", "connections": 32, "rate": "200/s", "duration": "500ms"}),
            event_test("add", backend=4),
            event_test("remove", backend=2),
            a_test("affinity", {**_VISITS, "at": ["0s", "200ms"], "duration": "400ms"}, affinity="2s"),
            a_test("udp", {"kind": "udp", "rate": "300/s", "duration": "500ms"}),
            a_test("endings", {"kind": "endings", "each": 1}),
        ],
    },
    "same": {
        "targets": [faulty("none", udp=False, name="one"), faulty("none", udp=False, name="other")],
        "repetitions": 5,
        "tests": [a_test("requests", {"kind": "requests", "connections": 8, "rate": "300/s", "duration": "500ms"})],
    },
}  # fmt: skip
