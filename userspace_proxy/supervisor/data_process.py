"""The life of the data process: no privilege, an event loop, and a data path that control processes come and go for."""

from __future__ import annotations

import asyncio

from userspace_proxy.dataplane.remote.server import DataServer, SetUpLogging
from userspace_proxy.node.privileges import die_with_parent, drop_privileges
from userspace_proxy.supervisor.lifeline import Lifeline


def give_up_privileges() -> None:
    """Keep nothing that relaying does not need. Raises OSError."""
    drop_privileges()
    die_with_parent()


async def serve_data(descriptor: int, set_up_logging: SetUpLogging) -> None:
    """Relay until cancelled, or until the supervisor at the other end of the descriptor is gone."""
    server = DataServer(set_up_logging)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.run())
        lifeline = Lifeline(descriptor, on_peer=server.attach, on_end=serving.cancel)
        telling = tasks.create_task(lifeline.tell_alive_forever())
        serving.add_done_callback(lambda _: telling.cancel())
    lifeline.close()
