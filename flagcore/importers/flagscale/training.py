"""Translates a tree for training: `train.system`, `train.model` and `train.data` have Megatron's flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagcore.engines.megatron.knobs import SPACE_KNOBS
from flagcore.engines.megatron.split import SPLIT
from flagcore.importers.flagscale.command import MISSING, command_words, is_placeholder, take_command, take_entries
from flagcore.importers.flagscale.engines import TABLES
from flagcore.importers.flagscale.experiment import cluster, control
from flagcore.importers.flagscale.options import options
from flagcore.importers.flagscale.shape import shape
from flagcore.importers.flagscale.source import Flags, Source, leaves

_TUNER, _PERFORMANCE = "experiment.auto_tuner", "experiment.auto_tuner.performance"
_SIZES: list[str] = TABLES["sizes"]
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_MIB = 1 << 20


def training(source: Source, unresolved: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of a spec for training. Raises SpecError for missing keys.

    `unresolved` keys of `train` have a placeholder in the command, so that no trial starts.
    """
    entries = take_entries(source)
    flags = Flags(source, entries)
    _check_supported(source, flags)
    machines, nodes, devices, host = cluster(source)
    sizes = {key: flags.get(key) for key in ("seq_length", "global_batch_size")}
    for key, value in sizes.items():
        if value is None:
            source.report(f"train.model.{key}", "is missing", fix="give it")
    model = shape(flags)
    baseline = _baseline(flags, bool(model.get("num_moe_experts")))
    arguments = command_words([*entries, *((key, MISSING) for key in unresolved)])
    for key, value in entries:
        if is_placeholder(value):
            source.note(key, f"{value!r} is a placeholder: give the value, or trials cannot start", "train")
    command = take_command(source, arguments, nodes, devices, host)
    if source.take("experiment.exp_dir") is not None:
        text = "of the job itself; trials write into --run-dir"
        source.note("experiment.exp_dir", f"checkpoints and logs {text}", "train.command")
    train = {"engine": "megatron", **sizes, **options(flags), **command}
    tuner = _tuner(source, baseline, _baseline_problem(baseline, train, model, nodes * devices))
    if nodes > 1 and "hostfile" in machines and not source.at("experiment.runner.per_node_task"):
        tuner["launcher"] = "ssh"
    _set_memory(source, machines)
    return {"model": model, "cluster": machines, "train": train, "auto_tuner": tuner}


def _tuner(source: Source, baseline: dict[str, Any], problem: str) -> dict[str, Any]:
    """Return the section `auto_tuner`; it has no baseline if there is a `problem` with it."""
    space = _space(source, [knob.name for knob in SPACE_KNOBS if knob.name != SPLIT])
    section: dict[str, Any] = {"space": {**space, SPLIT: None}}  # FlagScale splits layers evenly
    if problem:
        text = f"cannot run: {problem}; the rule of thumb is the baseline instead"
        source.note("train.system", text, "auto_tuner")
    else:
        section["baseline"] = baseline
    steps = source.take(f"{_TUNER}.control.train_iters", 5)
    section |= {"control": {"train_iters": steps, **control(source, "train")}, "objective": _objective(source)}
    reason = "the default strategy is learned, which stops when little can be gained; grid tries all"
    source.drop(f"{_TUNER}.algo", reason, "auto_tuner")
    return section


def _check_supported(source: Source, flags: Flags) -> None:
    """Raise SpecError for a job that flagcore cannot represent."""
    key, backend = "experiment.task.backend", source.take("experiment.task.backend")
    if backend not in (None, "megatron"):
        problem, fix = "trains a model without Megatron's flags", "use a tree of the backend megatron"
        raise source.error(key, problem, value=backend, fix=fix)
    if flags.get("enable_hetero"):
        problem = "gives stages different sizes, which flagcore's candidates do not support"
        fix = "set it to false to plan and tune equal sizes; see cluster.groups for nodes of several chips"
        raise source.error(flags.key("enable_hetero"), problem, value=True, fix=fix)


