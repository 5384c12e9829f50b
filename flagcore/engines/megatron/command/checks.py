"""Checks of a user's command before its first trial: what can only fail, contradicts the spec, or is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.secrets import redact_text
from flagcore.domain.spec import Spec
from flagcore.engines.megatron.command.arguments import ArgumentProblem
from flagcore.engines.megatron.command.launch import trial_command
from flagcore.engines.megatron.command.release import import_folders
from flagcore.engines.megatron.command.trial import KNOB, Change
from flagcore.engines.megatron.command.user_command import (
    UserCommand,
    argument_table,
    release_of,
    user_command,
)
from flagcore.engines.megatron.flags import environment, settings_of_command
from flagcore.engines.megatron.knobs import SPACE_KNOBS
from flagcore.engines.megatron.release_check import release_problems
from flagcore.errors import SpecError, join_errors
from flagcore.files import read_regular
from flagcore.i18n import _

KEY = "train.command"
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "moe_ffn_hidden_size")
"""Fields of a model that Megatron-LM's arguments have, too, by the same name."""
MISSING = "???"
"""The value of an argument that is still to be given."""
PRECISIONS = {"": ("fp32",), "bf16": ("bf16",), "fp16": ("fp16",), "fp8": ("fp8", "mxfp8"), "fp4": ("nvfp4",)}
"""The precisions of a spec that Megatron-LM's arguments mean, by destination; without any it is fp32."""
LOADERS = ("conda", "mamba", "micromamba", "module", "ml", "spack")
"""Programs that change the environment of a script, where they could not be run to read it."""
LONGEST = 60
"""Characters of an argument in a table."""


def check_command(spec: Spec) -> None:
    """Raise SpecError with all that makes every trial of the user's command fail."""
    command = user_command(spec)
    problems = list(_problems(spec, command)) if command else []
    if problems:
        raise join_errors(problems)


def _problems(spec: Spec, command: UserCommand) -> Iterator[SpecError]:
    program = Path(command.directory, command.program[-1])
    if program.suffix == ".py" and not program.is_file():
        fix = "correct the path, or set train.directory to the folder that it starts at"
        yield SpecError(key=KEY, value=str(program), problem="is a program that does not exist", fix=fix)
    table = argument_table(spec, command)
    arguments, refused = table.parse(command.arguments)
    for argument in arguments:
        if MISSING in argument.values:
            problem, fix = "has no value yet", "give the value"
            yield SpecError(key=KEY, value=f"{argument.flag} {MISSING}", problem=problem, fix=fix)
    for wrong in refused:
        if wrong.value != MISSING and not _is_programs_own(wrong, spec, command):
            value = " ".join(filter(None, (wrong.flag, wrong.value)))
            yield SpecError(key=KEY, value=value, problem=wrong.problem, fix=wrong.fix)
    effective = table.effective(command.arguments)
    if effective.get("use_checkpoint_args") and "num_layers" not in effective:
        fix = "give the arguments of the model"
        yield SpecError(key=KEY, value="--use-checkpoint-args", problem="has no effect: a trial loads none", fix=fix)
    if kind := effective.get("peft_type"):
        problem, fix = "trains adapters of a checkpoint, and a trial loads none", "plan it with `flag estimate`"
        yield SpecError(key=KEY, value=f"--peft-type {kind}", problem=problem, fix=fix)
    if file := effective.get("yaml_cfg"):
        problem, fix = "replaces all arguments, so that no trial can change any", "give its values as arguments"
        yield SpecError(key=KEY, value=f"--yaml-cfg {file}", problem=problem, fix=fix)
    yield from release_problems(spec, release_of(spec, command))
    yield from _wrong_number_of_processes(spec, command)


def _wrong_number_of_processes(spec: Spec, command: UserCommand) -> Iterator[SpecError]:
    nodes, devices = spec.cluster.nodes, spec.cluster.devices_per_node
    if not command.launcher and not command.prefix and nodes * (devices or 1) > 1:
        problem = f"starts one process, but the cluster has {nodes * (devices or 1)} devices"
        yield SpecError(key=KEY, value=" ".join(command.program), problem=problem, fix="start it with torchrun")
    nnodes = command.option("nnodes")
    starters = {"srun", "mpirun", "mpiexec", "orterun", "ssh"}
    nodes = 1 if spec.on_each_host else nodes
    if nodes > 1 and command.launcher and not starters & {Path(word).name for word in command.prefix}:
        problem = f"starts the ranks of this node only, but cluster.nodes = {nodes}"
        fix = (
            "name the hosts in cluster.hostfile and set auto_tuner.launcher to ssh or slurm, or start it on all nodes, "
            "with srun for example; `flag estimate` plans without it"
        )
        yield SpecError(key=KEY, value=" ".join(command.launcher), problem=problem, fix=fix)
    if nodes > 1 and nnodes and nnodes.value.isdecimal() and int(nnodes.value) != nodes:
        problem = f"contradicts cluster.nodes = {nodes}"
        yield SpecError(key=KEY, value=" ".join(nnodes.words), problem=problem, fix="use the same number")


