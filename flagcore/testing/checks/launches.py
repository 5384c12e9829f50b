"""Launches: what the plugin changes of a trial before it starts."""

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
"""How long a trial may take to begin."""


def prepared_launch_runs_the_command(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_prepare_launch")
    launch = Launch(argv=("echo", "the command"), folder="/tmp/trial", environment=KEEP)
    for task in plugin.tasks():
        prepared = plugin.loaded.prepare_launch(launch, task)
        if not " ".join(prepared.argv).endswith("echo the command"):
            yield Problem(
                message=f"flagcore_prepare_launch makes argv {' '.join(prepared.argv)!r} of 'echo the command'",
                fix="put a wrapper before launch.argv, and leave the rest",
            )
        if prepared.folder != launch.folder or prepared.directory != launch.directory:
            yield Problem(
                message="flagcore_prepare_launch changes the folder of the trial", fix="use replace(launch, ...)"
            )


def prepared_launch_keeps_variables(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_prepare_launch")
    launch = Launch(argv=("echo", "the command"), folder="/tmp/trial", environment=KEEP)
    for task in plugin.tasks():
        if plugin.loaded.prepare_launch(launch, task).environment.get("KEEP") != "me":
            yield Problem(
                message="flagcore_prepare_launch drops a variable of launch.environment",
                fix="add to it: replace(launch, environment={**launch.environment, ...})",
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
                message="flagcore_prepare_launch widens timeout_seconds or memory_limit_bytes of a trial",
                fix="leave the limits, or lower them: they are the user's",
            )


def prepared_launch_can_be_stopped(plugin: Subject) -> Iterator[Problem]:
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(folder, "begun")
        code = f"import time; open({str(begun)!r}, 'w').close(); time.sleep(60)"
        sleeper = Launch(argv=(sys.executable, "-S", "-c", code), folder=folder)
        for task in itertools.islice(plugin.tasks(), 1):
            running = launcher("local").start(plugin.loaded.prepare_launch(sleeper, task))
            until = time.monotonic() + SECONDS
            while not begun.exists() and running.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            alive = begun.exists() and running.poll() is None
            ended = running.stop()
            if not alive or ended.ended_by != "request":
                yield Problem(
                    message=f"flagcore_prepare_launch: a sleeping trial ended by {ended.ended_by} ({ended.code})",
                    fix="a wrapper must start the command, stay its parent, and be there on this machine",
                )
