"""Changes the arguments of a user's command: for a trial of exactly N steps, or for the job with a candidate's knobs.

The options of torchrun are those of torch 2.13 `distributed/run.py`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from flagcore_training.commands import Option, UserCommand

from flagcore.spec.plain_data import package_yaml
from flagcore_megatron.program.arguments import Argument, ArgumentTable

Effective: TypeAlias = Mapping[str, Any]
"""The values of the user's arguments, by argparse destination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRule:
    """A change of a command for a trial: remove the arguments whose destinations match `dests`, and append `adds`.

    `{steps}` and `{run}` in `adds` are the number of steps of the trial and the folder of the run. A rule applies if
    `when` returns true. By default it applies if the command contains one of its arguments.
    """

    dests: str
    why: str
    adds: tuple[str, ...] = ()
    when: Callable[[Effective], bool] | None = None

    def applies(self, effective: Effective) -> bool:
        """Return whether the rule changes a command with these arguments."""
        return self.when(effective) if self.when else any(map(self.matches, effective))

    def matches(self, dest: str) -> bool:
        """Return whether the rule removes the argument with this destination."""
        return re.fullmatch(self.dests, dest) is not None


NO_PROFILES = "profiling takes time and writes files"
CONDITIONS: Mapping[str, Callable[[Effective], bool]] = {
    "always": lambda effective: True,
    "is_fp16_without_scale": lambda effective: bool(effective.get("fp16")) and not effective.get("loss_scale"),
    "is_never_evaluated": lambda effective: "eval_interval" not in effective,
    "reads_data": lambda effective: "data_cache_path" in effective or not effective.get("mock_data"),
}
"""The values of `when` in `trial_rules` of `reference.yaml`."""
RULES = tuple(
    TrialRule(**{**row, "adds": tuple(row.get("adds", ())), "when": CONDITIONS.get(row.get("when", ""))})
    for row in package_yaml(__package__, "reference.yaml")["trial_rules"]
)

EQUIVALENT_ARGUMENTS = {
    "num_layers_per_virtual_pipeline_stage": (
        "num_virtual_stages_per_pipeline_rank",
        "virtual_pipeline_model_parallel_size",
    ),
    "recompute_granularity": ("recompute_activations", "checkpoint_activations"),
}
"""Arguments that set the same value as a knob under another name."""


PORT_PLACEHOLDER = "{master_port}"
"""Placeholder for the port that the launcher assigns to a trial."""
RENDEZVOUS_OPTIONS = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone")
"""torchrun's options for a dynamic rendezvous."""
PROFILER = "nsys"
KNOB_REASON = "the candidate's value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One changed argument: its words before and after the change (empty if it is absent), and the reason."""

    flag: str
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCommand:
    """A user's command as changed for a trial or a job, and a list of the changes."""

    command: UserCommand
    changes: tuple[Change, ...] = ()


def replaced_arguments(command: UserCommand, table: ArgumentTable, dests: Collection[str]) -> list[Argument]:
    """Return the arguments of `command` that set the argparse destinations `dests`, or are equivalent to such ones."""
    replaced_dests = {each for dest in dests for each in (dest, *EQUIVALENT_ARGUMENTS.get(dest, ()))}
    return [argument for argument in table.parse(command.arguments)[0] if argument.dest in replaced_dests]


def limit_to_trial(command: UserCommand, table: ArgumentTable, steps: int, run_folder: str) -> ChangedCommand:
    """Return `command` changed to run exactly `steps` steps and to write only into the folder `run_folder`."""
    command, changes = _without_profiler(command)
    effective = table.effective(command.arguments)
    for rule in RULES:
        if rule.applies(effective):
            dests = {argument.dest for argument in table.parse(command.arguments)[0] if rule.matches(argument.dest)}
            is_known = rule.adds and table.find(rule.adds[0]) is not None
            words = [word.format(steps=steps, run=run_folder) for word in rule.adds] if is_known else []
            changed = set_arguments(command, table, dests, words, rule.why.format(steps=steps))
            command = changed.command
            changes += changed.changes
    return ChangedCommand(command=command, changes=tuple(changes))


def _without_profiler(command: UserCommand) -> tuple[UserCommand, list[Change]]:
    names = [Path(word).name for word in command.prefix]
    if PROFILER not in names:
        return command, []
    start = names.index(PROFILER)
    change = Change(flag=PROFILER, before=" ".join(command.prefix[start:]), after="", why=NO_PROFILES)
    return replace(command, prefix=command.prefix[:start]), [change]


