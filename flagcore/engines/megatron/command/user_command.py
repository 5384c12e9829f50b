"""A user's own command as launcher, program and arguments, whether it is given directly or found in a script."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from flagcore.domain.spec import Spec
from flagcore.engines.megatron.command.arguments import ArgumentTable, release_table
from flagcore.engines.megatron.command.release import find_release
from flagcore.engines.megatron.command.script import FIX, SHELLS, is_script, traced
from flagcore.errors import SpecError

PLACEHOLDER = "{flags}"
"""A word of a command that the flags of a trial replace. Where they are known by name, it is not needed."""
MEETING_PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""What a script sees, unless its environment has others."""
WRAPPERS = {
    *("env", "nohup", "setsid", "nice", "numactl", "taskset", "stdbuf", "time", "timeout", "command", "exec"),
    *("srun", "mpirun", "mpiexec", "orterun", "sudo", "nsys", "singularity", "apptainer", "uv", "conda", "poetry"),
}
"""Programs that start the rest of their command line."""
TORCHRUN_SWITCHES = {"standalone", "m", "module", "no-python", "run-path", "use-env"}
"""Options of torchrun without a value. Source: torch 2.13 `distributed/run.py`."""
PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
TRAINING_FLAGS = {"--num-layers", "--micro-batch-size", "--global-batch-size", "--seq-length", "--train-iters"}
PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
PROGRAM = re.compile(r"pretrain_\w+(\.py)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of torchrun: its name with hyphens, and its words."""

    name: str
    words: tuple[str, ...]

    @property
    def value(self) -> str:
        """Its value, empty for a switch."""
        return self.words[1] if len(self.words) > 1 else self.words[0].partition("=")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCommand:
    """What a user's command starts: `prefix launcher options program arguments`.

    `launcher` is torchrun, `python -m torch.distributed.run` or, where it is empty, nothing. `environment` has the
    variables that a script set, `skipped` what else it would have run; it is None without a script.
    """

    prefix: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    program: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = "."
    skipped: tuple[str, ...] | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The whole command."""
        options = [word for option in self.options for word in option.words]
        return (*self.prefix, *self.launcher, *options, *self.program, *self.arguments)

    @property
    def file(self) -> str | None:
        """The program's file; None for a module."""
        return next((word for word in reversed(self.program) if word.endswith(".py")), None)

    def option(self, *names: str) -> Option | None:
        """Return the last option of torchrun with one of some names."""
        return next((each for each in reversed(self.options) if each.name in names), None)

    @property
    def is_megatron(self) -> bool:
        """Whether the program is one of Megatron-LM's, by its name or by its arguments."""
        named = PROGRAM.fullmatch(Path(self.program[-1]).name) if self.program else None
        return bool(named) or len(TRAINING_FLAGS & {word.partition("=")[0] for word in self.arguments}) > 1


def user_command(spec: Spec, variables: Mapping[str, str] | None = None) -> UserCommand | None:
    """Return what `train.command` starts; None without a command, and if its arguments are not Megatron-LM's.

    A script is traced with `variables`, the spec's and a meeting place in its environment. Raises SpecError for a
    script that cannot be read.
    """
    train = spec.train
    if train.command is None:
        return None
    meeting = {name: value for name, value in MEETING_PLACE.items() if name not in os.environ}
    given = {**meeting, **(variables or {}), **spec.envs}
    found = _parsed(train.command, train.directory, tuple(sorted(given.items())))
    if isinstance(found, SpecError):
        raise found
    return found


def readable_command(spec: Spec, variables: Mapping[str, str] | None = None) -> UserCommand | None:
    """Return `user_command`, or None for a script that cannot be read."""
    try:
        return user_command(spec, variables)
    except SpecError:
        return None


def release_of(spec: Spec, command: UserCommand) -> str | None:
    """Return the release of Megatron-LM that a command runs: `train.engine_version`, else the one that is found."""
    if spec.train.engine_version:
        return spec.train.engine_version
    variables = {**spec.envs, **command.environment}
    interpreter = _interpreter(command, variables.get("PATH"))
    return _found_release(command.directory, command.file, interpreter, variables.get("PYTHONPATH"))


def argument_table(spec: Spec, command: UserCommand) -> ArgumentTable:
    """Return the arguments of the release that a command runs, of the newest if that is unknown."""
    return release_table(release_of(spec, command))


@lru_cache(maxsize=64)
def _parsed(
    command: tuple[str, ...], directory: str | None, variables: tuple[tuple[str, str], ...]
) -> UserCommand | SpecError | None:
    """Return what `user_command` returns, or raises: a script is read once."""
    found = split(command, directory or ".")
    if found is None and is_script(command, directory):
        try:
            found = _of_script(command, directory, dict(variables))
        except SpecError as error:
            return error
    return found if found is not None and found.is_megatron else None


def _of_script(command: tuple[str, ...], directory: str | None, variables: Mapping[str, str]) -> UserCommand:
    """Return the one launch that a script makes. Raises SpecError for none, or for several."""
    records = traced(command, directory, variables)
    launches = {
        (each.words, each.directory): found
        for each in records
        if (found := split(each.words, each.directory, each.environment)) and (found.launcher or found.is_megatron)
    }
    if len(launches) == 1:
        found = next(iter(launches.values()))
        skipped = tuple(dict.fromkeys(shlex.join(each.words) for each in records if each.words != found.words))
        return replace(found, skipped=skipped)
    others = [shlex.join(each.words)[:60] for each in records][:4]
    problem = f"starts no torchrun or Megatron-LM program; it runs {', '.join(others) or 'nothing'}"
    if launches:
        problem = f"starts {len(launches)} programs: {', '.join(' '.join(each.program) for each in launches.values())}"
    raise SpecError(key="train.command", value=" ".join(command), problem=problem, fix=FIX)


def split(words: Sequence[str], directory: str, environment: Mapping[str, str] | None = None) -> UserCommand | None:
    """Return the parts of a command that starts a Python program, by torchrun or directly; None for any other."""
    shell = 4 if is_shell_prefix(words) else 0
    for place, word in enumerate(words[shell:], start=shell):
        name = Path(word).name
        if place > shell and not _wraps(words[shell:place]):
            return None
        found = None
        if name == "torchrun":
            found = _torchrun((word,), words[place + 1 :])
        elif PYTHON.fullmatch(name):
            found = _python(words[place:])
        if found is not None:
            return replace(found, prefix=tuple(words[:place]), environment=dict(environment or {}), directory=directory)
    return None


def is_shell_prefix(words: Sequence[str]) -> bool:
    """Return whether a command is `bash -c '...; exec "$@"' NAME` and the words that it runs after its own lines."""
    return len(words) > 4 and Path(words[0]).name in SHELLS and words[1] == "-c" and words[2].endswith('exec "$@"')


def _wraps(prefix: Sequence[str]) -> bool:
    first = next((word for word in prefix if "=" not in word), None)
    return first is None or Path(first).name in WRAPPERS


def _python(words: Sequence[str]) -> UserCommand | None:
    """Return the parts of a command that begins with an interpreter."""
    place = 1
    while place < len(words) and words[place].startswith("-"):
        if words[place] == "-m" and place + 1 < len(words):
            if words[place + 1] in ("torch.distributed.run", "torch.distributed.launch"):
                return _torchrun(tuple(words[: place + 2]), words[place + 2 :])
            return UserCommand(program=tuple(words[: place + 2]), arguments=_arguments(words[place + 2 :]))
        if words[place] == "-c":
            return None
        place += 2 if words[place] in PYTHON_VALUES else 1
    if place >= len(words):
        return None
    return UserCommand(program=tuple(words[: place + 1]), arguments=_arguments(words[place + 1 :]))


def _torchrun(launcher: tuple[str, ...], words: Sequence[str]) -> UserCommand | None:
    options = list(_options(words))
    place = sum(len(option.words) for option in options)
    if place >= len(words):
        return None
    program, place = [words[place]], place + 1
    while PYTHON.fullmatch(Path(program[-1]).name) or program[-1].startswith("-"):  # --no-python python -u program.py
        if place >= len(words):
            return None
        program.append(words[place])
        place += 1
    return UserCommand(
        launcher=launcher, options=tuple(options), program=tuple(program), arguments=_arguments(words[place:])
    )


def _arguments(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word != PLACEHOLDER)


def _options(words: Sequence[str]) -> Iterator[Option]:
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name, equals, _ = words[place].partition("=")
        name = name.lstrip("-").replace("_", "-")
        count = 1 if equals or name in TORCHRUN_SWITCHES else 2
        yield Option(name=name, words=tuple(words[place : place + count]))
        place += count


@lru_cache(maxsize=64)
def _found_release(directory: str, program: str | None, python: str | None, path: str | None) -> str | None:
    return find_release(directory, program, python, path)


def _interpreter(command: UserCommand, path: str | None) -> str | None:
    """Return the interpreter that a command names, or the one beside its torchrun; None for flagcore's own."""
    named = [word for word in (*command.launcher, *command.program) if PYTHON.fullmatch(Path(word).name)]
    file = shutil.which((*named, *command.launcher, "")[0], path=path)
    if file is None or Path(file).parent == Path(sys.executable).parent:
        return None
    return file if named else next(map(str, Path(file).parent.glob("python3")), None)
