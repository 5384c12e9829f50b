"""A user's own command that starts a Python program: its launcher, program and arguments."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import placed
from flagcore_importers.programs import grouped

from flagcore.domain.launch import Start
from flagcore.domain.space import KnobValue
from flagcore.errors import LaunchError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import Notes

NO_COMMAND = N_("{key} is missing: nothing starts or tunes the plan; `flag import -- COMMAND` writes it")
PLACEHOLDER = "{flags}"
"""A word of a command that is replaced by the flags of a trial. Commands that start Megatron-LM do not need it."""
FILLED = {
    *("folder", "flags", "node_rank", "nnodes", "master_addr", "master_port", "node_ports"),
    *("interface", "address", "adapters", "hostfile", "type", "slots"),
}
"""The placeholders of all commands: those of a trial, and of a host."""
OF_HOST = {
    **dict.fromkeys(("machine_rank", "node_rank"), "{node_rank}"),
    **dict.fromkeys(("main_process_ip", "master_addr"), "{master_addr}"),
    **dict.fromkeys(("main_process_port", "master_port"), "{master_port}"),
    "rdzv_endpoint": "{master_addr}:{master_port}",
}
"""The options of launchers that have other values on each host or in each job."""
TORCHRUN_SWITCHES = {"standalone", "m", "module", "no-python", "run-path", "use-env", "virtual-local-rank"}
"""Options of torchrun without a value. Source: torch 2.13 `distributed/run.py`."""
OF_ACCELERATE = {
    "num_machines": "{nnodes}",
    **{name: OF_HOST[name] for name in ("machine_rank", "main_process_ip", "main_process_port")},
}
"""The options of accelerate on several hosts (1.15 `utils/launch.py`). torchrun takes its own from variables."""
LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "automodel"), "nproc_per_node"),
    "deepspeed": "num_gpus",
    **dict.fromkeys(("accelerate launch", "trl sft", "axolotl train"), "num_processes"),
}
"""The option for the number of processes: of a host, or, in those of accelerate, of all."""
AFTER = ("automodel", "trl sft", "axolotl train")
"""Programs that pass options after their own to a launcher (NeMo AutoModel 0.7, trl 1.16, axolotl 0.19 `cli`)."""
TRAINING_FLAGS = {"--num-layers", "--micro-batch-size", "--global-batch-size", "--seq-length", "--train-iters"}
PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
WRAPPERS = re.compile(
    "env|nohup|setsid|nice|numactl|taskset|stdbuf|time|timeout|command|exec|srun|mpirun|mpiexec|orterun|jsrun|aprun|sudo"
    "|nsys|singularity|apptainer|uv|conda|poetry"
)
"""Programs that run the rest of their command line as a command."""
PROGRAM = re.compile(r"pretrain_\w+(\.py)?")
STARTERS = re.compile("(^|[ /])(srun|mpirun|mpiexec|orterun|jsrun|aprun)( |$)")
"""Programs that start ranks. Their options: tasks, tasks of a host, hosts."""
TASKS = re.compile(r" (?:-np|--np|-n|--ntasks)(?:[ =]+(\S*)|(?=\d)(\d+))")
TASKS_PER_HOST = re.compile(
    r" (?:-{1,2}npernode|-{1,2}ppn|--ntasks-per-node|--gpus-per-node|\S*ppr)[ =:]+(?:\w+:)?(\d+)\b"
)
HOSTS = re.compile(r" (?:--nodes[ =]|-N ?)(\d+)")


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
    for flag, inline, following, _place in grouped(command):
        if flag:
            yield flag[2:].replace("_", "-"), [*filter(None, inline)] or following


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


def with_places(words: Sequence[str], empty_of: int = 0) -> tuple[str, ...]:
    """Return a command with the placeholders of its host in the options of its launcher.

    With `empty_of`, the number of hosts, these are only in options without a value, which variables have that something
    sets on each host. On one host, such options are left out.
    """
    found, places = list(words), {**OF_HOST, **({"nnodes": "{nnodes}"} if empty_of else {})}
    for name, _value, first, end in reversed([*placed(found)]):
        before, equals, value = found[first].partition("=")
        follows = not equals and end > first + 1 and not found[first + 1].endswith(".py")
        if name in places and not (empty_of and (value or follows)):
            found[first : first + 1 + follows] = [] if empty_of == 1 else [f"{before}={places[name]}"]
    return tuple(found)


def with_processes(words: Sequence[str], hosts: int, per_host: int) -> tuple[str, ...]:
    """Return a command whose launcher starts `per_host` processes on each of `hosts`.

    Raises LaunchError for DeepSpeed's launcher without a list of hosts.
    """
    names = [Path(word).name for word in words]
    pairs = [f"{before} {name}" for before, name in zip(["", *names], names, strict=False)]
    script = next((n for n, name in enumerate(names) if name.endswith(".py")), len(names))  # what follows is its own
    found_at = list(zip(names, pairs, strict=True))[:script]
    place, launcher = next(((n, key) for n, each in enumerate(found_at) for key in each if key in LAUNCHERS), (0, ""))
    own = len(words) if launcher in AFTER else script
    given = {name: (first, end) for name, _value, first, end in placed([*words]) if first < own}
    if not launcher or (launcher == "deepspeed" and {"include", "exclude"} & {*given}):
        return tuple(words)
    if launcher == "deepspeed" and hosts > 1 and "hostfile" not in given:
        fix = _("start it with torchrun, or add --hostfile FILE")
        raise LaunchError(_("deepspeed starts the processes of one host: {fix}", fix=fix))
    is_torchrun = launcher in AFTER and any(re.search(r"launcher[= ]torchrun$", each) for each in (*names, *pairs))
    option = "nproc_per_node" if is_torchrun else LAUNCHERS[launcher]
    wanted = {option: str(per_host)}
    if option == "num_processes":
        wanted = {option: str(hosts * per_host), **(OF_ACCELERATE if hosts > 1 else {})}
    elif launcher == "deepspeed" and hosts > 1:
        wanted |= {"no_ssh": "", **{name: OF_HOST[name] for name in ("node_rank", "master_addr", "master_port")}}
    found = list(words)
    new = [f"--{name}={value}".removesuffix("=") for name, value in wanted.items() if name not in given]
    wanted |= {**dict.fromkeys(("nnodes", "num_machines", "num_nodes"), str(hosts)), option: wanted[option]}
    for name, (first, end) in reversed(given.items()):
        before, equals, value = found[first].partition("=")
        if name in wanted and (value or "".join(found[first + 1 : end][:1])).isdecimal():
            found[first : first + 2 - len(equals)] = [f"{before}={wanted[name]}"] if equals else [before, wanted[name]]
        elif name == "standalone" and hosts > 1:
            del found[first]
    place = len(found) if launcher in AFTER else place + 1
    mark = ["--"] * (launcher == "axolotl train" and bool(new) and "--" not in found)
    return (*found[:place], *mark, *new, *found[place:])


def unknown_placeholders(words: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each placeholder in the words of a command that is neither `known` nor in `FILLED`."""
    names = {*FILLED, *known}
    for name in dict.fromkeys(re.findall(r"(?<!\$)\{([a-z]\w*)\}", " ".join(words))):
        if name not in names:
            yield (
                f"train.command has {{{name}}}, which stands for nothing: it is passed as it is; placeholders are "
                f"{', '.join(sorted(names))}"
            )


