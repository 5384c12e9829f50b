"""Processes of a test, found by a mark in their environment, the ends of trials, and programs that stand for others."""

import time
from collections.abc import Callable
from pathlib import Path

from flagcore.contracts import RunningLaunch
from flagcore.domain.launch import Exit
from flagcore.launchers import guard

MARK = "TEST_MARK"


def marked(word: str) -> set[int]:
    """Return the processes with MARK=word in their environment."""
    text = f"{MARK}={word}\0".encode()
    return {pid for pid in guard.all_processes() if text in guard.read_proc(pid, "environ")}


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Return whether a condition comes true within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ended(running: RunningLaunch, seconds: float = 30.0) -> Exit:
    """Return the exit of a trial, which must end within some seconds."""
    found = running.wait(seconds)
    assert found is not None, "the trial has not ended"
    return found


def family(pid: int) -> tuple[int, int, int, bytes]:
    """Return the parent, the process group, the session and the state of a process that runs."""
    found = guard.read_ids(pid)
    assert found is not None
    return found


def program(file: Path, script: str, shell: str = "/bin/bash") -> Path:
    """Write a program that runs a script, with the folder that it is in, and return it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{shell}\n{script}\n")
    file.chmod(0o755)
    return file
