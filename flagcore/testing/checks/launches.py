"""Launches: changes to a trial before it starts."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flagcore.domain.launch import Launch
from flagcore.plugins import launcher
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Problem, Subject

LAUNCH = Launch(
    argv=("echo", "the command"),
    folder="/tmp/trial",
    environment={"KEEP": "me"},
    timeout_seconds=60.0,
    memory_limit_bytes=2**30,
)
SECONDS = 30.0
"""Time limit for the start of a trial."""


def _prepared(plugin: Subject) -> Iterator[tuple[Launch]]:
    plugin.implements("flagcore_prepare_launch")
    return ((plugin.loaded.prepare_launch(LAUNCH, task),) for task in plugin.tasks())


@check(each=_prepared)
def prepared_launch_runs_the_command(prepared: Launch) -> Problems:
    if not " ".join(prepared.argv).endswith("echo the command"):
        yield Problem(
            f"flagcore_prepare_launch turns 'echo the command' into {' '.join(prepared.argv)!r} as argv",
            "put a wrapper before launch.argv and keep the rest",
        )
    if prepared.folder != LAUNCH.folder or prepared.directory != LAUNCH.directory:
        yield Problem("flagcore_prepare_launch changes the folder of the trial", "use replace(launch, ...)")


@check("extend it: replace(launch, environment={**launch.environment, ...})", each=_prepared)
def prepared_launch_keeps_variables(prepared: Launch) -> Problems:
    if prepared.environment.get("KEEP") != "me":
        yield "flagcore_prepare_launch drops a variable of launch.environment"


@check("keep or lower the limits: they are the user's", each=_prepared)
def prepared_launch_keeps_limits(prepared: Launch) -> Problems:
    if prepared.timeout_seconds > 60.0 or not 0 < (prepared.memory_limit_bytes or 0) <= 2**30:
        yield "flagcore_prepare_launch raises timeout_seconds or memory_limit_bytes of a trial"


@check("a wrapper must exist here, start the command and stay its parent")
def prepared_launch_can_be_stopped(plugin: Subject) -> Problems:
    with tempfile.TemporaryDirectory() as folder:
        started = Path(folder, "begun")
        code = f"import time; open({str(started)!r}, 'w').close(); time.sleep(60)"
        sleeper = Launch(argv=(sys.executable, "-S", "-c", code), folder=folder)
        running = launcher("local").start(plugin.loaded.prepare_launch(sleeper, next(plugin.tasks())))
        until = time.monotonic() + SECONDS
        while not started.exists() and running.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        alive = started.exists() and running.poll() is None
        ended = running.stop()
        if not alive or ended.ended_by != "request":
            yield f"flagcore_prepare_launch: a sleeping trial ended by {ended.ended_by} ({ended.code})"