def set_arguments(
    command: UserCommand, table: ArgumentTable, dests: Collection[str], words: Sequence[str], why: str = KNOB_REASON
) -> ChangedCommand:
    """Return `command` without its arguments for the destinations `dests`, and with `words` appended."""
    arguments = list(command.arguments)
    before: dict[str, str] = {}
    for argument in reversed(replaced_arguments(command, table, dests)):
        before.setdefault(argument.dest, " ".join(arguments[argument.position : argument.end]))
        del arguments[argument.position : argument.end]
    after = {each.dest: each for each in table.parse(words)[0]}
    changes = _changes(before, after, words, why)
    return ChangedCommand(command=replace(command, arguments=(*arguments, *words)), changes=tuple(changes))


def _changes(before: dict[str, str], after: dict[str, Argument], words: Sequence[str], why: str) -> Iterator[Change]:
    for dest in dict.fromkeys((*reversed(before), *after)):
        old = before.get(dest, "")
        new = " ".join(words[after[dest].position : after[dest].end]) if dest in after else ""
        if old != new:
            yield Change(flag=(old or new).split()[0].partition("=")[0], before=old, after=new, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """Replaces the torchrun options `names` by `word`, or removes them if `word` is empty.

    With `adds`, `word` is also set if none of the options is set.
    """

    names: tuple[str, ...]
    word: str
    why: str
    adds: bool = False


def set_launch_options(
    command: UserCommand, devices: int | str, nodes: int, folder: str, *, on_each_host: bool = False
) -> ChangedCommand:
    """Return `command` with torchrun's options for a trial: number of processes, port, and logs in `folder`.

    With `on_each_host`, the launcher starts the command on every host, and the first host is the master. Otherwise the
    user's rendezvous options are kept if there are several nodes. `devices` is the number of processes, or the
    placeholder for the number of devices of a host. Without `on_each_host`, the user's own number is kept instead of a
    placeholder.
    """
    options, changes = list(command.options), list[Change]()
    for rule in _option_rules(command, devices, nodes, folder, on_each_host) if command.launcher else ():
        replaced = [option for option in options if option.name in rule.names]
        is_set = len(replaced) == 1 and rule.word and replaced[0].value == rule.word.partition("=")[2]
        if is_set or not (replaced or rule.adds):
            continue
        options = [option for option in options if option not in replaced]
        options += [Option(name=rule.names[0], words=(rule.word,))] if rule.word else []
        old = " ".join(word for option in replaced for word in option.words)
        changes.append(Change(flag=f"--{rule.names[0]}", before=old, after=rule.word, why=rule.why))
    return ChangedCommand(command=replace(command, options=tuple(options)), changes=tuple(changes))


def _option_rules(
    command: UserCommand, devices: int | str, nodes: int, folder: str, on_each_host: bool
) -> Iterator[OptionRule]:
    all_output, one_node = "the output of all ranks is read", "the job has one node"
    free_port = "a free port avoids conflicts with other jobs"
    per_node = f"--nproc-per-node={devices}"
    if on_each_host or isinstance(devices, int):
        yield OptionRule(names=("nproc-per-node",), word=per_node, why="one process per device", adds=True)
    yield OptionRule(names=("max-restarts",), word="--max-restarts=0", why="a failed trial is not repeated")
    yield OptionRule(names=("local-ranks-filter",), word="", why=all_output)
    if command.option("redirects", "r", "tee", "t", "log-dir"):
        yield OptionRule(names=("log-dir",), word=f"--log-dir={folder}/ranks", why="logs are read", adds=True)
        yield OptionRule(names=("redirects", "r"), word="", why=all_output)
        yield OptionRule(names=("tee", "t"), word="--tee=3", why=all_output, adds=True)
    if on_each_host:
        first_host = "the first host is the master"
        for option in ("nnodes", "node-rank", "master-addr", "master-port"):
            word = f"--{option}={{{option.replace('-', '_')}}}"
            yield OptionRule(names=(option,), word=word, why=first_host, adds=True)
        yield OptionRule(names=RENDEZVOUS_OPTIONS, word="", why=first_host)
        return
    if nodes > 1:
        return
    yield OptionRule(names=("nnodes",), word="--nnodes=1", why=one_node)
    yield OptionRule(names=("node-rank",), word="--node-rank=0", why=one_node)
    if command.option("rdzv-endpoint"):
        yield OptionRule(names=("rdzv-endpoint",), word=f"--rdzv-endpoint=localhost:{PORT_PLACEHOLDER}", why=free_port)
    elif not command.option("standalone"):
        yield OptionRule(names=("master-port",), word=f"--master-port={PORT_PLACEHOLDER}", why=free_port, adds=True)
