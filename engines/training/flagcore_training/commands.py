"""A user's own command that starts a Python program: its launcher, program and arguments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from flagcore.domain.space import KnobValue

PLACEHOLDER = "{flags}"
"""A word of a command that is replaced by the flags of a trial. Commands that start Megatron-LM do not need it."""
TORCHRUN_SWITCHES = {"standalone", "m", "module", "no-python", "run-path", "use-env", "virtual-local-rank"}
"""Options of torchrun without a value. Source: torch 2.13 `distributed/run.py`."""
TRAINING_FLAGS = {"--num-layers", "--micro-batch-size", "--global-batch-size", "--seq-length", "--train-iters"}
PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
WRAPPERS = re.compile(
    "env|nohup|setsid|nice|numactl|taskset|stdbuf|time|timeout|command|exec|srun|mpirun|mpiexec|orterun|jsrun|aprun|sudo"
    "|nsys|singularity|apptainer|uv|conda|poetry"
)
"""Programs that run the rest of their command line as a command."""
PROGRAM = re.compile(r"pretrain_\w+(\.py)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of torchrun: its name with hyphens, and its words in the command."""

    name: str
    words: tuple[str, ...]

    @property
    def value(self) -> str:
        """The option's value; empty for a switch."""
        return self.words[1] if len(self.words) > 1 else self.words[0].partition("=")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCommand:
    """A user's command as `prefix launcher options program arguments`.

    `launcher` is torchrun, `python -m torch.distributed.run` or empty. `environment` contains the variables that a
    script set. `skipped` are the other commands of the script, or None if there is no script.
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
        """All words of the command."""
        options = [word for option in self.options for word in option.words]
        return (*self.prefix, *self.launcher, *options, *self.program, *self.arguments)

    @property
    def file(self) -> str | None:
        """The file of the program, or None if the program is a module."""
        return next((word for word in reversed(self.program) if word.endswith(".py")), None)

    def option(self, *names: str) -> Option | None:
        """Return the last option of torchrun that has one of these names."""
        return next((each for each in reversed(self.options) if each.name in names), None)

    @property
    def is_megatron(self) -> bool:
        """Whether the program is one of Megatron-LM's programs, judged by its name or its arguments."""
        has_known_name = PROGRAM.fullmatch(Path(self.program[-1]).name) if self.program else None
        return bool(has_known_name) or len(TRAINING_FLAGS & {word.partition("=")[0] for word in self.arguments}) > 1


def parse(words: Sequence[str], directory: str, environment: Mapping[str, str] | None = None) -> UserCommand | None:
    """Return the parts of a command that starts a Python program, with torchrun or directly, or None."""
    # `bash -c '...; exec "$@"' NAME` executes the words that follow.
    is_text = len(words) > 4 and words[1] == "-c" and words[2].endswith('exec "$@"')
    shell_words = 4 if is_text and Path(words[0]).name in ("bash", "sh", "dash") else 0
    for index, word in enumerate(words[shell_words:], start=shell_words):
        name = Path(word).name
        wrapper = next((each for each in words[shell_words:index] if "=" not in each), "env")
        if not WRAPPERS.fullmatch(Path(wrapper).name):
            return None
        command = None
        if name == "torchrun":
            command = _parse_torchrun((word,), words[index + 1 :])
        elif PYTHON.fullmatch(name):
            command = _parse_python(words[index:])
        if command is not None:
            own = {name: value for name, value in (environment or {}).items() if not name.startswith("BASH_FUNC_")}
            return replace(command, prefix=tuple(words[:index]), environment=own, directory=directory)
    return None


def _parse_python(words: Sequence[str]) -> UserCommand | None:
    """Return the parts of a command whose first word is a Python interpreter."""
    index = 1
    while index < len(words) and words[index].startswith("-"):
        if words[index] == "-m" and index + 1 < len(words):
            if words[index + 1] in ("torch.distributed.run", "torch.distributed.launch"):
                return _parse_torchrun(tuple(words[: index + 2]), words[index + 2 :])
            return UserCommand(program=tuple(words[: index + 2]), arguments=_arguments(words[index + 2 :]))
        if words[index] == "-c":
            return None
        index += 2 if words[index] in ("-W", "-X", "--check-hash-based-pycs") else 1
    if index >= len(words):
        return None
    return UserCommand(program=tuple(words[: index + 1]), arguments=_arguments(words[index + 1 :]))


def _parse_torchrun(launcher: tuple[str, ...], words: Sequence[str]) -> UserCommand | None:
    options = list(_options(words))
    index = sum(len(option.words) for option in options)
    if index >= len(words):
        return None
    program, index = [words[index]], index + 1
    # Skips `python -u` in `--no-python python -u program.py`.
    while PYTHON.fullmatch(Path(program[-1]).name) or program[-1].startswith("-"):
        if index >= len(words):
            return None
        program.append(words[index])
        index += 1
    return UserCommand(
        launcher=launcher, options=tuple(options), program=tuple(program), arguments=_arguments(words[index:])
    )


def _arguments(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word != PLACEHOLDER)


def _options(words: Sequence[str]) -> Iterator[Option]:
    index = 0
    while index < len(words) and words[index].startswith("-"):
        name, equals, _ = words[index].partition("=")
        name = name.lstrip("-").replace("_", "-")
        following = "".join(words[index + 1 : index + 2])
        has_no_value = equals or name in TORCHRUN_SWITCHES or following.startswith("-") or following.endswith(".py")
        count = 1 if has_no_value else 2
        yield Option(name=name, words=tuple(words[index : index + count]))
        index += count


def parse_flags(command: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a command without its dashes, and the values that follow it."""
    for index, word in enumerate(command):
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            following = takewhile(lambda each: not each.startswith("--"), command[index + 1 :])
            yield flag.replace("_", "-"), [value] if value else list(following)


def expand_command(
    command: Sequence[str], candidate: Mapping[str, KnobValue], arguments: Sequence[str], folder: str
) -> tuple[str, ...]:
    """Return the user's command with its placeholders replaced.

    A word `{flags}` is replaced by the flags; without it, they are appended. `{folder}` and `{KNOB}` inside a word are
    replaced by the trial's folder and the knob's value. Other braces are not changed.
    """
    values = {f"{{{knob}}}": "" if value is None else str(value) for knob, value in candidate.items()}
    values["{folder}"] = folder
    argv: list[str] = []
    for argument in command:
        if argument == "{flags}":
            argv += arguments
            continue
        for placeholder, value in values.items():
            argument = argument.replace(placeholder, value)
        argv.append(argument)
    return tuple(argv if "{flags}" in command else [*argv, *arguments])


def environment(candidate: Mapping[str, KnobValue]) -> dict[str, str]:
    """Return the knob values of `candidate` as variables (`FLAGCORE_MICRO_BATCH_SIZE=4`). Switches are 1 or 0."""
    values = {knob: int(value) if isinstance(value, bool) else value for knob, value in candidate.items()}
    return {f"FLAGCORE_{knob.upper()}": "" if value is None else str(value) for knob, value in values.items()}