def environment(candidate: Mapping[str, KnobValue]) -> dict[str, str]:
    """Return the knob values of `candidate` as variables (`FLAGCORE_MICRO_BATCH_SIZE=4`). Switches are 1 or 0."""
    values = {knob: int(value) if isinstance(value, bool) else value for knob, value in candidate.items()}
    return {f"FLAGCORE_{knob.upper()}": "" if value is None else str(value) for knob, value in values.items()}


def cluster_of(command: UserCommand, notes: Notes, start: Start) -> dict[str, Any]:
    """Return the section `cluster` from the options of the launcher, or else from the surroundings of the command."""
    note_empty(command, notes)
    option = command.option("nproc-per-node")
    hosts, per_host = _of_launcher(command, notes, start.hosts * start.instances, start.devices or 0)
    has_starter = hosts > 1 or bool(STARTERS.search(" ".join(command.prefix)))
    default = "1" if option is None and (command.launcher or not has_starter) else "auto"
    ranks = [name for name in start.unset if re.search("._(RANK|PROCID|SIZE)$", name)]
    if ranks and not command.launcher and not has_starter:
        fix = "give the command that starts it, as in `flag import -- mpirun -np N bash FILE`, or set these variables"
        notes.report("command", f"is one rank of a job, which {', '.join(ranks)} number", fix=fix)
    devices = option.value if option else ""
    devices = devices if devices.isdecimal() else str(per_host or start.devices or default)
    nodes = option.value.rpartition(":")[2] if (option := command.option("nnodes")) else ""
    if not devices.isdecimal():
        notes.note("cluster.devices_per_node", "is not in the command; auto is the number on this machine", "cluster")
    return {
        "chip": "auto",
        "nodes": int(nodes) if nodes.isdecimal() and int(nodes) else hosts,
        "devices_per_node": int(devices) if devices.isdecimal() else "auto",
    }


