"""What asking its hooks does beside answering, tried in a process of its own: it runs in every command of flagcore."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flagcore.testing.checks.importing import KEPT
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

SECONDS = 15.0
"""Far above what a hook may take; a command asks it once a chip."""
HANGS = 120.0
"""How long all hooks together may take here."""


def hooks_return_quickly(plugin: Subject) -> Iterator[Problem]:
    records, begun = _asked(plugin)
    fix = f"it must take less than {SECONDS:.0f} s: read files, and give every wait a limit of time"
    if begun:
        yield Problem(message=f"{begun} does not end: it took more than {HANGS:.0f} s, or its process ended", fix=fix)
    for record in records:
        if record["seconds"] > SECONDS:
            yield Problem(message=f"{record['hook']} took {record['seconds']:.0f} s", fix=fix)


def hooks_have_no_side_effects(plugin: Subject) -> Iterator[Problem]:
    for record in _asked(plugin)[0]:
        if record["printed"]:
            yield Problem(
                message=f"asking its hooks prints {record['printed'][:60]!r} ({record['hook']})",
                fix="print nothing; what a user should know is logged",
            )
        for what in record["changed"]:
            yield Problem(
                message=f"asking {record['hook']} changes the {what}",
                fix="change nothing that others in the process use, or put it back before you answer; variables for "
                "trials are the answer of flagcore_environment",
            )


def hooks_do_not_modify_arguments(plugin: Subject) -> Iterator[Problem]:
    for record in _asked(plugin)[0]:
        for name in record["arguments"]:
            yield Problem(
                message=f"{record['hook']} changes what it is given as {name}",
                fix="answer a new object: replace(launch, ...), {**launch.environment, ...}",
            )


def hooks_write_no_files(plugin: Subject) -> Iterator[Problem]:
    _asked(plugin)
    for name in plugin.memory["files"]:
        yield Problem(
            message=f"asking its hooks writes the file {name}",
            fix="keep what was found out in memory, or remove the file before you answer",
        )


def _asked(plugin: Subject) -> tuple[list[dict[str, Any]], str]:
    """Return what each hook did in a fresh process, and the hook in which that process ended or hung, if it did."""
    if "asked" not in plugin.memory:
        package = plugin.package_folder
        with tempfile.TemporaryDirectory(prefix="flagcore-check-") as made:
            here, home, scratch = (Path(made, name) for name in ("here", "home", "scratch"))
            for folder in (here, home, scratch):
                folder.mkdir()
            before = _files(package)
            printed = _run(plugin, here, {"HOME": str(home), "TMPDIR": str(scratch)})
            left = [*_files(here), *(name for name in _files(home) if not name.startswith(".")), *_files(scratch)]
            plugin.memory["files"] = [*left, *(f"{package.name}/{name}" for name in _files(package) - before)]
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
        ended = bool(lines) and "ends" in lines[-1]
        begun = "" if ended else lines[-1].get("begins", "what follows") if lines else "its import"
        plugin.memory["asked"] = [line for line in lines if "hook" in line], begun
    found: tuple[list[dict[str, Any]], str] = plugin.memory["asked"]
    return found


def _run(plugin: Subject, folder: Path, more: dict[str, str]) -> str:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    paths = json.dumps([os.path.abspath(path) for path in sys.path if path])
    argv = [sys.executable, "-B", "-m", "flagcore.testing.asking", plugin.entry, paths]
    try:
        done = subprocess.run(argv, env={**kept, **more}, cwd=folder, capture_output=True, timeout=HANGS, check=False)
        return done.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode("utf-8", "replace")


def _files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
