"""A tree for training: the sections `train.system` and `train.model` hold Megatron's flags."""

from __future__ import annotations

from typing import Any

from flagcore.engines.megatron.knobs import SPACE_KNOBS
from flagcore.importers.flagscale.engines import TABLES
from flagcore.importers.flagscale.experiment import cluster, control
from flagcore.importers.flagscale.options import RELEVANT, options
from flagcore.importers.flagscale.shape import shape
from flagcore.importers.flagscale.source import Flags, Source, leaves, take_flags

_TUNER, _PERFORMANCE = "experiment.auto_tuner", "experiment.auto_tuner.performance"
_SIZES: list[str] = TABLES["sizes"]
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_FLAGS = (*_SIZES, *TABLES["job_flags"], *_RECOMPUTE, *RELEVANT)
"""Flags that are read even in a section that is dropped."""
DROPPED: dict[str, str] = TABLES["dropped_of_training"]
_MIB = 1 << 20


def training(source: Source) -> dict[str, Any]:
    """Return the data of a spec that trains. Raises SpecError where something that it needs is missing."""
    vocabulary = source.take("train.data.tokenizer.vocab_size", source.take("train.data.vocab_size"))
    before = take_flags(source, DROPPED, _FLAGS)
    if (kind := source.take("train.model.optimizer.optimizer")) not in (None, "adam"):
        source.note("train.model.optimizer.optimizer", f"dropped ({kind}): memory and time are Adam's", "train")
    for section, why in DROPPED.items():
        source.drop(section, why, "train")
    for hetero in ("train.system.hetero", "train.model.hetero"):
        if source.take(f"{hetero}.enable_hetero"):
            text = "dropped: all stages have the same sizes; see `cluster.groups` for nodes of several chips"
            source.note(hetero, text, "cluster")
        source.drop(hetero, "off, or not supported by cluster.groups", "cluster")
    flags = Flags(source, ("train.system", "train.model"), before)
    _drop_backend(source, flags)
    machines, nodes, devices = cluster(source)
    sizes = {key: flags.take(key) for key in ("seq_length", "global_batch_size")}
    for key, value in sizes.items():
        if value is None:
            source.report(f"train.model.{key}", "is missing", fix="give it")
    model = shape(flags, flags.take("vocab_size", vocabulary))
    baseline = _baseline(flags, bool(model.get("num_moe_experts")))
    train = {"engine": "megatron", **sizes, **options(flags, nodes=nodes)}
    tuner: dict[str, Any] = {}
    if space := _space(source, [knob.name for knob in SPACE_KNOBS]):
        tuner["space"] = space
    if why := _why_not_runnable(baseline, train, model, nodes * devices):
        text = f"cannot run: {why}; the rule of thumb is the baseline instead"
        source.note("train.system", text, "auto_tuner")
    else:
        tuner["baseline"] = baseline
    steps = source.take(f"{_TUNER}.control.train_iters", 5)
    tuner |= {"control": {"train_iters": steps, **control(source, seconds=300)}, "objective": _objective(source)}
    source.drop(
        f"{_TUNER}.algo",
        "the default strategy is learned, which stops when little can be gained; grid tries all",
        "auto_tuner",
    )
    _memory(source, machines)
    return {"model": model, "cluster": machines, "train": train, "auto_tuner": tuner}


def _drop_backend(source: Source, flags: Flags) -> None:
    """Drop the backend. Raises SpecError for one whose tree has none of Megatron's flags."""
    key, backend = "experiment.task.backend", source.take("experiment.task.backend")
    if backend not in (None, "megatron") and not flags.has("num_layers"):
        problem, fix = "trains a model without Megatron's flags", "use a tree of the backend megatron"
        raise source.error(key, problem, value=backend, fix=fix)
    if backend is not None:
        source.note(key, f"dropped ({backend}): a model in Megatron's flags is trained", "train.engine")


def _baseline(flags: Flags, has_experts: bool) -> dict[str, Any]:
    """Return the tree's own configuration; what it leaves out is off or 1, as in a baseline."""
    found = {key: value for key in _SIZES if (value := flags.take(key)) not in (None, 0)}
    if not has_experts and (experts := found.pop("expert_model_parallel_size", None)) is not None:
        flags.note(
            "expert_model_parallel_size", f"dropped ({experts}): the model has no experts", "auto_tuner.baseline"
        )
    found["micro_batch_size"] = flags.take("micro_batch_size", 1)
    found["use_distributed_optimizer"] = bool(flags.take("use_distributed_optimizer"))
    tensor = found.get("tensor_model_parallel_size", 1)
    if sequence := flags.take("sequence_parallel"):
        if tensor == 1:
            text = "off in the baseline: it needs tensor parallelism"
            flags.note("sequence_parallel", text, "auto_tuner.baseline")
        else:
            found["sequence_parallel"] = True
    elif sequence is not None:
        found["sequence_parallel"] = False
    if (granularity := flags.take(_RECOMPUTE[0])) is not None:
        found |= {"use_recompute": True, _RECOMPUTE[0]: granularity}
        found |= {key: value for key in _RECOMPUTE[1:] if (value := flags.take(key)) is not None}
    else:
        found["use_recompute"] = False
    flags.note("micro_batch_size", "with the parallel sizes of train.system the baseline", "auto_tuner.baseline")
    return found


