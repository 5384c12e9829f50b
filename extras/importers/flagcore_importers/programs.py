"""Finds the program of an engine and its version in package metadata without running it, and splits its options."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from flagcore.domain.knob import in_versions
from flagcore.domain.spec import Spec
from flagcore.errors import NoDevice, SpecError

_FIRST_LINE = 512


@lru_cache(maxsize=8192)
def strip_dashes(flag: str) -> str:
    """Return a flag without leading dashes and with hyphens in place of underscores, except in keys after a dot."""
    name, dot, key = flag.lstrip("-").partition(".")
    return name.replace("_", "-") + dot + key


Group: TypeAlias = tuple[str, list[str], list[str], int]
"""An option: its name, its value after an equals sign (if it has one), the words that follow, and its place."""


def _long(word: str) -> tuple[str, str, str]:
    return word.partition("=") if word.startswith("--") else ("", "", "")


def grouped(words: Iterable[str], split: Callable[[str], tuple[str, str, str]] = _long) -> list[Group]:
    """Return the options of a command. `split`: returns name, equals sign and value of a word.

    Words without a name are values. Those before the first option have an empty name.
    """
    groups: list[Group] = [("", [], [], 0)]
    for place, word in enumerate(words):
        name, equals, value = split(word)
        if name:
            groups.append((name, [value] if equals else [], [], place))
        else:
            groups[-1][2].append(word)
    return groups if groups[0][2] else groups[1:]


def find_command(spec: Spec, default: tuple[str, ...], package: str = "") -> tuple[str, ...]:
    """Return the spec's command, or `default`, with an absolute path. Raises NoDevice if it does not exist.

    `package`: the pip package that installs `default`.
    """
    command = spec.serve.command or default
    program = command[0]
    path = find_program(program, spec.serve.directory or ".")
    if path is None:
        pip = f" (`pip install {package}`, or the build of the chip's vendor)" if command == default and package else ""
        name = program if program == spec.serve.engine else f"{program}, which starts {spec.serve.engine},"
        raise NoDevice(f"{name} is not installed; install it{pip}, or set serve.command")
    return (os.path.abspath(path), *command[1:])


def find_program(program: str, directory: str = ".") -> str | None:
    """Return the path of a program: below `directory`, beside this interpreter, or in PATH. None if there is none."""
    if os.sep in program:
        return shutil.which(os.path.join(directory, program))
    return shutil.which(program, path=os.path.dirname(sys.executable)) or shutil.which(program)


@lru_cache(maxsize=64)
def package_folders(program: str) -> tuple[str, ...]:
    """Return the package folders of the Python interpreter that runs `program`, or none for a binary."""
    python = interpreter(program)
    if python is None:
        return ()
    if os.path.samefile(python, sys.executable) and os.path.dirname(python) == os.path.dirname(sys.executable):
        return tuple(sys.path)
    folder = Path(python).parent.parent
    site_packages = tuple(str(path) for path in sorted(folder.glob("lib*/python3*/site-packages")))
    if (folder / "pyvenv.cfg").exists():
        return site_packages
    argv = (python, "-c", "import sys; print('\\n'.join(sys.path))")
    try:
        printed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return site_packages
    return (*site_packages, *filter(None, printed.decode(errors="replace").splitlines()))


def interpreter(program: str) -> str | None:
    """Return the Python interpreter that runs `program`, or None if it is not a Python program.

    This is `program` itself, or the interpreter that the first line of the script names.
    """
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
    path = shutil.which(words[-1]) if os.path.basename(words[0]) == "env" else words[0]
    return path if path and "python" in os.path.basename(path) and os.path.exists(path) else None


@lru_cache(maxsize=64)
def package_version(program: str, *names: str) -> str:
    """Return the version of the first of the packages `names` that `program`'s Python has; empty if it has none."""
    folders = package_folders(program)
    for name in names:
        for distribution in metadata.distributions(name=name, path=list(folders)) if folders else ():
            return str(distribution.version)
    return ""


def check_version(spec: Spec, installed: str) -> None:
    """Raise SpecError if the release in the spec is not the `installed` one."""
    version = spec.work.engine_version
    if version and installed and version != installed and release(version) != release(installed):
        problem = f"is not the installed release, {installed}: defaults and speed may differ"
        fix = "remove it, or install that release; `flag estimate` accepts any release"
        raise SpecError(key=f"{spec.work.kind}.engine_version", value=version, problem=problem, fix=fix)


def release(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a version, such as (0, 11, 2) for 0.11.2rc1+cpu, or None for an invalid version."""
    parts = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part) for part in parts.groups(default="0")) if parts else None


def unknown_release(key: str, engine: str, version: str | None, versions: str) -> list[str]:
    """Return a list with a warning if the engine's known `versions` do not include the spec's release, or if it is no
    release number, else an empty one.

    `key`: the key of the spec that states the release.
    """
    if version is None or (in_versions(versions, version) and re.match(r"v?\d+(\.|$)", version)):
        return []
    fallback = "knobs and predictions are those of the nearest known release"
    return [f"{key} = {version} is not a release of {engine} that flagcore knows ({versions}); {fallback}"]
