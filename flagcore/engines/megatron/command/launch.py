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
from flagcore.domain.spec import Task
from flagcore.engines.megatron.command.trial import Change, Changed, as_trial, launched_by, with_values
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
    task = platform.task
    spec, train, knobs = task.spec, task.spec.train, environment(values)
    command = user_command(spec, {**platform.environment, **knobs})
    if command is None:
        assert train.command is not None
        given = flags(values, spec, None if for_real else spec.control.train_iters)
        argv = expand(train.command, values, given, folder)
        return Launch(argv=argv, folder=folder, environment=knobs, directory=train.directory)
    changed = changed_command(task, command, values, folder, for_real=for_real)
    launch = _launch(changed.command, values, folder, {**platform.environment, **spec.envs})
    launch = replace(launch, environment={**knobs, **launch.environment}, leaves_out=changed.command.skipped)
    if not for_real:
        _write(launch, changed.changes, folder)
    return launch


def changed_command(
    task: Task, command: UserCommand, values: Mapping[str, KnobValue], folder: str, *, for_real: bool = False
) -> Changed:
    """Return the command of a candidate: with its knobs and, unless `for_real`, as a trial in `folder`."""
    train = replace(task.spec.train, engine_version=release_of(task.spec, command))
    table, words = argument_table(task.spec, command), flags(values, replace(task.spec, work=train), None)
    knobs = (*SPACE_KNOBS, *(BY_NAME[name] for name in train.settings))
    names = [name for knob in knobs for flag in knob.flags for name in (flag.name, flag.off) if name]
    specs = [table.find(f"--{name}") for name in names] + [argument.spec for argument in table.parse(words)[0]]
    first = with_values(command, table, {spec.dest for spec in specs if spec}, words)
    if for_real:
        return first
    groups, run = task.cluster.groups, str(Path(folder).parent.parent)
    second = as_trial(first.command, table, task.spec.control.train_iters, run)
    nodes = sum(group.nodes for group in groups)
    each = task.spec.on_each_host
    third = launched_by(second.command, groups[0].devices_per_node, nodes, folder, on_each_host=each)
    return Changed(command=third.command, changes=(*first.changes, *second.changes, *third.changes))


def _launch(command: UserCommand, values: Mapping[str, KnobValue], folder: str, others: Mapping[str, str]) -> Launch:
    """Return the launch of a command. What a script sets takes precedence over `others`, as if the script set it."""
    own = {name: value for name, value in sorted(command.environment.items()) if name in others and not is_secret(name)}
    prefix = ("env", *(f"{name}={value}" for name, value in own.items())) if own else ()
    argv = expand((*prefix, *command.words), values, (), folder)
    rest = {name: value for name, value in command.environment.items() if name not in own}
    return Launch(argv=argv, folder=folder, environment=rest, directory=command.directory)


def _write(launch: Launch, changes: Sequence[Change], folder: str) -> None:
    record = {
        "argv": list(redact_arguments(launch.argv)),
        "changes": redact_data([asdict(change) for change in changes]),
        "skipped": list(launch.leaves_out),
    }
    file = Path(folder, ARGUMENTS)
    try:
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
