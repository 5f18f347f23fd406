"""The README's example works as printed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from userspace_proxy import Endpoint

README = Path(__file__).parents[2] / "README.md"


async def test_the_python_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), namespace)
    main = namespace["main"]
    assert callable(main)

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        endpoint = Endpoint(*server.sockets[0].getsockname())
        await main([endpoint])

    assert capsys.readouterr().out == f"b'ping'\n{endpoint} 1 4 4\n"
