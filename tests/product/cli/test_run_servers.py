"""`flag run` of servers: when they are ready, and that nothing outlives it. Real processes."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flagcore.domain.launch import PORT_VARIABLE
from flagcore.launchers.network import free_port
from tests.launchers.processes import within

pytestmark = pytest.mark.slow

SERVER = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > began + 0.7 else 503)
        self.end_headers()
    def log_message(self, *_): ...
began = time.monotonic()
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run's folder whose best is a server with a child in its own session, and its port."""
    port = free_port()
    (tmp_path / "best").mkdir()
    (tmp_path / "server.py").write_text(SERVER)
    ready = [f"http://127.0.0.1:{port}/health"]
    launch = {"ready": ready, "missing": "", "sample": [], "folder": str(tmp_path), "directory": str(tmp_path)}
    (tmp_path / "best" / "launch.json").write_text(json.dumps(launch))
    command = shlex.join([sys.executable, str(tmp_path / "server.py")])
    (tmp_path / "best.sh").write_text(f"exec {command} ${{{PORT_VARIABLE}:-{port}}}\n")
    yield tmp_path, port
    for each in left(tmp_path):
        each.kill()


def left(folder: Path) -> list[psutil.Process]:
    name = str(folder / "server.py")
    return [each for each in psutil.process_iter(["cmdline"]) if name in (each.info["cmdline"] or ())]


def started(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    code = "from flagcore.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, "run", str(folder), *options], stderr=subprocess.PIPE)


def ready_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode().strip()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)])
def test_servers_are_reported_when_they_are_ready_and_end_with_the_command(
    run: tuple[Path, int], number: signal.Signals, code: int
) -> None:
    folder, port = run
    process = started(folder)
    assert ready_line(process) == f"flag: ready at http://127.0.0.1:{port}"
    assert len(left(folder)) == 2
    os.kill(process.pid, number)
    assert process.wait(30) == code
    assert within(20, lambda: not left(folder))


def test_a_server_that_ends_ends_the_command_with_its_status(run: tuple[Path, int]) -> None:
    folder, _ = run
    (folder / "server.py").write_text("raise SystemExit(7)")
    assert started(folder).wait(30) == 7


def test_a_port_in_use_is_reported_and_its_owner_is_not_mistaken_for_the_server(run: tuple[Path, int]) -> None:
    folder, port = run
    with socket.create_server(("127.0.0.1", port)):
        process = started(folder)
        holder = f"{psutil.Process().name()} (process {os.getpid()})"
        assert ready_line(process).startswith(f"flag: port {port} is in use by {holder}")
        assert process.wait(30) == 2
    assert not left(folder)


def test_another_port_is_that_of_the_server(run: tuple[Path, int]) -> None:
    folder, other = run[0], str(free_port())
    process = started(folder, "--port", other)
    assert ready_line(process) == f"flag: ready at http://127.0.0.1:{other}"
    process.terminate()
    assert process.wait(30) == 130