def _is_programs_own(problem: ArgumentProblem, spec: Spec, command: UserCommand) -> bool:
    """Return whether the program or its tree may define an argument that no release of Megatron-LM has."""
    if "not an argument" not in problem.problem:
        return False
    if command.file is None:
        return True
    quoted = re.compile(rb"[\"']" + re.escape(problem.flag.encode()) + rb"[\"']")
    path = {**spec.envs, **command.environment}.get("PYTHONPATH")
    folders = import_folders(command.directory, command.file, path)
    files = [*folders[0].glob("*.py"), *(file for each in folders for file in each.glob("megatron/training/**/*.py"))]
    return any(quoted.search(_content(file)) for file in files)


def _content(file: Path) -> bytes:
    try:
        return read_regular(file)
    except OSError:
        return b""


def command_warnings(spec: Spec) -> list[str]:
    """Return a line for what a command sets differently from the spec, or for why it cannot be read."""
    try:
        command = user_command(spec)
    except SpecError as error:
        return [str(error)]
    if command is None:
        return []
    table = argument_table(spec, command)
    written = {argument.dest: argument.flag for argument in table.parse(command.arguments)[0]}
    lines = []
    for dest, value, other, consequence in _contradictions(spec, table.effective(command.arguments)):
        flag = written.get(dest, f"--{dest.replace('_', '-')}") if dest else _("no precision")
        shown = f"{flag} {value}" if dest in written and value is not True else flag
        names = {"key": KEY, "flag": shown, "other": other, "consequence": consequence}
        lines.append(_("{key} sets {flag}, the spec has {other}: {consequence}", **names))
    if fixed := [flag for knob in SPACE_KNOBS for each in knob.flags if (flag := f"--{each.name}") in written.values()]:
        names = {"key": KEY, "flags": ", ".join(fixed)}
        lines.append(_("{key} sets {flags}: candidates replace them by their own values", **names))
    return lines


def _contradictions(spec: Spec, effective: Mapping[str, Any]) -> Iterator[tuple[str, object, object, str]]:
    train, model = spec.train, spec.model
    replaced, predicted = _("the spec's is used"), _("predictions are of the spec's")
    for dest in ("seq_length", "global_batch_size"):
        if effective.get(dest, getattr(train, dest)) != getattr(train, dest):
            yield dest, effective[dest], getattr(train, dest), replaced
    for name, value in settings_of_command(spec).items():
        if train.settings.get(name, value) != value:
            yield name, value, f"train.settings.{name}: {train.settings[name]}", replaced
    wanted = {name: getattr(model, name) for name in SHAPE} | {"num_experts": model.num_moe_experts}
    if effective.get("group_query_attention"):
        wanted["num_query_groups"] = model.num_query_groups
    for dest, other in wanted.items():
        if dest in effective and other is not None and effective[dest] != other:
            yield dest, effective[dest], other, predicted
    has = next((each for each in ("fp8", "fp4", "bf16", "fp16") if effective.get(each)), "")
    if train.precision not in PRECISIONS[has]:
        yield has, effective.get(has), f"precision: {train.precision}", predicted


def command_changes(platform: Platform, candidate: Candidate) -> list[str]:
    """Return what trials change of the user's command, a line a reason, and what of a script they leave out."""
    task, values = platform.task, candidate.as_dict()
    command = user_command(task.spec, {**platform.environment, **environment(values)})
    if command is None and task.spec.train.command:
        return [_("{key} starts no program of Megatron-LM: its arguments cannot be read or changed", key=KEY)]
    if command is None:
        return []
    changes = trial_command(task, command, values, "{run}/trials/{trial}").changes
    shown = [each for each in changes if each.why != KNOB and (each.before or each.flag == "--train-iters")]
    lines = [_("trials change {count} arguments of {key}:", count=len(shown), key=KEY)]
    for why in dict.fromkeys(each.why for each in shown):
        lines.append(f"  {why}: {', '.join(_change(each) for each in shown if each.why == why)}")
    if command.skipped:
        lines.append(_("trials leave out of the script:"))
        lines += [f"  {_short(redact_text(words))}" for words in command.skipped]
    if any(words.split()[0] in LOADERS for words in command.skipped or ()):
        lines.append(_("trials run in the environment of this shell: load modules and activate environments first"))
    return ["\n".join(lines)]


def _change(change: Change) -> str:
    before, after = _short(change.before), _short(change.after)
    if not after:
        return _("{flag} removed", flag=before)
    return f"{before} -> {after.removeprefix(change.flag).strip()}" if before else after


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
