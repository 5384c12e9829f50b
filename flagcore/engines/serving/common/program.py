"""The program that starts a server, and its version from package metadata, without running it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from flagcore.domain.spec import Spec
from flagcore.errors import NoDevice, SpecError

_FIRST_LINE = 512


def bare(flag: str) -> str:
    """Return a flag without leading dashes, words joined by dashes."""
    return flag.lstrip("-").replace("_", "-")


def found(spec: Spec, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of a spec, or `default`, with an absolute path. Raises NoDevice if it does not exist."""
    command = spec.serve.command or default
    program = command[0]
    bin_folder = os.path.dirname(sys.executable)
    if os.sep in program:
        path = shutil.which(os.path.join(spec.serve.directory or ".", program))
    else:
        path = shutil.which(program, path=bin_folder) or shutil.which(program)
    if path is None:
        raise NoDevice(
            f"{program}, which starts {spec.serve.engine}, is not installed; install it, or give a serve.command"
        )
    return (os.path.abspath(path), *command[1:])


@lru_cache(maxsize=64)
def package_folders(program: str) -> tuple[str, ...]:
    """Return the package folders of the Python that runs `program`, itself or a script; none for a binary."""
    python = interpreter(program)
    if python is None:
        return ()
    if os.path.samefile(python, sys.executable) and os.path.dirname(python) == os.path.dirname(sys.executable):
        return tuple(sys.path)
    folder = Path(python).parent.parent
    near = [str(path) for path in sorted(folder.glob("lib*/python3*/site-packages"))]
    return (*near, *_sys_path(python)) if not (folder / "pyvenv.cfg").exists() else tuple(near)


def _sys_path(python: str) -> list[str]:
    asked = (python, "-c", "import sys; print('\\n'.join(sys.path))")
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in answer.stdout.splitlines() if line]


def interpreter(program: str) -> str | None:
    """Return the Python that runs `program`: itself, or that of its first line; None for another program."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        return program
    try:
        with open(program, "rb") as file:
            line = file.read(_FIRST_LINE).split(b"\n")[0].decode("utf-8", errors="replace")
    except OSError:
        return None
    words = line.removeprefix("#!").split()
    if not line.startswith("#!") or not words:
        return None
    named = shutil.which(words[-1]) if os.path.basename(words[0]) == "env" else words[0]
    return named if named and "python" in os.path.basename(named) and os.path.exists(named) else None


@lru_cache(maxsize=64)
def package_version(program: str, *names: str) -> str:
    """Return the version of the first installed package for the Python of `program`; empty if there is none."""
    folders = package_folders(program)
    for name in names:
        for distribution in metadata.distributions(name=name, path=list(folders)) if folders else ():
            return str(distribution.version)
    return ""


def check_version(spec: Spec, installed: str) -> None:
    """Raise SpecError if the spec names another release than the `installed` one."""
    planned = spec.serve.engine_version
    if planned and installed and planned != installed and release(planned) != release(installed):
        problem = f"is not the installed release, {installed}: defaults and speed may differ"
        fix = "remove it, or install that release; `flag estimate` plans for any"
        raise SpecError(key="serve.engine_version", value=planned, problem=problem, fix=fix)


def release(version: str) -> tuple[int, ...] | None:
    """Return the leading numbers of a version, (0, 11, 2) of 0.11.2rc1+cpu; None if it does not begin with two."""
    parts = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part) for part in parts.groups(default="0")) if parts else None
