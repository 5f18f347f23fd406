"""`userspace-proxy local` as a user meets it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from .conftest import PROGRAM, RunLocal, RunToEnd, ask, connection, free_port, manifest, until

StartBackends = Callable[[int], Awaitable[list[int]]]


async def test_a_file_goes_in_and_traffic_is_balanced(local: RunLocal, backends: StartBackends, tmp_path: Path) -> None:
    ports, port = await backends(3), free_port()
    (tmp_path / "shop.yaml").write_text(manifest("web", port, ports))
    async with local("-f", tmp_path / "shop.yaml") as running:
        answers = Counter([await ask(port) for _ in range(9)])
        assert answers == {b"%d" % backend: 3 for backend in ports}
        assert running.table.splitlines()[0].split() == [
            "SERVICE", "PORT", "PROTOCOL", "LOCAL", "ADDRESS", "ENDPOINTS", "AFFINITY"
        ]  # fmt: skip
        assert f"shop/web:main  TCP       127.0.0.1:{port}" in running.table
        assert all(f"127.0.0.1:{backend}" in running.table for backend in ports)
        assert await running.stop() == 0


async def test_stdin_json_and_lists_are_read_as_kubectl_prints_them(local: RunLocal, backends: StartBackends) -> None:
    (backend,), port = await backends(1), free_port()
    items = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"clusterIP": "10.96.0.1", "sessionAffinity": "ClientIP", "ports": [{"port": port}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": {"name": "web", "namespace": "shop"},
            "subsets": [{"addresses": [{"ip": "127.0.0.1"}], "ports": [{"port": backend}]}],
        },
    ]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    async with local("-f", "-", stdin=listed.encode()) as running:
        assert await ask(port) == b"%d" % backend
        assert "ClientIP 3h0m0s" in running.table


async def test_a_directory_is_read_and_new_files_are_found(
    local: RunLocal, backends: StartBackends, tmp_path: Path
) -> None:
    (one, two), first, second = await backends(2), free_port(), free_port()
    (tmp_path / "one.yaml").write_text(manifest("one", first, [one]))
    (tmp_path / "notes.txt").write_text("not a manifest: [")
    async with local("-f", tmp_path):
        assert await ask(first) == b"%d" % one
        (tmp_path / "two.yml").write_text(manifest("two", second, [two]))
        assert await until(lambda: _answers(second, two), 2.0) < 1.0


async def test_a_change_takes_effect_within_a_second_and_spares_other_connections(
    local: RunLocal, backends: StartBackends, tmp_path: Path
) -> None:
    (one, two), first, second = await backends(2), free_port(), free_port()
    path = tmp_path / "shop.yaml"
    path.write_text(manifest("one", first, [one]) + "---\n" + manifest("two", second, [one]))
    async with local("-f", path), connection(first) as (reader, writer):
        assert await reader.readexactly(len(str(one))) == b"%d" % one
        path.write_text(manifest("one", first, [one]) + "---\n" + manifest("two", second, [two]))
        assert await until(lambda: _answers(second, two), 2.0) < 1.0
        writer.write_eof()
        assert await reader.read() == b""


async def test_a_broken_file_keeps_the_last_state_and_names_file_line_and_reason(
    local: RunLocal, backends: StartBackends, tmp_path: Path
) -> None:
    (one, two), port = await backends(2), free_port()
    path = tmp_path / "shop.yaml"
    path.write_text(manifest("web", port, [one]))
    async with local("-f", path) as running:
        path.write_text(manifest("web", port, [two]).replace(f"port: {two}", "port: eighty"))
        line = await running.logged("shop.yaml:")
        assert f"{path}:10: EndpointSlice shop/web-{two}: ports[0].port" in line
        assert await ask(port) == b"%d" % one
        path.write_text(manifest("web", port, [two]))
        await until(lambda: _answers(port, two), 2.0)


async def test_no_file_is_needed(local: RunLocal, backends: StartBackends) -> None:
    (backend,), port = await backends(1), free_port()
    async with local("--service", f"web:{port}=localhost:{backend}") as running:
        assert f"default/web   TCP       127.0.0.1:{port}" in running.table
        assert await ask(port) == b"%d" % backend


async def test_endpoints_by_hand_replace_those_of_the_file(
    local: RunLocal, backends: StartBackends, tmp_path: Path
) -> None:
    (listed, by_hand), port = await backends(2), free_port()
    (tmp_path / "shop.yaml").write_text(manifest("web", port, [listed]))
    async with local("-f", tmp_path / "shop.yaml", "--endpoints", f"shop/web:main=127.0.0.1:{by_hand}"):
        assert [await ask(port) for _ in range(3)] == [b"%d" % by_hand] * 3


async def test_a_service_without_endpoints_is_listed_and_closes_its_connections(
    local: RunLocal, tmp_path: Path
) -> None:
    port = free_port()
    (tmp_path / "shop.yaml").write_text(manifest("web", port, []))
    async with local("-f", tmp_path / "shop.yaml") as running:
        assert "none: connections are closed" in running.table
        with contextlib.suppress(ConnectionError):
            assert await ask(port) == b""


async def test_tcp_and_udp_on_one_port_are_both_served(local: RunLocal, backends: StartBackends) -> None:
    (backend,), port = await backends(1), free_port()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
    ):
        echo.bind(("127.0.0.1", 0))
        arguments = [f"dns:{port}/udp=127.0.0.1:{echo.getsockname()[1]}", f"web:{port}=127.0.0.1:{backend}"]
        async with local("--service", arguments[0], "--service", arguments[1]):
            assert await ask(port) == b"%d" % backend
            for sock in (echo, client):
                sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendto(client, b"ping", ("127.0.0.1", port))
            data, session = await loop.sock_recvfrom(echo, 100)
            await loop.sock_sendto(echo, data + b" pong", session)
            assert await loop.sock_recvfrom(client, 100) == (b"ping pong", ("127.0.0.1", port))


async def test_all_ports_that_cannot_be_had_are_named_with_options_to_paste(
    run_to_end: RunToEnd, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        taken, shared = occupant.getsockname()[1], free_port()
        documents = [manifest("web", taken, []), manifest("one", shared, []), manifest("two", shared, [])]
        (tmp_path / "shop.yaml").write_text("---\n".join(documents))
        ended = await run_to_end("local", "-f", tmp_path / "shop.yaml")
    assert ended.exit_code == 1
    assert ended.stdout == ""
    assert f"shop/web:main (TCP) on 127.0.0.1:{taken}: address already in use" in ended.stderr
    assert f"shop/two:main (TCP) on 127.0.0.1:{shared}: in use by shop/one:main" in ended.stderr
    assert "--port-map shop/web:main=" in ended.stderr
    assert "--port-map shop/two:main=" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_the_suggested_options_work(run_to_end: RunToEnd, local: RunLocal, tmp_path: Path) -> None:
    shared = free_port()
    (tmp_path / "shop.yaml").write_text(manifest("one", shared, []) + "---\n" + manifest("two", shared, []))
    ended = await run_to_end("local", "-f", tmp_path / "shop.yaml")
    options = ended.stderr.splitlines()[-1].split()
    async with local("-f", tmp_path / "shop.yaml", *options) as running:
        assert f"127.0.0.1:{options[1].rpartition('=')[2]}" in running.table


async def test_auto_ports_moves_just_those_that_collide(
    local: RunLocal, backends: StartBackends, tmp_path: Path
) -> None:
    (backend,), shared = await backends(1), free_port()
    (tmp_path / "shop.yaml").write_text(manifest("one", shared, []) + "---\n" + manifest("two", shared, [backend]))
    async with local("-f", tmp_path / "shop.yaml", "--auto-ports") as running:
        rows = [line.split() for line in running.table.splitlines()[1:3]]
        assert rows[0][2] == f"127.0.0.1:{shared}"
        assert rows[1][2] != f"127.0.0.1:{shared}"
        assert await ask(int(rows[1][2].rpartition(":")[2])) == b"%d" % backend


async def test_keep_going_serves_the_rest_and_claims_the_port_when_it_is_free(
    local: RunLocal, backends: StartBackends, tmp_path: Path
) -> None:
    (one, two), free = await backends(2), free_port()
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        taken = occupant.getsockname()[1]
        (tmp_path / "shop.yaml").write_text(manifest("one", taken, [one]) + "---\n" + manifest("two", free, [two]))
        async with local("-f", tmp_path / "shop.yaml", "--keep-going") as running:
            assert "not served" in running.table
            assert await ask(free) == b"%d" % two
            occupant.close()
            await until(lambda: _answers(taken, one), 5.0)


async def test_nothing_is_listened_on_by_half(run_to_end: RunToEnd, local: RunLocal, backends: StartBackends) -> None:
    (backend,) = await backends(1)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as occupant:
        port = occupant.getsockname()[1]
        service = ("--service", f"web:{port}=127.0.0.1:{backend}")
        both = await run_to_end("local", *service, "--listen-address", "127.0.0.1", "--listen-address", "::1")
        assert both.exit_code == 1
        assert f"[::1]:{port}: address already in use" in both.stderr
        async with local(*service):  # 127.0.0.1 alone was asked for, and is free
            assert await ask(port) == b"%d" % backend


async def test_a_privileged_port_says_what_to_do(run_to_end: RunToEnd) -> None:
    without_right = ("setpriv", "--bounding-set=-net_bind_service", "--inh-caps=-net_bind_service")
    ended = await run_to_end("local", "--service", "web:80=127.0.0.1:8080", prefix=without_right)
    assert ended.exit_code == 1
    assert "default/web (TCP) on 127.0.0.1:80: permission denied" in ended.stderr
    assert "CAP_NET_BIND_SERVICE" in ended.stderr
    assert re.search(r"--port-map default/web:80=80[89]\d\n", ended.stderr)  # 8080, where nobody else has that


BAD_PORT = """
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  ports:
    - port: 99999
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BAD_PORT, ":7: Service default/web: spec.ports[0].port: "),
        ("a: [1\nb: 2\n", ":2: "),
        ("apiVersion: v1\nkind: ConfigMap\n", "nothing to serve"),
    ],
)
async def test_bad_input_ends_with_one_line_that_names_the_place(
    run_to_end: RunToEnd, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    ended = await run_to_end("local", "-f", tmp_path / "bad.yaml")
    errors = [line for line in ended.stderr.splitlines() if "WARNING" not in line]
    assert ended.exit_code == 1
    assert len(errors) == 1
    assert message in errors[0]


async def test_a_missing_file_is_named(run_to_end: RunToEnd, tmp_path: Path) -> None:
    ended = await run_to_end("local", "-f", tmp_path / "absent.yaml")
    assert ended.exit_code == 1
    assert "absent.yaml: cannot be read: No such file or directory" in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--service", "web:80"],
        ["--service", "web=1.2.3.4:80"],
        ["--service", "web:80=1.2.3.4"],
        ["--service", "web:8080=127.0.0.1:80", "--port-map", "web:8080=99999"],
        ["--service", "web:8080=127.0.0.1:80", "--listen-address", "localhost"],
        ["--service", "web:8080=127.0.0.1:80", "--udp-timeout", "5"],
        ["--service", "web:8080=127.0.0.1:80", "--udp-timeout", "0s"],
        ["--service", "web:8080=127.0.0.1:80", "--no-such-option"],
        ["-f", "shop.yaml", "--kubeconfig", "config"],
        ["--service", "web:8080="],
        ["--service", "web:8080=127.0.0.1:80", "--listen-address", "0.0.0.0", "--listen-address", "127.0.0.1"],
        ["--service", "web:8080=127.0.0.1:80", "--service", "web:8443=127.0.0.1:443"],
        ["--service", "web:8080=127.0.0.1:80", "--endpoints", "web=127.0.0.1:1", "--endpoints", "web=127.0.0.1:2"],
        ["--service", "web:8080=127.0.0.1:80", "--port-map", "web:8080=8081", "--port-map", "web:8080=8082"],
    ],
)
async def test_wrong_options_are_refused_with_the_usage(run_to_end: RunToEnd, arguments: list[str]) -> None:
    ended = await run_to_end("local", *arguments)
    assert ended.exit_code == 2
    assert "Usage:" in ended.stderr
    assert "Error: " in ended.stderr


