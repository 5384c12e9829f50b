"""Finds the release of Megatron-LM that a command runs, without importing it."""

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
_VERSION_FIELD = re.compile(rb"^(MAJOR|MINOR|PATCH) = (\d+)", re.MULTILINE)
_VERSION_QUERY = f"from importlib.metadata import version; print(version({DISTRIBUTION!r}))"


def find_release(directory: str, program: str | None, python: str | None, path: str | None = None) -> str | None:
    """Return the release of Megatron-LM that a program imports, such as 0.14.0 or 0.15.0+flagscale, or None.

    A source tree in the import folders takes precedence over the packages of the interpreter `python`. A tree between
    two releases counts as the next release.
    """
    for folder in import_folders(directory, program, path):
        if found := _tree_release(folder):
            return found
    return _installed_release(directory, python, path)


def import_folders(directory: str, program: str | None, path: str | None = None) -> list[Path]:
    """Return the folders from which a program imports, in order, without site-packages.

    They are the folder of the program, the folders of PYTHONPATH (`path`, by default this process's), and the parent
    folders of the program, which Megatron-LM's examples add. Relative paths are relative to `directory`.
    """
    program_folder, *parents = Path(directory, program).resolve().parents if program else (Path(directory),)
    python_path = os.environ.get("PYTHONPATH", "") if path is None else path
    return [program_folder, *(Path(directory, each) for each in python_path.split(os.pathsep) if each), *parents[:3]]


def _tree_release(folder: Path) -> str | None:
    """Return the release of the source tree in `folder`, None if there is none."""
    package = folder / "megatron"
    try:
        numbers = dict(_VERSION_FIELD.findall(read_regular(package / "core" / "package_info.py")))
        release = ".".join(numbers[name].decode() for name in (b"MAJOR", b"MINOR", b"PATCH"))
    except (OSError, KeyError):
        return None
    try:
        arguments = read_regular(package / "training" / "arguments.py")
    except OSError:
        return release
    return f"{release}+{FORK}" if b"flagscale" in arguments.lower() else release


def _installed_release(directory: str, python: str | None, path: str | None) -> str | None:
    """Return the release that the interpreter `python` has installed, None if there is none."""
    try:
        if python in (None, sys.executable):
            return Version(version(DISTRIBUTION)).base_version
        command = [str(python), "-c", _VERSION_QUERY]
        environment = os.environ | ({} if path is None else {"PYTHONPATH": path})
        process = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=20, check=True
        )
        return Version(process.stdout.strip()).base_version
    except (PackageNotFoundError, OSError, subprocess.SubprocessError, InvalidVersion, ValueError):
        return None
