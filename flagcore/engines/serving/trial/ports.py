"""Ports of this machine: a free one, and whose process listens on one (proc(5): /proc/net/tcp, /proc/PID/fd)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"


def free_port() -> int:
    """Return a TCP port that nothing listens on at 127.0.0.1. Raises OSError if there is none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listeners(port: int) -> frozenset[str]:
    """Return the sockets, as the names that they have among open files, that listen on `port`."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{words[9]}]")
    return frozenset(found)


def is_held_by(port: int, pids: Iterable[int]) -> bool:
    """Return whether one of the processes holds every socket that listens on `port`, and there is one."""
    wanted = listeners(port)
    held = {name for pid in pids for name in _open_files(pid)} if wanted else set()
    return bool(wanted) and wanted <= held


def _open_files(pid: int) -> set[str]:
    names = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                names.add(os.readlink(entry.path))
            except OSError:
                continue
    except OSError:
        pass
    return names
