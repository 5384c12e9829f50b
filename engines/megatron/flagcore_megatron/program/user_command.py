"""A user's own command, or the command in a user's script, that starts Megatron-LM, and the release that it runs.

Also its arguments and variables that change the time or memory of a job, and that predictions do not include.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flagcore_importers.shell import SCRIPT_FIX, is_script, trace_script
from flagcore_models.layers import other_mixers
from flagcore_training.commands import PYTHON, UserCommand, parse, parse_flags
from flagcore_training.frameworks import kept_framework
from flagcore_training.knobs import joined
from flagcore_vendorkit.settings import UNCHANGED, read_settings
from packaging.version import InvalidVersion, Version

from flagcore.domain.engine import Unmodelled
from flagcore.domain.files import read_regular
from flagcore.domain.spec import Spec
from flagcore.errors import SpecError
from flagcore.spec.plain_data import package_yaml
from flagcore_megatron.program.arguments import FORK, ArgumentTable, known_releases, release_table

SETTINGS = read_settings("flagcore_megatron")
"""The classes of all arguments and variables."""
TABLES: Mapping[str, Mapping[str, list[str]]] = package_yaml(__package__, "unmodelled.yaml")
Given = Mapping[str, tuple[str, Any]]
"""For each argument without its dashes and with hyphens: how the user writes it, and its value."""


def unmodelled(spec: Spec) -> list[Unmodelled]:
    """Return the arguments, settings and variables of a spec that predictions do not include."""
    train, command = spec.train, readable_command(spec)
    arguments, problems = release_table(None).parse([*program_arguments(spec), *train.flags])
    sizes = {"num-experts": spec.model.experts, "lengths": train.lengths is not None}
    sizes |= {"linear-attention-freq": len(other_mixers(spec.model))}
    given: dict[str, tuple[str, Any]] = {name: ("", size) for name, size in sizes.items()}
    given |= {_name(key): (f"train.settings.{key}", value) for key, value in train.settings.items()}
    given = {name: each for name, each in given.items() if not SETTINGS.unclassed([name])}  # others are modelled
    if command is not None or train.command is None:  # otherwise the arguments are those of another program
        given |= {_name(each.flag): (each.flag, each.value or True) for each in problems if each.flag.startswith("--")}
    given |= {_name(each.flag): (each.flag, " ".join(each.values) or True) for each in arguments}
    script = replace(spec, envs={**(command.environment if command else {}), **spec.envs})
    on = _turned_on(given)
    variables = (each for each in SETTINGS.of_environment(script) if not _is_idle(each.name, on))
    return [*not_predicted(given), *joined(variables)]


def not_predicted(given: Given) -> list[Unmodelled]:
    """Return the effects of arguments that predictions do not include. Those with the same effect are one."""
    on = _turned_on(given)
    in_use = ((name, *given[name]) for name in given if name in on and not _is_idle(name, on))
    effects = (SETTINGS.unmodelled(name, _text(value), shown) for name, shown, value in in_use)
    return joined(filter(None, effects))


def _turned_on(given: Given) -> set[str]:
    return {name for name, (_, value) in given.items() if is_on(name, value)}


def is_on(name: str, value: object) -> bool:
    """Return whether an argument has another value than Megatron's default, and is not off."""
    found = next((spec for each in _TABLES if (spec := each.find(f"--{name}"))), None)
    default = None if found is None or found.values == 0 else found.default
    return _text(value).lower() not in UNCHANGED and _text(value) != _text(default)


def knows(name: str) -> bool:
    """Return whether an argument is in a class, or one of a known release or of FlagScale's fork."""
    name = _name(name)
    return not SETTINGS.unclassed([name]) or any(table.find(f"--{name}") for table in _TABLES)


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


_TABLES = (release_table(None), release_table(f"{known_releases()[0]}+{FORK}"))


def _is_idle(name: str, on: Set[str]) -> bool:
    """Return whether an argument does nothing, as others are missing that it needs, or are `on` that replace it."""
    needed = (others.split() for others, names in TABLES["needs"].items() if _is_listed(name, names))
    replaced = (others.split() for others, names in TABLES["without"].items() if _is_listed(name, names))
    return any(on.isdisjoint(others) for others in needed) or not all(on.isdisjoint(others) for others in replaced)


def _is_listed(name: str, patterns: Iterable[str]) -> bool:
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns)


