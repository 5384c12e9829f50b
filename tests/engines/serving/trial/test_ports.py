"""Whose process listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from flagcore.engines.serving.trial.servers import free_port, is_owned_by, listeners

LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


def test_a_free_port_has_no_listener() -> None:
    port = free_port()
    assert not listeners(port)
    assert not is_owned_by(port, [os.getpid()])


def test_a_port_is_owned_by_the_process_that_listens_and_by_no_other() -> None:
    child = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    port = int(child.stdout.readline())
    assert is_owned_by(port, [child.pid])
    assert is_owned_by(port, [os.getpid(), child.pid])
    assert not is_owned_by(port, [os.getpid()])
    child.communicate("\n")
    assert not listeners(port)


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
