"""Side effects of the hooks, tried in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flagcore.testing.checks.importing import REAL_VARIABLES
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

SECONDS = 15.0
"""Time limit of a hook; a command calls it once a chip."""
TOTAL_SECONDS = 120.0
"""Time limit of all hooks together."""


def hooks_return_quickly(plugin: Subject) -> Iterator[Problem]:
    records, hanging = _records(plugin)
    fix = f"it must take less than {SECONDS:.0f} s: give every wait a time limit"
    if hanging:
        yield Problem(f"{hanging} took more than {TOTAL_SECONDS:.0f} s, or ended its process", fix)
    for record in records:
        if record["seconds"] > SECONDS:
            yield Problem(f"{record['hook']} took {record['seconds']:.0f} s", fix)


def hooks_have_no_side_effects(plugin: Subject) -> Iterator[Problem]:
    for record in _records(plugin)[0]:
        if record["printed"]:
            yield Problem(
                f"{record['hook']} prints {record['printed'][:60]!r}", "print nothing; log what users should know"
            )
        for what in record["changed"]:
            yield Problem(
                f"{record['hook']} changes the {what}",
                "change no state of the process, or restore it; return variables for trials from flagcore_environment",
            )


def hooks_do_not_modify_arguments(plugin: Subject) -> Iterator[Problem]:
    for record in _records(plugin)[0]:
        for name in record["arguments"]:
            yield Problem(
                f"{record['hook']} modifies its argument {name}",
                "return a new object: replace(launch, ...), {**launch.environment, ...}",
            )


def hooks_write_no_files(plugin: Subject) -> Iterator[Problem]:
    _records(plugin)
    for name in plugin.memory["files"]:
        yield Problem(f"a hook writes the file {name}", "keep results in memory, or remove the file")


def _records(plugin: Subject) -> tuple[list[dict[str, Any]], str]:
    """Return what each hook did in another process, and the hook in which that process ended or hung, if any."""
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
        hanging = "" if ended else lines[-1].get("begins", "what follows") if lines else "its import"
        plugin.memory["asked"] = [line for line in lines if "hook" in line], hanging
    found: tuple[list[dict[str, Any]], str] = plugin.memory["asked"]
    return found


def _run(plugin: Subject, folder: Path, more: dict[str, str]) -> str:
    environment = {name: os.environ[name] for name in REAL_VARIABLES if name in os.environ}
    paths = json.dumps([os.path.abspath(path) for path in sys.path if path])
    argv = [sys.executable, "-B", "-m", "flagcore.testing.asking", plugin.entry, paths]
    try:
        done = subprocess.run(
            argv, env={**environment, **more}, cwd=folder, capture_output=True, timeout=TOTAL_SECONDS, check=False
        )
        return done.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode("utf-8", "replace")


def _files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