def _baseline(flags: Flags, has_experts: bool) -> dict[str, Any]:
    """Return the tree's own configuration as a baseline; missing knobs are off or 1."""
    baseline = {key: value for key in _SIZES if (value := flags.get(key)) not in (None, 0)}
    if not has_experts and (experts := baseline.pop("expert_model_parallel_size", None)) is not None:
        flags.note(
            "expert_model_parallel_size", f"dropped ({experts}): the model has no experts", "auto_tuner.baseline"
        )
    baseline["micro_batch_size"] = flags.get("micro_batch_size", 1)
    baseline["use_distributed_optimizer"] = bool(flags.get("use_distributed_optimizer"))
    if sequence := flags.get("sequence_parallel"):
        if baseline.get("tensor_model_parallel_size", 1) == 1:
            text = "off in the baseline: it needs tensor parallelism"
            flags.note("sequence_parallel", text, "auto_tuner.baseline")
        else:
            baseline["sequence_parallel"] = True
    elif sequence is not None:
        baseline["sequence_parallel"] = False
    baseline |= _recompute(flags)
    for name in (*baseline, *_RECOMPUTE):
        if name != "micro_batch_size" and flags.has(name) and not flags.key(name).startswith("train.system."):
            text = "FlagScale's tuner cannot change it outside of train.system; candidates replace it"
            flags.note(name, text, "auto_tuner.baseline")
    flags.note(
        "micro_batch_size", "used in the baseline, with the parallel sizes of train.system", "auto_tuner.baseline"
    )
    return baseline


def _recompute(flags: Flags) -> dict[str, Any]:
    """Return the knobs of recompute. Block recompute of 0 layers is off."""
    knobs = {name: value for name in _RECOMPUTE if (value := flags.get(name)) is not None}
    if _RECOMPUTE[0] not in knobs:
        return {"use_recompute": False}
    if knobs.get("recompute_num_layers") == 0:
        if knobs.get("recompute_method") == "block":
            flags.note("recompute_num_layers", "0: nothing is recomputed", "auto_tuner.baseline")
            return {"use_recompute": False}
        flags.note("recompute_num_layers", "dropped (0): it must be at least 1", "auto_tuner.baseline")
        del knobs["recompute_num_layers"]
    return {"use_recompute": True, **knobs}


def _baseline_problem(baseline: dict[str, Any], train: dict[str, Any], model: dict[str, Any], devices: int) -> str:
    """Return why a tree's own sizes do not fit its devices, batch or layers; empty if they fit."""
    tensor, stages, context = (baseline.get(key, 1) for key in _SIZES[:3])
    shape = (model["num_layers"], model["num_attention_heads"])
    numbers = (tensor, stages, context, baseline["micro_batch_size"], train["global_batch_size"], *shape)
    if not all(type(each) is int and each > 0 for each in numbers):
        return ""  # the rules of the spec report it
    if devices % (tensor * stages * context):
        return f"TP {tensor} x PP {stages} x CP {context} does not divide {devices} devices"
    if model["num_attention_heads"] % tensor:
        return f"TP {tensor} does not divide {model['num_attention_heads']} attention heads"
    experts, expert_size = model.get("num_moe_experts"), baseline.get("expert_model_parallel_size", 1)
    if type(experts) is int and type(expert_size) is int and expert_size > 0 and experts % expert_size:
        return f"EP {expert_size} does not divide {experts} experts"
    samples = devices // (tensor * stages * context) * baseline["micro_batch_size"]
    if train["global_batch_size"] % samples:
        return f"{samples} samples at once do not divide a global batch of {train['global_batch_size']}"
    has_split = any(key.startswith("num_layers_in_") or "layout" in key for key in train.get("settings", {}))
    if model["num_layers"] % stages and not has_split:
        return f"{model['num_layers']} layers do not divide over {stages} stages"
    return ""