def _why_not_runnable(baseline: dict[str, Any], train: dict[str, Any], model: dict[str, Any], devices: int) -> str:
    """Return why a tree's own sizes do not fit its devices, batch and layers; empty if they do."""
    tensor, stages, context = (baseline.get(key, 1) for key in _SIZES[:3])
    shape = (model["num_layers"], model["num_attention_heads"])
    numbers = (tensor, stages, context, baseline["micro_batch_size"], train["global_batch_size"], *shape)
    if not all(type(each) is int and each > 0 for each in numbers):
        return ""  # the spec's own rules report it
    if devices % (tensor * stages * context):
        return f"TP {tensor} x PP {stages} x CP {context} does not divide {devices} devices"
    if model["num_attention_heads"] % tensor:
        return f"TP {tensor} does not divide {model['num_attention_heads']} attention heads"
    experts, over = model.get("num_moe_experts"), baseline.get("expert_model_parallel_size", 1)
    if type(experts) is int and type(over) is int and over > 0 and experts % over:
        return f"EP {over} does not divide {experts} experts"
    at_once = devices // (tensor * stages * context) * baseline["micro_batch_size"]
    if train["global_batch_size"] % at_once:
        return f"{at_once} samples at once do not divide a global batch of {train['global_batch_size']}"
    split = any(key.startswith("num_layers_in_") or "layout" in key for key in train.get("settings", {}))
    if model["num_layers"] % stages and not split:
        return f"{model['num_layers']} layers do not divide over {stages} stages"
    return ""


def _space(source: Source, known: Any) -> dict[str, Any]:
    given, found = source.section(f"{_TUNER}.space"), dict[str, Any]()
    for key, value in given.items():
        where = f"{_TUNER}.space.{key}"
        if key in known and value not in (None, []):
            found[key] = value
        elif key.startswith("hetero_"):
            text = "dropped: stages of different sizes are not planned; cluster.groups has nodes of several chips"
            source.note(where, text, "auto_tuner.space")
        elif "_per_stage" in key:
            source.note(where, "dropped: all stages recompute alike", "auto_tuner.space")
        elif key not in known:
            source.note(where, "dropped: unknown to flagcore and to FlagScale", "auto_tuner.space")
    virtual = found.get(_SIZES[4])
    if isinstance(virtual, list) and not {0, None} & {each for each in virtual if type(each) is int or each is None}:
        text = "FlagScale tries only pipelines of more than two stages; flagcore also shorter ones, without it"
        source.note(f"{_TUNER}.space.{_SIZES[4]}", text, f"auto_tuner.space.{_SIZES[4]}")
    absent = [key for key in known if key not in found]
    if absent:
        text = f"missing keys are auto, as in FlagScale: {', '.join(absent)}"
        source.note(f"{_TUNER}.space", text, "auto_tuner.space")
    if any(value == "auto" for value in found.values()) or absent:
        text = "auto is every legal value; FlagScale's also has illegal ones"
        source.note(f"{_TUNER}.space", text, "auto_tuner.space")
    return found


def _objective(source: Source) -> str:
    """Return the objective: with one batch size and number of devices, times and rates give the same order."""
    name, order = source.take(f"{_PERFORMANCE}.name"), source.take(f"{_PERFORMANCE}.order")
    at = "auto_tuner.objective"
    if name is not None:
        text = f"{name!r} is not used: the trial program times steps, and the median counts"
        source.note(f"{_PERFORMANCE}.name", text, at)
    if order is not None:
        source.note(f"{_PERFORMANCE}.order", f"dropped ({order}): less time is better", at)
    return "step_time_s"


def _memory(source: Source, machines: dict[str, Any]) -> None:
    at = f"{_TUNER}.memory_model"
    given = source.section(at)
    size, share = given.pop("gpu_memory", None), given.pop("gpu_utilization", None)
    name = given.pop("model_name", None)
    low, high = share if isinstance(share, list) and _shares(share) else (0.2, 0.8)
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0):
        source.report(f"{at}.gpu_memory", "must be a number above 0, of MB", value=size, fix="use 80000 for 80 GB")
        size = None
    if share is not None and not _shares(share):
        problem, fix = "must be two shares, from 0 to 1, the lower first", "use [0.2, 0.8]"
        source.report(f"{at}.gpu_utilization", problem, value=share, fix=fix)
    if size is not None:
        machines["memory_per_device"] = int(size * high) * _MIB
        text = f"{size} MB x {high}: the limit of a trial; FlagScale's lower bound {low} for pruning is not used"
        source.note(f"{at}.gpu_memory, gpu_utilization", text, "cluster.memory_per_device")
    elif share is not None:
        source.note(f"{at}.gpu_utilization", "dropped: gpu_memory is missing, so all memory may be used", "cluster")
    if name is not None:
        source.note(f"{at}.model_name", f"dropped ({name}): flagcore has its own memory model", "cluster")
    for key, _ in leaves(given):
        source.note(f"{at}{key}", "dropped: unknown to flagcore", "cluster")


def _shares(given: object) -> bool:
    numbers = [each for each in given if type(each) in (int, float)] if isinstance(given, list) else []
    return len(numbers) == 2 == len(given) and 0.0 <= numbers[0] < numbers[1] <= 1.0  # type: ignore[arg-type]
