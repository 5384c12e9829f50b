"""Splits a user's own command, or the command in a user's script, into launcher, program and arguments.

Also finds the release of Megatron that the command runs, and converts knobs and settings to Megatron-LM's flags and
back.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

from flagcore_importers.shell import SCRIPT_FIX, SHELLS, is_script, trace_script
from packaging.version import InvalidVersion, Version

from flagcore.domain.files import read_regular
from flagcore.domain.knob import Flag
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import SettingValue, Spec
from flagcore.errors import SpecError
from flagcore.spec.knobs import setting_from_text
from flagcore_megatron.command.arguments import FORK, ArgumentTable, release_table
from flagcore_megatron.layers.stages import FIRST, LAST, LAYOUT, VIRTUAL_STAGES
from flagcore_megatron.space.knobs import BY_NAME, SETTINGS, SPACE_KNOBS

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


PLACEHOLDER = "{flags}"
"""A word of a command that is replaced by the flags of a trial. Commands that start Megatron-LM do not need it."""
MASTER_VARIABLES = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_JOB_ID": "1",
}
MASTER_VARIABLES |= dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0")
"""Default environment variables of a traced script, whose values differ between hosts or jobs."""
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


def starts_megatron(command: Sequence[str], directory: str) -> bool:
    """Return whether a command starts one of Megatron-LM's programs."""
    parsed = parse(command, directory)
    return parsed is not None and parsed.is_megatron


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


def parse(words: Sequence[str], directory: str, environment: Mapping[str, str] | None = None) -> UserCommand | None:
    """Return the parts of a command that starts a Python program, with torchrun or directly, or None."""
    # `bash -c '...; exec "$@"' NAME` executes the words that follow.
    is_shell = len(words) > 4 and Path(words[0]).name in SHELLS and words[1] == "-c" and words[2].endswith('exec "$@"')
    shell_words = 4 if is_shell else 0
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


def _interpreter(command: UserCommand, path: str | None) -> str | None:
    """Return a command's Python interpreter, or the one next to its torchrun, or None if it is flagcore's own."""
    interpreters = [word for word in (*command.launcher, *command.program) if PYTHON.fullmatch(Path(word).name)]
    file = shutil.which((*interpreters, *command.launcher, "")[0], path=path)
    if file is None or Path(file).parent == Path(sys.executable).parent:
        return None
    return file if interpreters else next(map(str, Path(file).parent.glob("python3")), None)


SETTINGS_BY_FLAG = {
    flag.name: (knob, flag.word)
    for knob in SETTINGS
    for flag in (*knob.flags, Flag(name="" if knob.flags else knob.name.replace("_", "-")))
    if flag.name
}
"""Each setting by its flag, with the value that the flag sets if the flag has no value of its own.

If a setting has no Megatron flag, its name is used as the flag, which a user's own program may accept."""


def settings_of_command(spec: Spec) -> dict[str, SettingValue]:
    """Return the settings that the flags of `train.command` set. If a flag is repeated, its last value is used."""
    return dict(parse_settings(tuple(_program_arguments(spec))))


@lru_cache(maxsize=64)
def parse_settings(command: tuple[str, ...]) -> Mapping[str, SettingValue]:
    """Return the settings that the flags of a command set."""
    settings: dict[str, SettingValue] = {}
    for flag, values in parse_flags(command):
        if flag in SETTINGS_BY_FLAG:
            knob, word = SETTINGS_BY_FLAG[flag]
            text = "true" if knob.kind == "flag" else word or ",".join(values)
            settings |= setting_from_text(knob.name, text, SETTINGS)
    return settings


def implementation_of_command(spec: Spec) -> str | None:
    """Return the value of `--transformer-impl` in `train.command`, or None if it is missing or invalid."""
    values = dict(parse_flags(_program_arguments(spec))).get("transformer-impl", [])
    return values[0] if values[:1] in (["local"], ["transformer_engine"]) else None


def _program_arguments(spec: Spec) -> Sequence[str]:
    """Return the arguments of the program that `train.command` starts, or the whole command if it cannot be parsed."""
    command = readable_command(spec)
    return command.arguments if command else spec.train.command or ()


def parse_flags(command: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a command without its dashes, and the values that follow it."""
    for index, word in enumerate(command):
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            following = takewhile(lambda each: not each.startswith("--"), command[index + 1 :])
            yield flag.replace("_", "-"), [value] if value else list(following)


def flags(candidate: Mapping[str, KnobValue], spec: Spec, train_iters: int | None) -> list[str]:
    """Return Megatron's flags for a candidate. `train_iters` is the number of steps of a trial."""
    train = spec.train
    result = ["--seq-length", str(train.seq_length), "--global-batch-size", str(train.global_batch_size), *train.flags]
    for knob in SPACE_KNOBS:
        result += knob.arguments(candidate.get(knob.name), train.engine_version)
    for name in (LAYOUT, FIRST, LAST, VIRTUAL_STAGES):
        result += BY_NAME[name].arguments(candidate.get(name), train.engine_version)
    result += _setting_flags(spec)
    if train_iters is not None:
        result += ["--train-iters", str(train_iters), "--log-interval", "1"]
    return result


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


def _setting_flags(spec: Spec) -> list[str]:
    """Return flags for the settings in the spec that the user's command does not contain, or sets to other values."""
    command_settings = {} if readable_command(spec) else settings_of_command(spec)
    settings = dict(spec.train.settings)
    if {**command_settings, **settings}.get("moe_token_dispatcher_type") == "flex":
        settings.setdefault("moe_flex_dispatcher_backend", "deepep")  # Megatron has no default before 0.16
    release = spec.train.engine_version
    flags = [BY_NAME[key].arguments(value, release) for key, value in settings.items() if key not in command_settings]
    if settings.get("use_megatron_fsdp") and "--data-parallel-sharding-strategy" not in _program_arguments(spec):
        flags.append(("--data-parallel-sharding-strategy", "optim_grads_params"))  # the default is no_shard before 0.18
    return [word for each in flags for word in each]


def environment(candidate: Mapping[str, KnobValue]) -> dict[str, str]:
    """Return the knob values of `candidate` as variables (`FLAGCORE_MICRO_BATCH_SIZE=4`). Switches are 1 or 0."""
    values = {knob: int(value) if isinstance(value, bool) else value for knob, value in candidate.items()}
    return {f"FLAGCORE_{knob.upper()}": "" if value is None else str(value) for knob, value in values.items()}
