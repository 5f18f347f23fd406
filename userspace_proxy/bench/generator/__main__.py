"""`python -m userspace_proxy.bench.generator`: jobs as JSON lines on stdin, answers on stdout.

An answer is its length in 4 bytes and that many bytes of msgpack. The process ends when its stdin is closed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback

import msgspec

from userspace_proxy.bench.generator.datagrams import Datagrams
from userspace_proxy.bench.generator.endings import hold_conversations
from userspace_proxy.bench.generator.exchanges import Exchanges
from userspace_proxy.bench.generator.job import Job, Raw
from userspace_proxy.bench.generator.loop import Loop
from userspace_proxy.bench.generator.streams import Streams
from userspace_proxy.bench.quantities import quantity_from_number
from userspace_proxy.bench.scenario import Download, Endings, Udp, Upload
from userspace_proxy.node.limits import raise_descriptor_limit


def carry_out(job: Job) -> Raw:
    """Return what the load of a job has met."""
    if isinstance(job.load, Endings):
        time.sleep(max(0.0, job.start_at - time.monotonic()))
        return hold_conversations(job)
    loop = Loop(job)
    work: Exchanges | Datagrams | Streams
    match job.load:
        case Udp():
            work = Datagrams(job, loop)
        case Download() | Upload():
            work = Streams(job, loop)
        case _:
            work = Exchanges(job, loop)
    watch = loop.run(work)
    raw = work.finish()
    raw.watch = watch
    loop.close()
    return raw


def main() -> None:
    """Carry out jobs until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us
    raise_descriptor_limit()
    decoder = msgspec.json.Decoder(Job, dec_hook=quantity_from_number)
    for line in sys.stdin.buffer:
        gc.collect()
        gc.disable()  # a collection in the middle would look like a slow target
        try:
            raw = carry_out(decoder.decode(line))
        except Exception:  # a fault of ours must reach the runner, not end as a hanging pipe
            raw = Raw(fault=traceback.format_exc())
        gc.enable()
        answer = memoryview(msgspec.msgpack.encode(raw))
        os.write(1, len(answer).to_bytes(4, "big"))
        while answer:
            answer = answer[os.write(1, answer) :]


if __name__ == "__main__":
    main()
