"""The configuration in Megatron's arguments as a baseline."""

from __future__ import annotations

from typing import Any

from flagcore.engines.megatron.importing.arguments import Flags
from flagcore.engines.megatron.split import SPLIT

SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
)
"""Parallel sizes in the order of a baseline."""
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def baseline_of(flags: Flags, has_experts: bool, *, on_meshes: bool = False) -> dict[str, Any]:
    """Return the knobs in Megatron's arguments as a baseline; missing knobs are off or 1.

    With `on_meshes`, the sizes are not those of the job.
    """
    baseline = {key: value for key in SIZES if (value := flags.get(key)) not in (None, 0)}
    if per_stage := _layers_of_virtual_stages(flags, baseline.get("pipeline_model_parallel_size", 1)):
        baseline["num_layers_per_virtual_pipeline_stage"] = per_stage
    if not has_experts and (experts := baseline.pop("expert_model_parallel_size", None)) is not None:
        flags.note(
            "expert_model_parallel_size", f"dropped ({experts}): the model has no experts", "auto_tuner.baseline"
        )
    baseline["micro_batch_size"] = flags.get("micro_batch_size", 1)
    baseline["use_distributed_optimizer"] = bool(flags.get("use_distributed_optimizer"))
    if sequence := flags.get("sequence_parallel"):
        if baseline.get("tensor_model_parallel_size", 1) == 1 and not on_meshes:
            text = "off in the baseline: it needs tensor parallelism"
            flags.note("sequence_parallel", text, "auto_tuner.baseline")
        else:
            baseline["sequence_parallel"] = True
    elif sequence is not None:
        baseline["sequence_parallel"] = False
    baseline |= _recompute(flags)
    return baseline


def _layers_of_virtual_stages(flags: Flags, stages: object) -> int:
    """Return the layers of a virtual stage if Megatron's arguments have the number of virtual stages; else 0."""
    virtual, layers = flags.get("num_virtual_stages_per_pipeline_rank"), flags.get("num_layers")
    if type(virtual) is not int or type(layers) is not int or type(stages) is not int or virtual < 1 or stages < 1:
        return 0
    return 0 if layers % (virtual * stages) else layers // (virtual * stages)


def _recompute(flags: Flags) -> dict[str, Any]:
    """Return the knobs of recompute. Block recompute of 0 layers is off. `recompute_activations` is selective, as in
    Megatron-LM core_v0.15 `validate_args` (training/arguments.py).
    """
    knobs = {name: value for name in RECOMPUTE if (value := flags.get(name)) is not None}
    if flags.get("recompute_activations"):
        knobs = {**knobs, RECOMPUTE[0]: "selective"}
    if RECOMPUTE[0] not in knobs:
        return {"use_recompute": False}
    if knobs.get("recompute_num_layers") == 0:
        if knobs.get("recompute_method") == "block":
            flags.note("recompute_num_layers", "0: nothing is recomputed", "auto_tuner.baseline")
            return {"use_recompute": False}
        flags.note("recompute_num_layers", "dropped (0): it must be at least 1", "auto_tuner.baseline")
        del knobs["recompute_num_layers"]
    return {"use_recompute": True, **knobs}


def baseline_problem(baseline: dict[str, Any], train: dict[str, Any], model: dict[str, Any], devices: int) -> str:
    """Return why the sizes of a job do not fit its devices, batch or layers; empty if they fit."""
    tensor, stages, context = (baseline.get(key, 1) for key in SIZES[:3])
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
    if type(expert_size) is int and expert_size > 0 and devices % (expert_size * stages):
        return f"EP {expert_size} x PP {stages} does not divide {devices} devices"
    samples = devices // (tensor * stages * context) * baseline["micro_batch_size"]
    if train["global_batch_size"] % samples:
        return f"{samples} samples at once do not divide a global batch of {train['global_batch_size']}"
    has_split = any(key.startswith("num_layers_in_") or "layout" in key for key in train.get("settings", {}))
    if model["num_layers"] % stages and not (has_split or baseline.get(SPLIT)):
        return f"{model['num_layers']} layers cannot be split evenly over {stages} stages"
    return ""