async def test_a_selection_that_selects_nothing_is_named(run_to_end: RunToEnd, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(manifest("web", free_port(), []))
    ended = await run_to_end("local", "-f", tmp_path / "shop.yaml", "--only", "shop/webb")
    assert ended.exit_code == 1
    assert "--only: shop/webb: there is no such service" in ended.stderr
    ended = await run_to_end("local", "-f", tmp_path / "shop.yaml", "--namespace", "shopp")
    assert ended.exit_code == 1
    assert "no Service that could be proxied was found in shopp" in ended.stderr


async def test_an_option_that_fits_no_service_is_named(run_to_end: RunToEnd) -> None:
    ended = await run_to_end("local", "--service", "web:8080=127.0.0.1:80", "--port-map", "shop/web:80=8081")
    assert ended.exit_code == 1
    assert "--port-map: shop/web:80: there is no such service" in ended.stderr


@pytest.mark.parametrize("verbosity", [["-v", "2"], ["-v=2"], ["--v=2"], ["-v2"], ["--v", "2"]])
async def test_verbosity_is_written_as_in_the_daemon(run_to_end: RunToEnd, verbosity: list[str]) -> None:
    ended = await run_to_end("local", *verbosity, "--service", "web:8080=127.0.0.1:80", "--port-map", "no/such:1=8081")
    assert ended.exit_code == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_closes_listeners_at_once_and_lets_connections_end(
    local: RunLocal, backends: StartBackends, number: int
) -> None:
    (backend,), port = await backends(1), free_port()
    async with local("--service", f"web:{port}=127.0.0.1:{backend}") as running:
        async with connection(port) as (reader, writer):
            await reader.readexactly(len(str(backend)))
            running.process.send_signal(number)
            await until(lambda: _is_refused(port), 1.0)
            writer.write_eof()
            assert await reader.read() == b""
        async with asyncio.timeout(2):
            assert await running.process.wait() == 0


async def test_the_drain_ends_after_its_time_out(local: RunLocal, backends: StartBackends) -> None:
    (backend,), port = await backends(1), free_port()
    async with local("--service", f"web:{port}=127.0.0.1:{backend}", "--drain-timeout", "300ms") as running:
        async with connection(port) as (reader, _writer):
            await reader.readexactly(len(str(backend)))
            start = time.monotonic()
            assert await running.stop() == 0
            assert 0.25 < time.monotonic() - start < 2
            assert await reader.read() == b""


async def test_a_second_signal_does_not_wait_for_connections(local: RunLocal, backends: StartBackends) -> None:
    (backend,), port = await backends(1), free_port()
    async with local("--service", f"web:{port}=127.0.0.1:{backend}", "--drain-timeout", "1h") as running:
        async with connection(port) as (reader, _writer):
            await reader.readexactly(len(str(backend)))
            running.process.send_signal(signal.SIGINT)
            await until(lambda: _is_refused(port), 1.0)
            assert await running.stop(signal.SIGINT) == 0


async def test_the_log_can_be_json(local: RunLocal, backends: StartBackends, tmp_path: Path) -> None:
    (one, two), port = await backends(2), free_port()
    path = tmp_path / "shop.yaml"
    path.write_text(manifest("web", port, [one]))
    async with local("-f", path, "--log-format=json") as running:
        path.write_text(manifest("web", port, [two]))
        entry = json.loads(await running.logged("shop/web:main"))
        assert entry["level"] == "info"
        assert entry["msg"] == f"shop/web:main (TCP): 127.0.0.1:{port} -> 127.0.0.1:{two}"


async def test_the_program_says_its_version_and_helps(run_to_end: RunToEnd) -> None:
    version, help_text = await run_to_end("--version"), await run_to_end("local", "--help")
    assert version.stdout.startswith("userspace-proxy 0.")
    assert version.exit_code == help_text.exit_code == 0
    assert "--port-map" in help_text.stdout


async def _answers(port: int, backend: int) -> bool:
    try:
        return await ask(port) == b"%d" % backend
    except ConnectionError:
        return False


async def _is_refused(port: int) -> bool:
    try:
        async with connection(port):
            return False
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was waiting to be accepted
        return False


async def test_each_connection_and_session_has_a_line_from_verbosity_2_on(
    local: RunLocal, backends: StartBackends
) -> None:
    (backend,), port = await backends(1), free_port()
    options = ("--service", f"web:{port}=127.0.0.1:{backend}", "--service", f"dns:{port}/udp=127.0.0.1:{backend}")
    async with local("-v", "2", *options) as running:
        assert await ask(port) == b"%d" % backend
        assert f"default/web: 127.0.0.1 is connected to 127.0.0.1:{backend}" in await running.logged("connected")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.sendto(b"?", ("127.0.0.1", port))
            assert f"default/dns: 127.0.0.1 has a session with 127.0.0.1:{backend}" in await running.logged("session")


async def test_with_auto_ports_changes_are_logged_too(local: RunLocal, backends: StartBackends, tmp_path: Path) -> None:
    (one, two), port = await backends(2), free_port()
    path = tmp_path / "shop.yaml"
    path.write_text(manifest("web", port, [one]))
    async with local("-f", path, "--auto-ports") as running:
        path.write_text(manifest("web", port, [two]))
        assert f"127.0.0.1:{two}" in await running.logged("shop/web:main")


async def test_an_address_that_is_not_here_is_refused_without_a_search_for_ports(run_to_end: RunToEnd) -> None:
    ended = await run_to_end("local", "--service", "web:8080=127.0.0.1:80", "--listen-address", "192.0.2.1")
    assert ended.exit_code == 1
    assert "default/web (TCP) on 192.0.2.1:8080: " in ended.stderr
    assert "other ports" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_while_standard_input_says_nothing(number: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "local", "-f", "-", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None

    async def reads_input() -> bool:  # its reader is a thread besides the main one
        return len(os.listdir(f"/proc/{process.pid}/task")) > 1

    try:
        await until(reads_input, 10)
        process.send_signal(number)
        async with asyncio.timeout(5):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "> >(true)"])
async def test_it_serves_whatever_has_become_of_its_standard_streams(
    backends: StartBackends, tmp_path: Path, streams: str
) -> None:
    (backend,), port = await backends(1), free_port()
    path = tmp_path / "shop.yaml"
    path.write_text(manifest("web", port, [backend]))
    program = shlex.join([*PROGRAM, "local", "-f", str(path)])
    process = await asyncio.create_subprocess_exec("bash", "-c", f"exec {program} {streams}")

    async def is_answered() -> bool:
        with contextlib.suppress(OSError):
            return await ask(port) == b"%d" % backend
        return False

    try:
        await until(is_answered, 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        exit_code = await process.wait()
    assert exit_code == 0
