"""Checks a user's command before the first trial, and lists where it contradicts the spec and what trials change in it.

Also checks the installed release, and warns about settings and knobs that have no effect.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flagcore_importers.programs import unknown_release
from flagcore_training.commands import TORCHRUN_SWITCHES, UserCommand, environment, unknown_placeholders
from flagcore_training.lengths import length_warnings
from packaging.version import Version

from flagcore.contracts import Platform
from flagcore.domain.files import read_regular
from flagcore.domain.secrets import redact_text
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import AUTO, SettingValue, Spec, Task
from flagcore.errors import SpecError, SpecErrors, join_errors
from flagcore.i18n import N_, _
from flagcore_megatron.command.changes import KNOB_REASON, Change
from flagcore_megatron.command.launch import trial_command
from flagcore_megatron.mixed.hetero import mixed_job
from flagcore_megatron.program.arguments import ArgumentProblem, known_releases, release_table
from flagcore_megatron.program.user_command import (
    argument_table,
    detected_release,
    import_folders,
    readable_command,
    release_of,
    user_command,
)
from flagcore_megatron.space.flags import release_problem, settings_of_command
from flagcore_megatron.space.knobs import BY_NAME, SPACE_KNOBS
from flagcore_megatron.space.stages import EMBEDDING, LAYOUT, LOSS, PATTERN

KEY = "train.command"
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "moe_ffn_hidden_size")
"""Fields of a model that have the same name as an argument of Megatron-LM."""
PLACEHOLDER_VALUE = "???"
"""The placeholder for a value that the user must fill in."""
PRECISIONS = {"": ("fp32",), "bf16": ("bf16",), "fp16": ("fp16",), "fp8": ("fp8", "mxfp8"), "fp4": ("nvfp4", "mxfp4")}
"""The precisions in a spec for each precision argument of Megatron-LM. Without such an argument, it is fp32."""
ENVIRONMENT_LOADERS = ("conda", "mamba", "micromamba", "module", "ml", "spack")
"""Programs that change the environment. They are skipped when a script is traced."""
MAX_ARGUMENT_LENGTH = 60
"""Maximum number of characters of an argument in a message."""


def check_command(spec: Spec) -> None:
    """Raise SpecError that lists all problems that would make every trial of the user's command fail."""
    command = user_command(spec)
    problems = list(_problems(spec, command)) if command else []
    if problems:
        raise join_errors(problems)


def check_variables(task: Task) -> None:
    """Raise SpecError if a knob of a plugin sets a variable that the user's command or script sets."""
    command = readable_command(task.spec)
    own = command.environment if command else {}
    for knob in task.knobs:
        for name in {name for effect in knob.effects.values() for name in effect.environment} & {*own}:
            key, problem = f"auto_tuner.space.{knob.name}", f"sets the variable {name}, which {KEY} also sets"
            raise SpecError(key=key, value=own[name], problem=problem, fix="remove one of the two")


def _problems(spec: Spec, command: UserCommand) -> Iterator[SpecError]:
    program = Path(command.directory, command.program[-1])
    if program.suffix == ".py" and not os.path.isfile(program):
        fix = "correct the path, or set train.directory to the folder that it is relative to"
        yield _error(program, "does not exist", fix)
    table = argument_table(spec, command)
    arguments, parse_problems = table.parse(command.arguments)
    for argument in arguments:
        if PLACEHOLDER_VALUE in argument.values:
            yield _error(f"{argument.flag} {PLACEHOLDER_VALUE}", "is a placeholder", "replace it by a value")
    for parse_problem in parse_problems:
        if parse_problem.value != PLACEHOLDER_VALUE and not _may_be_defined_by_program(parse_problem, spec, command):
            value = " ".join(filter(None, (parse_problem.flag, parse_problem.value)))
            yield _error(value, parse_problem.problem, parse_problem.fix)
    effective = table.effective(command.arguments)
    if effective.get("use_checkpoint_args") and "num_layers" not in effective:
        problem = "has no effect: a trial loads no checkpoint"
        yield _error("--use-checkpoint-args", problem, "add the arguments of the model")
    for flag, needs in unmet_by_fsdp(spec, effective, command.environment):
        yield _error(flag, f"needs {needs}", "add it")
    if kind := effective.get("peft_type"):
        problem = "needs a checkpoint, but a trial loads none"
        yield _error(f"--peft-type {kind}", problem, "predict it with `flag estimate`")
    if file := effective.get("yaml_cfg"):
        problem = "replaces all arguments, so a trial cannot change them"
        yield _error(f"--yaml-cfg {file}", problem, "pass its values as arguments")
    yield from release_problems(spec, release_of(spec, command))
    yield from _process_count_problems(spec, command)


