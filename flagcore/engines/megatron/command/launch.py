"""How a candidate is started with a user's own command: a harmless trial, or the job itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import Launch
from flagcore.domain.secrets import is_secret, redact_arguments, redact_data
from flagcore.domain.spec import Spec, Task
from flagcore.engines.megatron.command.rerun import rerun
from flagcore.engines.megatron.command.trial import (
    Change,
    Changed,
    as_trial,
    launched_by,
    replaced_arguments,
    with_values,
)
from flagcore.engines.megatron.command.user_command import UserCommand, argument_table, release_of, user_command
from flagcore.engines.megatron.flags import environment, expand, flags
from flagcore.engines.megatron.knobs import BY_NAME, SPACE_KNOBS
from flagcore.errors import LaunchError

ARGUMENTS = "arguments.json"
"""In a trial's folder: its command, and what differs from the user's."""


def own_launch(platform: Platform, values: Mapping[str, KnobValue], folder: str, *, for_real: bool) -> Launch:
    """Return how to start a candidate of these `values` with the user's own command.

    Where the command's arguments are not Megatron-LM's, the flags take the place of `{flags}` or follow its words.
    Raises SpecError for a script that cannot be read, LaunchError if `arguments.json` cannot be written.
    """
    spec, train, knobs = platform.task.spec, platform.task.spec.train, environment(values)
    variables = {**platform.environment, **knobs}
    command = user_command(spec, variables)
    if command is None:
        assert train.command is not None
        given = flags(values, spec, None if for_real else spec.control.train_iters)
        argv = expand(train.command, values, given, folder)
        return Launch(argv=argv, folder=folder, environment=knobs, directory=train.directory)
    if not for_real:
        changed = trial_command(platform.task, command, values, folder)
        launch = _launch(changed.command, values, folder, {**variables, **spec.envs})
        _write(launch, changed.changes, folder)
        return launch
    words, dests = _values(spec, command, values)
    table = argument_table(spec, command)
    gone = replaced_arguments(command, table, dests)
    if command.skipped is not None and (script := rerun(spec, command, gone, words, variables)):
        argv = expand(script, values, (), folder)
        return Launch(argv=argv, folder=folder, environment=knobs, directory=train.directory, own_script=True)
    return _launch(with_values(command, table, dests, words).command, values, folder, {**variables, **spec.envs})


def trial_command(task: Task, command: UserCommand, values: Mapping[str, KnobValue], folder: str) -> Changed:
    """Return the command of a trial in `folder`: the user's with a candidate's knobs, harmless."""
    table, (words, dests) = argument_table(task.spec, command), _values(task.spec, command, values)
    first = with_values(command, table, dests, words)
    groups, run = task.cluster.groups, str(Path(folder).parent.parent)
    second = as_trial(first.command, table, task.spec.control.train_iters, run)
    nodes = sum(group.nodes for group in groups)
    each = task.spec.on_each_host
    third = launched_by(second.command, groups[0].devices_per_node, nodes, folder, on_each_host=each)
    return Changed(command=third.command, changes=(*first.changes, *second.changes, *third.changes))


def _values(spec: Spec, command: UserCommand, values: Mapping[str, KnobValue]) -> tuple[list[str], set[str]]:
    """Return a candidate's arguments, and the destinations of all that they replace."""
    train = replace(spec.train, engine_version=release_of(spec, command))
    table, words = argument_table(spec, command), flags(values, replace(spec, work=train), None)
    knobs = (*SPACE_KNOBS, *(BY_NAME[name] for name in train.settings))
    names = [name for knob in knobs for flag in knob.flags for name in (flag.name, flag.off) if name]
    specs = [table.find(f"--{name}") for name in names] + [argument.spec for argument in table.parse(words)[0]]
    return words, {spec.dest for spec in specs if spec}


def _launch(command: UserCommand, values: Mapping[str, KnobValue], folder: str, others: Mapping[str, str]) -> Launch:
    """Return the launch of a command. What a script sets takes precedence over `others`, as if the script set it."""
    own = {name: value for name, value in sorted(command.environment.items()) if name in others and not is_secret(name)}
    prefix = ("env", *(f"{name}={value}" for name, value in own.items())) if own else ()
    argv = expand((*prefix, *command.words), values, (), folder)
    rest = {name: value for name, value in command.environment.items() if name not in own}
    given = {**environment(values), **rest}
    left = command.skipped
    return Launch(argv=argv, folder=folder, environment=given, directory=command.directory, leaves_out=left)


def _write(launch: Launch, changes: Sequence[Change], folder: str) -> None:
    record = {
        "argv": list(redact_arguments(launch.argv)),
        "changes": redact_data([asdict(change) for change in changes]),
        "skipped": list(launch.leaves_out or ()),
    }
    file = Path(folder, ARGUMENTS)
    try:
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