def _name(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


DISTRIBUTION = "megatron-core"
_VERSION_FIELD = re.compile(rb"^(MAJOR|MINOR|PATCH) = (\d+)", re.MULTILINE)
_VERSION_QUERY = f"from importlib.metadata import version; print(version({DISTRIBUTION!r}))"


@lru_cache(maxsize=64)
def find_release(directory: str, program: str | None, python: str | None, path: str | None = None) -> str | None:
    """Return the release of Megatron-LM that a program imports, such as 0.14.0 or 0.15.0+flagscale, or None.

    A source tree in the import folders takes precedence over the packages of the interpreter `python`. A source tree
    between two releases counts as the later release.
    """
    for folder in import_folders(directory, program, path):
        if source_release := _tree_release(folder):
            return source_release
    return _installed_release(directory, python, path)


def import_folders(directory: str, program: str | None, path: str | None = None) -> list[Path]:
    """Return the folders from which a program imports, in order, without site-packages.

    They are the folder of the program, the folders in PYTHONPATH (`path`, by default this process's), and the parent
    folders of the program, which Megatron-LM's examples add. Relative paths are relative to `directory`.
    """
    program_folder, *parents = Path(directory, program).resolve().parents if program else (Path(directory),)
    python_path = os.environ.get("PYTHONPATH", "") if path is None else path
    return [program_folder, *(Path(directory, each) for each in python_path.split(os.pathsep) if each), *parents[:3]]


def _tree_release(folder: Path) -> str | None:
    """Return the release of the Megatron-LM source tree in `folder`, or None if there is none."""
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
    """Return the release of Megatron-LM that is installed for the interpreter `python`, or None if there is none."""
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


MASTER_VARIABLES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "SLURM_JOB_NODELIST": "localhost"}
MASTER_VARIABLES |= {"SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
"""Default environment variables of a traced script, whose values differ between hosts or jobs."""


def user_command(spec: Spec, variables: Mapping[str, str] | None = None) -> UserCommand | None:
    """Return the parts of the command in `train.command`.

    Returns None if there is no command, or if it starts no Megatron-LM program.

    A script is traced with `variables`, the spec's variables and a master address in its environment. Raises SpecError
    for a script that cannot be read.
    """
    if spec.train.command is None:
        return None
    return read_command(spec.train.command, spec.train.directory, {**(variables or {}), **spec.envs})


def read_command(words: Sequence[str], directory: str | None, variables: Mapping[str, str]) -> UserCommand | None:
    """Return the parts of the command `words`, as `user_command` does. Raises SpecError for an unreadable script."""
    master_variables = {name: value for name, value in MASTER_VARIABLES.items() if name not in os.environ}
    trace_variables = {**master_variables, **variables}
    command = _parse_command(tuple(words), directory, tuple(sorted(trace_variables.items())))
    if isinstance(command, SpecError):
        raise command
    return command


def readable_command(spec: Spec, variables: Mapping[str, str] | None = None) -> UserCommand | None:
    """Return the parts of the command in `train.command`, or None if it is a script that cannot be read."""
    try:
        return user_command(spec, variables)
    except SpecError:
        return None


def release_of(spec: Spec, command: UserCommand) -> str | None:
    """Return the release of Megatron-LM that a command runs: `train.engine_version`, or else the detected release."""
    return spec.train.engine_version or detected_release(command, spec.envs)


def detected_release(command: UserCommand, envs: Mapping[str, str]) -> str | None:
    """Return the release of Megatron-LM that a command's program imports if the environment variables are `envs`."""
    variables = {**envs, **command.environment}
    interpreter = _interpreter(command, variables.get("PATH"))
    return find_release(command.directory, command.file, interpreter, variables.get("PYTHONPATH"))


def argument_table(spec: Spec, command: UserCommand) -> ArgumentTable:
    """Return the table of arguments of the release that a command runs, or of the newest release if it is unknown."""
    return release_table(release_of(spec, command))


@lru_cache(maxsize=64)
def _parse_command(
    command: tuple[str, ...], directory: str | None, variables: tuple[tuple[str, str], ...]
) -> UserCommand | SpecError | None:
    """Return the parts of a command, None, or the SpecError. Cached, so that a script is traced only once."""
    parsed = parse(command, directory or ".")
    if parsed is None and is_script(command, directory):
        try:
            parsed = _parse_script(command, directory, dict(variables))
        except SpecError as error:
            return error
    return parsed if parsed is not None and parsed.is_megatron else None


def _parse_script(command: tuple[str, ...], directory: str | None, variables: Mapping[str, str]) -> UserCommand:
    """Return the only training command that a script starts. Raises SpecError if there is none or several."""
    records, failure = trace_script(command, directory, variables)
    launches = {
        (each.words, each.directory): launch
        for each in records
        if (launch := parse(each.words, each.directory, each.environment)) and (launch.launcher or launch.is_megatron)
    }
    if len(launches) == 1:
        launch = next(iter(launches.values()))
        skipped = tuple(dict.fromkeys(shlex.join(each.words) for each in records if each.words != launch.words))
        return replace(launch, skipped=skipped)
    other_commands = [shlex.join(each.words)[:60] for each in records][:4]
    problem = f"starts no torchrun or Megatron-LM program; it runs {', '.join(other_commands) or 'nothing'}"
    problem += f"; it ends with {failure}" if failure else ""
    if launches:
        problem = f"starts {len(launches)} programs: {', '.join(' '.join(each.program) for each in launches.values())}"
    raise SpecError(key="train.command", value=" ".join(command), problem=problem, fix=SCRIPT_FIX)


def _interpreter(command: UserCommand, path: str | None) -> str | None:
    """Return a command's Python interpreter, or the one next to its torchrun, or None if it is flagcore's own."""
    interpreters = [word for word in (*command.launcher, *command.program) if PYTHON.fullmatch(Path(word).name)]
    file = shutil.which((*interpreters, *command.launcher, "")[0], path=path)
    if file is None or Path(file).parent == Path(sys.executable).parent:
        return None
    return file if interpreters else next(map(str, Path(file).parent.glob("python3")), None)


def implementation_of_command(spec: Spec) -> str | None:
    """Return the value of `--transformer-impl` in `train.command`, or None if it is missing or invalid."""
    values = dict(parse_flags(program_arguments(spec))).get("transformer-impl", [])
    return values[0] if values[:1] in (["local"], ["transformer_engine"]) else None


def program_arguments(spec: Spec) -> Sequence[str]:
    """Return the arguments of the program that `train.command` starts, or the whole command if it cannot be parsed.

    They are empty for a framework's command, whose settings the spec has.
    """
    if kept_framework(spec):
        return ()
    command = readable_command(spec)
    return command.arguments if command else spec.train.command or ()
