"""A user's command with other arguments: as a trial of exactly N steps, or as the job itself with a candidate's knobs.

Source of torchrun's options: torch 2.13 `distributed/run.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from flagcore.engines.megatron.command.arguments import Argument, ArgumentTable
from flagcore.engines.megatron.command.rules import RULES, SAME_MEANING, TrialRule
from flagcore.engines.megatron.command.user_command import Option, UserCommand

PORT = "{master_port}"
"""Stands for the port that a launcher gives to a trial."""
RENDEZVOUS = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone")
"""torchrun's options of a meeting place without a fixed first host."""
KNOB = "the candidate's value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One argument that differs from the user's: its words before and after, empty if absent, and why."""

    flag: str
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A command with changes, and what they are."""

    command: UserCommand
    changes: tuple[Change, ...] = ()


def with_values(command: UserCommand, table: ArgumentTable, dests: Collection[str], words: Sequence[str]) -> Changed:
    """Return `command` with the arguments `words` of a candidate in place of the user's own for `dests`."""
    return _replaced(command, table, dests, words, KNOB)


def replaced_arguments(command: UserCommand, table: ArgumentTable, dests: Collection[str]) -> list[Argument]:
    """Return the arguments of `command` that say what those for `dests` say."""
    gone = {each for dest in dests for each in (dest, *SAME_MEANING.get(dest, ()))}
    return [argument for argument in table.parse(command.arguments)[0] if argument.dest in gone]


def as_trial(command: UserCommand, table: ArgumentTable, steps: int, run: str) -> Changed:
    """Return `command` with exactly `steps` steps and nothing to write outside the folder `run`."""
    changes: list[Change] = []
    effective = table.effective(command.arguments)
    for rule in RULES:
        if rule.applies(effective):
            dests = {argument.dest for argument in table.parse(command.arguments)[0] if rule.matches(argument.dest)}
            words = _added(rule, table, steps, run)
            changed = _replaced(command, table, dests, words, rule.why.format(steps=steps))
            command = changed.command
            changes += changed.changes
    return Changed(command=command, changes=tuple(changes))


def _added(rule: TrialRule, table: ArgumentTable, steps: int, run: str) -> tuple[str, ...]:
    if not rule.adds or table.find(rule.adds[0]) is None:
        return ()
    return tuple(word.format(steps=steps, run=run) for word in rule.adds)


def _replaced(
    command: UserCommand, table: ArgumentTable, dests: Collection[str], words: Sequence[str], why: str
) -> Changed:
    """Return a command without the arguments of `dests`, and with `words` at the end."""
    arguments = list(command.arguments)
    before: dict[str, str] = {}
    for argument in reversed(replaced_arguments(command, table, dests)):
        before.setdefault(argument.dest, " ".join(arguments[argument.position : argument.end]))
        del arguments[argument.position : argument.end]
    after = {each.dest: each for each in table.parse(words)[0]}
    changes = _changes(before, after, words, why)
    return Changed(command=replace(command, arguments=(*arguments, *words)), changes=tuple(changes))


def _changes(before: dict[str, str], after: dict[str, Argument], words: Sequence[str], why: str) -> Iterator[Change]:
    for dest in dict.fromkeys((*reversed(before), *after)):
        old = before.get(dest, "")
        new = " ".join(words[after[dest].position : after[dest].end]) if dest in after else ""
        if old != new:
            yield Change(flag=(old or new).split()[0].partition("=")[0], before=old, after=new, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """Options of torchrun that `word` replaces; an empty one removes them. `adds` is whether it is added, too."""

    names: tuple[str, ...]
    word: str
    why: str
    adds: bool = False


def launched_by(command: UserCommand, devices: int, nodes: int, folder: str, *, on_each_host: bool = False) -> Changed:
    """Return `command` with torchrun's options for a trial: its processes, its port, and its logs in `folder`.

    `on_each_host`: the launcher starts it on every host, and the ranks meet at the first. Otherwise, on several nodes,
    their meeting place stays the user's.
    """
    options, changes = list(command.options), list[Change]()
    for rule in _option_rules(command, devices, nodes, folder, on_each_host) if command.launcher else ():
        before = [option for option in options if option.name in rule.names]
        same = len(before) == 1 and rule.word and before[0].value == rule.word.partition("=")[2]
        if same or not (before or rule.adds):
            continue
        options = [option for option in options if option not in before]
        options += [Option(name=rule.names[0], words=(rule.word,))] if rule.word else []
        old = " ".join(word for option in before for word in option.words)
        changes.append(Change(flag=f"--{rule.names[0]}", before=old, after=rule.word, why=rule.why))
    return Changed(command=replace(command, options=tuple(options)), changes=tuple(changes))


def _option_rules(
    command: UserCommand, devices: int, nodes: int, folder: str, on_each_host: bool
) -> Iterator[OptionRule]:
    output, alone = "the output of all ranks is read", "the job has one node"
    free = "a free port disturbs no other job"
    yield OptionRule(
        names=("nproc-per-node",), word=f"--nproc-per-node={devices}", why="the devices of a node", adds=True
    )
    yield OptionRule(names=("max-restarts",), word="--max-restarts=0", why="a failed trial is not repeated")
    yield OptionRule(names=("local-ranks-filter",), word="", why=output)
    if command.option("redirects", "r", "tee", "t", "log-dir"):
        yield OptionRule(names=("log-dir",), word=f"--log-dir={folder}/ranks", why="logs are the trial's", adds=True)
        yield OptionRule(names=("redirects", "r"), word="", why=output)
        yield OptionRule(names=("tee", "t"), word="--tee=3", why=output, adds=True)
    if on_each_host:
        first = "all hosts meet at the first"
        for option in ("nnodes", "node-rank", "master-addr", "master-port"):
            word = f"--{option}={{{option.replace('-', '_')}}}"
            yield OptionRule(names=(option,), word=word, why=first, adds=True)
        yield OptionRule(names=RENDEZVOUS, word="", why=first)
        return
    if nodes > 1:
        return
    yield OptionRule(names=("nnodes",), word="--nnodes=1", why=alone)
    yield OptionRule(names=("node-rank",), word="--node-rank=0", why=alone)
    if command.option("rdzv-endpoint"):
        yield OptionRule(names=("rdzv-endpoint",), word=f"--rdzv-endpoint=localhost:{PORT}", why=free)
    elif not command.option("standalone"):
        yield OptionRule(names=("master-port",), word=f"--master-port={PORT}", why=free, adds=True)
