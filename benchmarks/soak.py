"""Soaks a proxy in a process of its own for minutes or days, and tells what it holds meanwhile and afterwards.

    python benchmarks/soak.py [--minutes 10] [--clients 16] [--seed 1] [-- PROGRAM ...]

Clients and backends of tests/traffic/soaking.py hold conversations that end in every way there is, with slow readers
and urgent data, while endpoints come and go in the proxy's file. PROGRAM (default: `userspace-proxy`) is run with
`local -f FILE`. Prints its descriptors, its pipes and its memory, with all its processes, and the conversations so far.

Exit code 0 when every byte was accounted for at both ends, descriptors and pipes are back at what they were before the
load, and the resident memory of the second half grew by less than a tenth (and 8 MiB).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.traffic.peers import Peer, ServingBackend, eventually
from tests.traffic.soaking import Soak
from userspace_proxy import Endpoint
from userspace_proxy.bench.processes import family_of

PORTS = {True: 17080, False: 17081}
"""Of the services for orderly and for rough conversations."""
BACKENDS = 4
CHANGE_S = 0.2
TOLERATED_GROWTH, TOLERATED_BYTES = 1.1, 8 << 20


@dataclass(frozen=True, slots=True)
class Holding:
    """What a proxy holds, with all its processes."""

    descriptors: int
    pipes: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Holding:
        links: list[str] = []
        resident_pages = 0
        for process in family_of(pid):
            with contextlib.suppress(OSError):
                resident_pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
                for fd in os.listdir(f"/proc/{process}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        links.append(os.readlink(f"/proc/{process}/fd/{fd}"))
        pipes = sum(link.startswith("pipe:") for link in links)
        return cls(len(links), pipes, resident_pages * os.sysconf("SC_PAGE_SIZE"))

    def __str__(self) -> str:
        return f"{self.descriptors:5} descriptors {self.pipes:4} pipe ends {self.resident_bytes / (1 << 20):7.1f} MiB"


def write_services(path: Path, endpoints: Sequence[Endpoint]) -> None:
    """Write both services, with these endpoints, in one step."""
    documents: list[dict[str, object]] = []
    for port in PORTS.values():
        name = f"soak-{port}"
        spec = {"clusterIP": "10.96.0.1", "ports": [{"port": port}]}
        documents.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
        subsets = [{"addresses": [{"ip": e.address}], "ports": [{"port": e.port}]} for e in endpoints]
        documents.append({"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": name}, "subsets": subsets})
    new = path.with_name(".new")
    new.write_text(yaml.safe_dump_all(documents))
    new.replace(path)


@contextlib.contextmanager
def running(program: Sequence[str], path: Path) -> Iterator[int]:
    """Run the proxy, and return its process id when it listens."""
    log = path.with_name("log").open("w+")
    process = subprocess.Popen([*program, "local", "-f", str(path)], stdout=subprocess.DEVNULL, stderr=log)
    try:
        for port in PORTS.values():
            if not eventually(lambda port=port: process.poll() is None and accepts(port), within=20):  # type: ignore[misc]
                raise SystemExit(f"{shlex.join(program)} does not listen on port {port}")
        yield process.pid
        if process.poll() is not None:
            raise SystemExit(f"{shlex.join(program)} ended with {process.returncode}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        log.seek(0)
        print(*(line for line in log if "INFO" not in line), sep="", end="")
        log.close()


def accepts(port: int) -> bool:
    try:
        Peer.connect(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def soak(program: Sequence[str], minutes: float, clients: int, seed: int) -> bool:
    """Return whether all is well afterwards."""
    load = Soak(seed)
    backends = [ServingBackend(load.be_backend) for _ in range(BACKENDS)]
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "services.yaml")
        write_services(path, [backend.endpoint for backend in backends])
        with running(program, path) as pid:
            time.sleep(1)
            before = Holding.of(pid)
            print(f"before the load  {before}", flush=True)
            began = time.monotonic()
            until = began + minutes * 60
            threads: list[threading.Thread] = []
            for is_orderly, port in PORTS.items():
                threads += load.load(
                    ("127.0.0.1", port),
                    is_orderly=is_orderly,
                    clients=clients // 2,
                    goes_on=lambda: time.monotonic() < until,
                )
            held: list[Holding] = []
            while (now := time.monotonic()) < until:
                chosen = rng.sample(backends, rng.randrange(2, BACKENDS + 1))
                write_services(path, [backend.endpoint for backend in chosen])
                if now - began >= len(held) * minutes * 60 / 20:
                    held.append(Holding.of(pid))
                    told = ", ".join(f"{count} {how}" for how, count in sorted(load.outcomes.items()))
                    print(
                        f"after {now - began:7.0f} s  {held[-1]}  ends: {told}; faults: {len(load.faults)}", flush=True
                    )
                time.sleep(CHANGE_S)
            for thread in threads:
                thread.join()
            is_back = eventually(lambda: Holding.of(pid).descriptors <= before.descriptors, within=30)
            after = Holding.of(pid)
            print(f"after the load   {after}", flush=True)
    for backend in backends:
        backend.close()
    return judge(load, before, after, held, is_back=is_back)


def judge(load: Soak, before: Holding, after: Holding, held: Sequence[Holding], *, is_back: bool) -> bool:
    faults = [*load.faults[:20]]
    account = load.accounts[True]
    if account.request_bytes_sent != account.request_bytes_received:
        faults.append(f"{account.request_bytes_sent} bytes of requests sent, {account.request_bytes_received} received")
    if account.reply_bytes_sent != account.reply_bytes_received:
        faults.append(f"{account.reply_bytes_sent} bytes of replies sent, {account.reply_bytes_received} received")
    if not is_back:
        faults.append(f"{after.descriptors - before.descriptors} descriptors are left")
    if after.pipes > before.pipes:
        faults.append(f"{after.pipes - before.pipes} pipe ends are left")
    half = max(held[: len(held) // 2 + 1], key=lambda holding: holding.resident_bytes).resident_bytes
    if after.resident_bytes > max(half * TOLERATED_GROWTH, half + TOLERATED_BYTES):
        faults.append(f"memory grew from {half >> 20} to {after.resident_bytes >> 20} MiB in the second half")
    for fault in faults:
        print("FAULT", fault)
    moved = (account.request_bytes_received + account.reply_bytes_received) / 1e9
    print(f"{account.connections} orderly conversations with {moved:.2f} GB, {load.accounts[False].connections} rough")
    print("all is well" if not faults else "NOT all is well")
    return not faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("program", nargs="*", default=[str(Path(sys.executable).with_name("userspace-proxy"))])
    options = parser.parse_args()
    sys.exit(0 if soak(options.program, options.minutes, options.clients, options.seed) else 1)