def _space(source: Source, knob_names: Any) -> dict[str, Any]:
    tree_space, space = source.section(f"{_TUNER}.space"), dict[str, Any]()
    for key, value in tree_space.items():
        tree_key = f"{_TUNER}.space.{key}"
        if key == "recompute_num_layers" and isinstance(value, list) and 0 in value:
            value = [each for each in value if each != 0]
            text = "0 is dropped: use_recompute switches recomputation off"
            source.note(tree_key, text, f"auto_tuner.space.{key}")
        if key in knob_names and value not in (None, []):
            space[key] = value
        elif key.startswith("hetero_"):
            text = "dropped: it is for stages of different sizes (enable_hetero)"
            source.note(tree_key, text, "auto_tuner.space")
        elif "_per_stage" in key:
            source.note(tree_key, "dropped: all stages recompute alike", "auto_tuner.space")
        elif key not in knob_names:
            source.note(tree_key, "dropped: unknown to flagcore and to FlagScale", "auto_tuner.space")
    virtual = space.get(_SIZES[4])
    if isinstance(virtual, list) and not {0, None} & {each for each in virtual if type(each) is int or each is None}:
        text = "FlagScale tries only pipelines of more than two stages; flagcore also tries shorter ones without them"
        source.note(f"{_TUNER}.space.{_SIZES[4]}", text, f"auto_tuner.space.{_SIZES[4]}")
    missing = [key for key in knob_names if key not in space]
    if missing:
        text = f"missing keys are auto, as in FlagScale: {', '.join(missing)}"
        source.note(f"{_TUNER}.space", text, "auto_tuner.space")
    if any(value == "auto" for value in space.values()) or missing:
        text = "auto means every legal value; FlagScale's auto includes illegal values"
        source.note(f"{_TUNER}.space", text, "auto_tuner.space")
    return space


def _objective(source: Source) -> str:
    """Return the objective; for a fixed batch size and number of devices, times and rates have the same order."""
    name, order = source.take(f"{_PERFORMANCE}.name"), source.take(f"{_PERFORMANCE}.order")
    key = "auto_tuner.objective"
    if name is not None:
        text = f"{name!r} is not used: flagcore times each step and uses the median"
        source.note(f"{_PERFORMANCE}.name", text, key)
    if order is not None:
        source.note(f"{_PERFORMANCE}.order", f"dropped ({order}): less time is better", key)
    return "step_time_s"


def _set_memory(source: Source, machines: dict[str, Any]) -> None:
    section_key = f"{_TUNER}.memory_model"
    section = source.section(section_key)
    size, share = section.pop("gpu_memory", None), section.pop("gpu_utilization", None)
    name = section.pop("model_name", None)
    low_share, high_share = share if isinstance(share, list) and _is_share_pair(share) else (0.2, 0.8)
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0):
        source.report(
            f"{section_key}.gpu_memory", "must be a number above 0, of MB", value=size, fix="use 80000 for 80 GB"
        )
        size = None
    if share is not None and not _is_share_pair(share):
        problem, fix = "must be two shares, from 0 to 1, the lower first", "use [0.2, 0.8]"
        source.report(f"{section_key}.gpu_utilization", problem, value=share, fix=fix)
    if size is not None:
        machines["memory_per_device"] = int(size * high_share) * _MIB
        text = (
            f"{size} MB x {high_share}: is the memory limit of a trial; FlagScale's lower bound {low_share} is not used"
        )
        source.note(f"{section_key}.gpu_memory, gpu_utilization", text, "cluster.memory_per_device")
    elif share is not None:
        source.note(
            f"{section_key}.gpu_utilization", "dropped: gpu_memory is missing, so all memory may be used", "cluster"
        )
    if name is not None:
        source.note(f"{section_key}.model_name", f"dropped ({name}): flagcore has its own memory model", "cluster")
    for key, _ in leaves(section):
        source.note(f"{section_key}{key}", "dropped: unknown to flagcore", "cluster")


def _is_share_pair(value: object) -> bool:
    numbers = [each for each in value if type(each) in (int, float)] if isinstance(value, list) else []
    return len(numbers) == 2 == len(value) and 0.0 <= numbers[0] < numbers[1] <= 1.0  # type: ignore[arg-type]
