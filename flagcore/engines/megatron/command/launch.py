"""Starts a candidate with a user's own command: as a trial without side effects, or as the job itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import Launch
from flagcore.domain.secrets import is_secret, redact_arguments, redact_data
from flagcore.domain.spec import SLOTS, Spec, Task
from flagcore.engines.megatron import hetero
from flagcore.engines.megatron.command.rerun import rerun
from flagcore.engines.megatron.command.trial import (
    Change,
    ChangedCommand,
    limit_to_trial,
    replaced_arguments,
    set_arguments,
    set_launch_options,
)
from flagcore.engines.megatron.command.user_command import UserCommand, argument_table, release_of, user_command
from flagcore.engines.megatron.flags import environment, expand_command, flags
from flagcore.engines.megatron.hetero import Mixed
from flagcore.engines.megatron.knobs import BY_NAME, SPACE_KNOBS
from flagcore.engines.megatron.meshes import SIZES
from flagcore.errors import LaunchError

ARGUMENTS_FILE = "arguments.json"
"""The file in a trial's folder with its command and the differences from the user's command."""


def own_launch(
    platform: Platform, values: Mapping[str, KnobValue], folder: str, mixed: Mixed | None = None, *, for_real: bool
) -> Launch:
    """Return how to start a candidate of these `values` with the user's own command, which may be a mixed job.

    If the command is not Megatron-LM's, the flags replace `{flags}` or are appended. Raises SpecError for a script that
    cannot be read, LaunchError if `arguments.json` cannot be written.
    """
    spec, train, knob_variables = platform.task.spec, platform.task.spec.train, environment(values)
    variables = {**platform.environment, **knob_variables}
    command = user_command(spec, variables)
    if command is None:
        assert train.command is not None
        flag_words = flags(values, spec, None if for_real else spec.control.train_iters)
        argv = expand_command(train.command, values, flag_words, folder)
        return Launch(argv=argv, folder=folder, environment=knob_variables, directory=train.directory)
    if not for_real:
        changed = trial_command(platform.task, command, values, folder, mixed)
        launch = _launch(changed.command, values, folder, {**variables, **spec.envs})
        launch = replace(launch, hosts=_hosts_of(platform.task, mixed))
        _write_record(launch, changed.changes, folder)
        return launch
    words, dests = _arguments(spec, command, values, mixed)
    table = argument_table(spec, command)
    replaced = replaced_arguments(command, table, dests)
    if command.skipped is not None and (script := rerun(spec, command, replaced, words, variables)):
        argv = expand_command(script, values, (), folder)
        return Launch(argv=argv, folder=folder, environment=knob_variables, directory=train.directory, own_script=True)
    return _launch(set_arguments(command, table, dests, words).command, values, folder, {**variables, **spec.envs})


def trial_command(
    task: Task, command: UserCommand, values: Mapping[str, KnobValue], folder: str, mixed: Mixed | None = None
) -> ChangedCommand:
    """Return the user's command as a trial in `folder`: with a candidate's knobs and without side effects."""
    table, (words, dests) = argument_table(task.spec, command), _arguments(task.spec, command, values, mixed)
    with_knobs = set_arguments(command, table, dests, words)
    groups, run = task.cluster.groups, str(Path(folder).parent.parent)
    limited = limit_to_trial(with_knobs.command, table, task.spec.control.train_iters, run)
    nodes = sum(group.nodes for group in groups)
    devices = SLOTS if len(groups) > 1 else groups[0].devices_per_node
    on_each_host = task.spec.on_each_host
    launched = set_launch_options(limited.command, devices, nodes, folder, on_each_host=on_each_host)
    return ChangedCommand(command=launched.command, changes=(*with_knobs.changes, *limited.changes, *launched.changes))


def _hosts_of(task: Task, mixed: Mixed | None) -> tuple[str, ...]:
    """Return the hosts of the node groups that a mixed job uses; empty if it uses all."""
    groups = task.cluster.groups
    if mixed is None or len(mixed.groups) == len(groups):
        return ()
    of_groups = (number for number, group in enumerate(groups) for _ in range(group.nodes))
    hosts = zip(task.spec.cluster.hosts, of_groups, strict=False)
    return tuple(host for host, group in hosts if group in mixed.groups)


def _arguments(
    spec: Spec, command: UserCommand, values: Mapping[str, KnobValue], mixed: Mixed | None = None
) -> tuple[list[str], set[str]]:
    """Return a candidate's arguments, and the destinations of the arguments that they replace."""
    train = replace(spec.train, engine_version=release_of(spec, command))
    if mixed is not None:
        settings = {name: value for name, value in train.settings.items() if name not in hetero.NOT_PASSED}
        train = replace(train, settings=settings)
        values = {name: value for name, value in values.items() if name not in hetero.NOT_PASSED}
        values[SIZES["pp"]] = mixed.stages
    table, words = argument_table(spec, command), flags(values, replace(spec, work=train), None)
    knobs = [*SPACE_KNOBS, *(BY_NAME[name] for name in train.settings)]
    if mixed is not None:
        knobs = [knob for knob in knobs if knob.name not in hetero.NOT_PASSED]
        words += mixed.words
    names = [name for knob in knobs for flag in knob.flags for name in (flag.name, flag.off) if name]
    specs = [table.find(f"--{name}") for name in names] + [argument.spec for argument in table.parse(words)[0]]
    specs += [table.find(flag) for flag in hetero.REPLACED] if mixed is not None else []
    return words, {spec.dest for spec in specs if spec}


def _launch(command: UserCommand, values: Mapping[str, KnobValue], folder: str, variables: Mapping[str, str]) -> Launch:
    """Return the launch of a command. Variables that a script set take precedence over `variables`."""
    overrides = {
        name: value for name, value in sorted(command.environment.items()) if name in variables and not is_secret(name)
    }
    prefix = ("env", *(f"{name}={value}" for name, value in overrides.items())) if overrides else ()
    argv = expand_command((*prefix, *command.words), values, (), folder)
    other_variables = {name: value for name, value in command.environment.items() if name not in overrides}
    launch_variables = {**environment(values), **other_variables}
    left = command.skipped
    return Launch(argv=argv, folder=folder, environment=launch_variables, directory=command.directory, leaves_out=left)


def _write_record(launch: Launch, changes: Sequence[Change], folder: str) -> None:
    record = {
        "argv": list(redact_arguments(launch.argv)),
        "changes": redact_data([asdict(change) for change in changes]),
        "skipped": list(launch.leaves_out or ()),
    }
    file = Path(folder, ARGUMENTS_FILE)
    try:
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
