"""Whose process listens on a port, and how servers are stopped."""

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from flagcore_serving.launch.server import Instance
from flagcore_serving.trial import servers
from flagcore_serving.trial.servers import Server, free_port, is_owned_by, listeners

LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


def test_a_port_is_owned_by_the_process_that_listens_and_by_no_other() -> None:
    child = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    port = int(child.stdout.readline())
    assert is_owned_by(port, [child.pid])
    assert is_owned_by(port, [os.getpid(), child.pid])
    assert not is_owned_by(port, [os.getpid()])
    child.communicate("\n")
    assert not listeners(port)
    assert not is_owned_by(free_port(), [os.getpid()])


def test_a_port_with_two_listeners_is_owned_only_if_both_are_children() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own, socket.socket(socket.AF_INET6) as other:
        port = own.getsockname()[1]
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            other.bind(("::1", port))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        other.listen()
        assert len(listeners(port)) == 2
        assert is_owned_by(port, [os.getpid()])
        assert not is_owned_by(port, [os.getppid()])


@pytest.mark.slow
@pytest.mark.parametrize("end_s", [math.inf, 0.0])
def test_servers_that_ignore_sigterm_are_killed_together(
    end_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GRACE_SECONDS", 1.0 if math.isinf(end_s) else 60.0)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    instance = Instance(argv=(sys.executable, "-c", ignores))
    started = [Server(f"server {number}", instance, tmp_path / f"{number}.log", ()) for number in range(8)]
    for server in started:
        server.start(None)
    while any(not server.log.read_text() for server in started):
        time.sleep(0.01)
    processes = [psutil.Process(server.pids()[0]) for server in started]
    begun = time.monotonic()
    servers.stop_all(started, time.monotonic() + end_s)
    assert time.monotonic() - begun < 6.0
    assert not any(process.is_running() for process in processes)