def unmet_by_fsdp(
    spec: Spec, effective: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the flag of an FSDP in a command, and what its release asserts for it that the command lacks.

    Source: Megatron-LM `validate_args` (training/arguments.py), core_v0.16 to 0.20.
    """
    has_torch = bool(effective.get("use_torch_fsdp2"))
    if not has_torch and not effective.get("use_megatron_fsdp"):
        return
    flag = "--use-torch-fsdp2" if has_torch else "--use-megatron-fsdp"
    given = str(effective.get("ckpt_format", "torch_dist"))
    if given not in (formats := ("torch_dist", "torch_dcp") if has_torch else ("fsdp_dtensor",)):
        yield flag, f"--ckpt-format {formats[0]}"
    if has_torch and effective.get("gradient_accumulation_fusion", True):
        yield flag, "--no-gradient-accumulation-fusion"
    if has_torch and not effective.get("untie_embeddings_and_output_weights"):
        yield flag, "--untie-embeddings-and-output-weights"
    if {**environment, **spec.envs}.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield flag, "another value of CUDA_DEVICE_MAX_CONNECTIONS than 1"


def _error(value: object, problem: str, fix: str) -> SpecError:
    return SpecError(key=KEY, value=str(value), problem=problem, fix=fix)


def _process_count_problems(spec: Spec, command: UserCommand) -> Iterator[SpecError]:
    devices = spec.cluster.nodes * (spec.cluster.devices_per_node or 1)
    if not command.launcher and not command.prefix and devices > 1:
        problem = f"starts one process, but the cluster has {devices} devices"
        yield _error(" ".join(command.program), problem, "start it with torchrun")
    for option in command.options:
        if not option.value and option.name not in (*TORCHRUN_SWITCHES, "master-port", "nproc-per-node"):
            fix = "write its value; a command of the script that prints it may not be run when the script is read"
            yield _error(option.words[0], "has no value", fix)
    if spec.cluster.nodes > 1 and not spec.on_each_host:
        yield from _node_count_problems(spec.cluster.nodes, command)


def _node_count_problems(nodes: int, command: UserCommand) -> Iterator[SpecError]:
    """Yield the problems of a command that flagcore starts on one host, but that has to run on several `nodes`."""
    node_starters = {"srun", "mpirun", "mpiexec", "orterun", "jsrun", "aprun", "ssh"}
    if command.launcher and node_starters.isdisjoint(Path(word).name for word in command.prefix):
        problem = f"starts the ranks of this node only, but cluster.nodes = {nodes}"
        fix = (
            "list the hosts in cluster.hostfile and set auto_tuner.launcher to ssh or slurm, or start it on all nodes, "
            "for example with srun"
        )
        yield _error(" ".join(command.launcher), problem, fix)
    nnodes = command.option("nnodes")
    if nnodes and nnodes.value.isdecimal() and int(nnodes.value) != nodes:
        yield _error(" ".join(nnodes.words), f"contradicts cluster.nodes = {nodes}", "use the same number")


def _may_be_defined_by_program(problem: ArgumentProblem, spec: Spec, command: UserCommand) -> bool:
    """Return whether the user's program or its source tree may define this argument."""
    if "not an argument" not in problem.problem:
        return False
    if command.file is None:
        return True
    quoted_flag = re.compile(rb"[\"']" + re.escape(problem.flag.encode()) + rb"[\"']")
    path = {**spec.envs, **command.environment}.get("PYTHONPATH")
    folders = import_folders(command.directory, command.file, path)
    files = [*folders[0].glob("*.py"), *(file for each in folders for file in each.glob("megatron/training/**/*.py"))]
    return any(quoted_flag.search(_content(file)) for file in files)


def _content(file: Path) -> bytes:
    try:
        return read_regular(file)
    except OSError:
        return b""


def command_warnings(spec: Spec) -> list[str]:
    """Return a line for each argument that contradicts the spec. If the command cannot be read, return the reason."""
    try:
        command = user_command(spec)
    except SpecError as error:
        return [str(error)]
    if command is None:
        return []
    table = argument_table(spec, command)
    effective = table.effective(command.arguments)
    flags_by_dest = {argument.dest: argument.flag for argument in table.parse(command.arguments)[0]}
    lines = [*_release_warnings(spec, command)]
    for dest, value, other, consequence in _contradictions(spec, effective):
        flag = flags_by_dest.get(dest, f"--{dest.replace('_', '-')}") if dest else _("no precision")
        shown_flag = f"{flag} {value}" if dest in flags_by_dest and value is not True else flag
        names = {"key": KEY, "flag": shown_flag, "other": other, "consequence": consequence}
        lines.append(_("{key} sets {flag}, the spec has {other}: {consequence}", **names))
    for flag, needs in unmet_by_fsdp(spec, effective, command.environment):
        lines.append(_("{key} sets {flag}, which needs {needs}: trials cannot start", key=KEY, flag=flag, needs=needs))
    knob_flags = [f"--{each.name}" for knob in SPACE_KNOBS for each in knob.flags]
    if flags := [flag for flag in knob_flags if flag in flags_by_dest.values()]:
        names = {"key": KEY, "flags": ", ".join(flags)}
        lines.append(_("{key} sets {flags}: candidates replace them by their own values", **names))
    return lines


def _release_warnings(spec: Spec, command: UserCommand) -> Iterator[str]:
    """Yield a line if the program of a command imports another release than the spec names."""
    release, detected = spec.train.engine_version, detected_release(command, spec.envs)
    is_found = os.path.isfile(Path(command.directory, command.file or ""))
    if release and detected and is_found and release_table(release).release != release_table(detected).release:
        text = N_("train.engine_version is {release}, but {key} runs Megatron-LM {detected}")
        yield _(text, release=release, key=KEY, detected=detected)


def _contradictions(spec: Spec, effective: Mapping[str, Any]) -> Iterator[tuple[str, object, object, str]]:
    train, model = spec.train, spec.model
    spec_is_used, spec_is_predicted = _("the spec is used"), _("predictions use the spec")
    for dest in ("seq_length", "global_batch_size"):
        if effective.get(dest, getattr(train, dest)) != getattr(train, dest):
            yield dest, effective[dest], getattr(train, dest), spec_is_used
    for name, value in settings_of_command(spec).items():
        if train.settings.get(name, value) != value:
            yield name, value, f"train.settings.{name}: {train.settings[name]}", spec_is_used
    spec_values = {name: getattr(model, name) for name in SHAPE} | {"num_experts": model.experts or None}
    if effective.get("group_query_attention"):
        spec_values["num_query_groups"] = model.num_query_groups
    for dest, spec_value in spec_values.items():
        if dest in effective and spec_value is not None and effective[dest] != spec_value:
            yield dest, effective[dest], spec_value, spec_is_predicted
    precision = next((each for each in ("fp8", "fp4", "bf16", "fp16") if effective.get(each)), "")
    if train.precision not in PRECISIONS[precision]:
        yield precision, effective.get(precision), f"precision: {train.precision}", spec_is_predicted


def command_changes(platform: Platform, candidate: Candidate) -> list[str]:
    """Return one line for each reason for which trials change the user's command.

    Another line names the commands of a script that trials do not run.
    """
    task, values = platform.task, candidate.as_dict()
    command = user_command(task.spec, {**platform.environment, **environment(values)})
    if command is None and task.spec.train.command:
        return [_("{key} does not start a Megatron-LM program: its arguments cannot be read or changed", key=KEY)]
    if command is None:
        return []
    mixed = mixed_job(platform, candidate)
    changes = [
        each
        for each in trial_command(task, command, values, "{run}/trials/{trial}", mixed).changes
        if each.why != KNOB_REASON and (each.before or each.flag == "--train-iters")
    ]
    lines = [_("trials change {count} arguments of {key}:", count=len(changes), key=KEY)]
    for reason in dict.fromkeys(each.why for each in changes):
        lines.append(f"  {reason}: {', '.join(_change_line(each) for each in changes if each.why == reason)}")
    if command.skipped:
        lines.append(_("commands of the script that trials skip:"))
        lines += [f"  {_truncate(redact_text(words))}" for words in command.skipped]
    if any(words.split()[0] in ENVIRONMENT_LOADERS for words in command.skipped or ()):
        lines.append(_("trials run in the environment of this shell: load modules and activate environments first"))
    return ["\n".join(lines)]


def _change_line(change: Change) -> str:
    before, after = _truncate(change.before), _truncate(change.after)
    if not after:
        return _("{flag} removed", flag=before)
    return f"{before} -> {after.removeprefix(change.flag).lstrip(' =')}" if before else after


def _truncate(text: str, maximum: int = MAX_ARGUMENT_LENGTH) -> str:
    return text if len(text) <= maximum else text[: maximum - 3] + "..."


def check_values(spec: Spec) -> None:
    """Raise an error for each value of a knob or setting that the release `train.engine_version` does not support."""
    if problems := release_problems(spec, spec.train.engine_version):
        raise SpecErrors(problems)


def release_problems(spec: Spec, release: str | None) -> list[SpecError]:
    """Return an error for each value of a knob or setting that `release` does not support; none if it is None."""
    if release is None:
        return []
    return [
        SpecError(key=key, value=value, problem=problem_and_fix[0], fix=problem_and_fix[1])
        for key, value in _set_values(spec)
        if (problem_and_fix := release_problem(BY_NAME[key.rpartition(".")[2]], value, release))
    ]


def _set_values(spec: Spec) -> Iterator[tuple[str, KnobValue | SettingValue]]:
    """Yield the key in the spec and the value of each Megatron knob and setting that the spec sets."""
    sections = {"train.settings": spec.train.settings, "auto_tuner.baseline": spec.baseline or {}}
    for section, values in sections.items():
        yield from ((f"{section}.{name}", value) for name, value in values.items() if name in BY_NAME)
    for name, choices in spec.space.items():
        if name in BY_NAME and not isinstance(choices, str):
            yield from ((f"auto_tuner.space.{name}", value) for value in choices)


RECOMPUTE_KNOBS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""Knobs that have an effect only with `use_recompute`."""

MAX_VALUE_LENGTH = 80
"""Maximum number of characters of a value in a warning."""


def spec_warnings(spec: Spec) -> list[str]:
    """Return warnings about a spec: about its command, each setting without effect, and an unknown release.

    A setting has no effect if it changes no candidate.
    """
    known = [Version(each) for each in known_releases()]
    releases = f">={known[0].major}.{known[0].minor},<{known[-1].major}.{known[-1].minor + 1}"
    unknown = unknown_release("train.engine_version", spec.train.engine, spec.train.engine_version, releases)
    strange = unknown_placeholders(spec.train.command or (), BY_NAME)
    return [*_unused_settings(spec), *unknown, *strange, *command_warnings(spec)]


def _unused_settings(spec: Spec) -> list[str]:
    kinds, switch = (spec.space.get(knob, AUTO) for knob in ("recompute_granularity", "use_recompute"))
    if (kinds == AUTO or "selective" in kinds) and (switch == AUTO or True in switch):
        return []
    if "recompute_modules" not in spec.train.settings:
        return []
    value = spec.train.settings["recompute_modules"]
    fix = "add selective to auto_tuner.space.recompute_granularity and true to use_recompute"
    return [_without_selective("train.settings.recompute_modules", value, "no candidate has", fix)]


def job_warnings(
    task: Task, values: Mapping[str, KnobValue], settings: Mapping[str, SettingValue], noted: Collection[str]
) -> list[str]:
    """Return a line for each key of a job record that has no effect, and one each if flagcore completed its layer split
    or its lengths."""
    lines, recompute_is_off = length_warnings(task.spec.train, noted), values.get("use_recompute") is False
    if values.get("recompute_granularity") != "selective" or recompute_is_off:
        fix = "add recompute_granularity: selective"
        if value := settings.get("recompute_modules"):
            lines.append(_without_selective("recompute_modules", value, "its candidate does not have", fix))
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        lines.append("sequence_parallel = True does nothing: tensor_model_parallel_size is 1")
    unused = [key for key in RECOMPUTE_KNOBS if values.get(key) is not None] if recompute_is_off else []
    lines += [f"{key} = {values[key]!r} does nothing: use_recompute is False" for key in unused]
    found = {key: value for key, value in task.spec.train.settings.items() if key not in {*settings, *noted}}
    if task.spec.model.experts and found.get("moe_token_dispatcher_type") == "flex":
        overlap = " and overlap_moe_expert_parallel_comm" if found.get("overlap_moe_expert_parallel_comm") else ""
        lines.append(
            f"moe_token_dispatcher_type = flex{overlap} is assumed, as recipes of experts over several nodes set it "
            "(Megatron's own default is allgather): state what the run had"
        )
    completed_settings = [
        f"{key} = {_truncate(str(found[key]), MAX_VALUE_LENGTH)}"
        for key in (LAYOUT, PATTERN, EMBEDDING, LOSS)
        if found.get(key)
    ]
    if completed_settings:
        lines.append(
            "the layers do not divide over the (virtual) pipeline stages: predicted as published runs split them, with "
            f"{' and '.join(completed_settings)}; give that or another split"
        )
    return lines


def _without_selective(key: str, value: SettingValue, subject: str, fix: str) -> str:
    return f"{key} = {value!r} does nothing: {subject} recompute_granularity: selective; {fix}, or remove this key"
