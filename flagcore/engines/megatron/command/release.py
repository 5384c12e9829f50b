"""Which release of Megatron-LM a command runs, without importing it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from flagcore.engines.megatron.command.arguments import FORK
from flagcore.files import read_regular

DISTRIBUTION = "megatron-core"
_FIELD = re.compile(rb"^(MAJOR|MINOR|PATCH) = (\d+)", re.MULTILINE)
_QUERY = f"from importlib.metadata import version; print(version({DISTRIBUTION!r}))"


def find_release(directory: str, program: str | None, python: str | None, path: str | None = None) -> str | None:
    """Return the release of Megatron-LM that a program imports, such as 0.14.0 or 0.15.0+flagscale, or None.

    Without a tree in the folders of imports, the packages of `python` count. A tree between two releases counts as the
    one that it will become.
    """
    for folder in import_folders(directory, program, path):
        if found := _of_tree(folder):
            return found
    return _installed(directory, python, path)


def import_folders(directory: str, program: str | None, path: str | None = None) -> list[Path]:
    """Return where Python looks for what a program imports, packages apart.

    It is the folder of the program, then the folders of PYTHONPATH (`path`, or else this process's), then those above
    the program, which Megatron-LM's examples add. Relative paths start at `directory`.
    """
    own, *above = Path(directory, program).resolve().parents if program else (Path(directory),)
    listed = os.environ.get("PYTHONPATH", "") if path is None else path
    return [own, *(Path(directory, each) for each in listed.split(os.pathsep) if each), *above[:3]]


def _of_tree(folder: Path) -> str | None:
    """Return the release of a folder that holds the package, or None."""
    package = folder / "megatron"
    try:
        found = dict(_FIELD.findall(read_regular(package / "core" / "package_info.py")))
        release = ".".join(found[name].decode() for name in (b"MAJOR", b"MINOR", b"PATCH"))
    except (OSError, KeyError):
        return None
    try:
        arguments = read_regular(package / "training" / "arguments.py")
    except OSError:
        return release
    return f"{release}+{FORK}" if b"flagscale" in arguments.lower() else release


def _installed(directory: str, python: str | None, path: str | None) -> str | None:
    """Return the release that is installed for an interpreter, or None."""
    try:
        if python in (None, sys.executable):
            return Version(version(DISTRIBUTION)).base_version
        command = [str(python), "-c", _QUERY]
        environment = os.environ | ({} if path is None else {"PYTHONPATH": path})
        run = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=20, check=True
        )
        return Version(run.stdout.strip()).base_version
    except (PackageNotFoundError, OSError, subprocess.SubprocessError, InvalidVersion, ValueError):
        return None
