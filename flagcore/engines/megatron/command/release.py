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

    Python looks in the folder of the program, then in the folders of PYTHONPATH (`path`, or else this process's), then
    in those above the program, which Megatron-LM's examples add, then among the packages of `python`. Relative paths
    start at `directory`. A tree between two releases counts as the one that it will become.
    """
    own, *above = Path(directory, program).resolve().parents if program else (Path(directory),)
    listed = os.environ.get("PYTHONPATH", "") if path is None else path
    folders = [own, *(Path(directory, each) for each in listed.split(os.pathsep) if each), *above[:3]]
    return next((found for each in folders if (found := _of_tree(each))), None) or _installed(directory, python, listed)


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


def _installed(directory: str, python: str | None, path: str) -> str | None:
    """Return the release that is installed for an interpreter, or None."""
    try:
        if python in (None, sys.executable):
            return Version(version(DISTRIBUTION)).base_version
        command, environment = [str(python), "-c", _QUERY], os.environ | {"PYTHONPATH": path}
        run = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=20, check=True
        )
        return Version(run.stdout.strip()).base_version
    except (PackageNotFoundError, OSError, subprocess.SubprocessError, InvalidVersion, ValueError):
        return None