def note_empty(command: UserCommand, notes: Notes) -> None:
    """Add a note on each option of a launcher that lacks its value, and on each argument such as `--name=`.

    Those of a host have a value in each start (`with_places`).
    """
    known = {*TORCHRUN_SWITCHES, *(name.replace("_", "-") for name in OF_HOST)}
    options = [each.words[0] for each in command.options if not each.value and each.name not in known]
    for word in [*options, *(each for each in command.arguments if re.fullmatch(r"--[\w.-]+=", each))]:
        notes.note(word.partition("=")[0], "has no value: a variable of the script may be empty", "train.command")


def _of_launcher(command: UserCommand, notes: Notes, hosts: int, devices: int) -> tuple[int, int]:
    """Return the number of hosts, by default `hosts`, and the ranks per host (or 0) that srun or mpirun start.
    `devices`: those of a host, or 0. Several times as many ranks are on several hosts."""
    text = f" {' '.join(command.prefix)}"
    starter = STARTERS.search(text)
    if starter is None:
        return hosts, 0
    text = text[starter.end() - 1 :]
    if starter[2] == "jsrun":
        sets, size, per_host_of = (int(each[1]) if (each := re.search(rf" -{n} ?(\d+)", text)) else 1 for n in "nar")
        return max(1, sets // max(1, per_host_of)), 0 if command.launcher else size * per_host_of
    tasks, per_host, given = (each.search(text) for each in (TASKS, TASKS_PER_HOST, HOSTS))
    per = int(per_host[1]) if per_host and not command.launcher else 0
    if starter[2] == "srun":
        return (int(given[1]) if given else hosts), per
    if given and not per:  # -N of Open MPI
        per = int(given[1])
    count = re.sub("^-.*", "", tasks[1] or tasks[2] or "") if tasks else ""
    if tasks and not (count.isdecimal() and int(count)):
        fix = "set the variables of the batch system that the script uses, as in NHOSTS=4 flag import FILE"
        notes.report(tasks[0].split()[0], "has no number of processes", value=count or None, fix=fix)
        return hosts, per
    total = int(count or 0)
    if command.launcher:  # a torchrun on each host
        return (total or hosts), 0
    if hosts == 1 and devices and total % devices == 0:
        per = per or devices
    return (max(1, total // per), per) if per and total else (hosts, per or -(-total // hosts))
