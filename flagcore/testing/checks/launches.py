"""Launches: changes to a trial before it starts."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flagcore.domain.launch import Launch
from flagcore.plugins import launcher
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

KEEP = {"KEEP": "me"}
SECONDS = 30.0
"""Time limit for the start of a trial."""


def prepared_launch_runs_the_command(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_prepare_launch")
    launch = Launch(argv=("echo", "the command"), folder="/tmp/trial", environment=KEEP)
    for task in plugin.tasks():
        prepared = plugin.loaded.prepare_launch(launch, task)
        if not " ".join(prepared.argv).endswith("echo the command"):
            yield Problem(
                f"flagcore_prepare_launch turns 'echo the command' into {' '.join(prepared.argv)!r} as argv",
                "put a wrapper before launch.argv and keep the rest",
            )
        if prepared.folder != launch.folder or prepared.directory != launch.directory:
            yield Problem("flagcore_prepare_launch changes the folder of the trial", "use replace(launch, ...)")


def prepared_launch_keeps_variables(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_prepare_launch")
    launch = Launch(argv=("echo", "the command"), folder="/tmp/trial", environment=KEEP)
    for task in plugin.tasks():
        if plugin.loaded.prepare_launch(launch, task).environment.get("KEEP") != "me":
            yield Problem(
                "flagcore_prepare_launch drops a variable of launch.environment",
                "extend it: replace(launch, environment={**launch.environment, ...})",
            )


def prepared_launch_keeps_limits(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_prepare_launch")
    launch = Launch(argv=("echo", "the command"), folder="/tmp/trial", timeout_seconds=60.0, memory_limit_bytes=2**30)
    for task in plugin.tasks():
        prepared = plugin.loaded.prepare_launch(launch, task)
        if (
            prepared.timeout_seconds > 60.0
            or prepared.memory_limit_bytes is None
            or prepared.memory_limit_bytes > 2**30
        ):
            yield Problem(
                "flagcore_prepare_launch raises timeout_seconds or memory_limit_bytes of a trial",
                "keep or lower the limits: they are the user's",
            )


def prepared_launch_can_be_stopped(plugin: Subject) -> Iterator[Problem]:
    with tempfile.TemporaryDirectory() as folder:
        started = Path(folder, "begun")
        code = f"import time; open({str(started)!r}, 'w').close(); time.sleep(60)"
        sleeper = Launch(argv=(sys.executable, "-S", "-c", code), folder=folder)
        for task in itertools.islice(plugin.tasks(), 1):
            running = launcher("local").start(plugin.loaded.prepare_launch(sleeper, task))
            until = time.monotonic() + SECONDS
            while not started.exists() and running.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            alive = started.exists() and running.poll() is None
            ended = running.stop()
            if not alive or ended.ended_by != "request":
                yield Problem(
                    f"flagcore_prepare_launch: a sleeping trial ended by {ended.ended_by} ({ended.code})",
                    "a wrapper must exist here, start the command and stay its parent",
                )
