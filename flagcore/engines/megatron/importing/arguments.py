"""Megatron's arguments by name, from a command or another tool's file: a baseline, and options of the job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flagcore.engines.megatron.layers.split import SPLIT
from flagcore.spec.importing import Notes


class Flags:
    """Arguments by name, which is the last part of the key with underscores; the last of several equal names counts.

    `entries` are full keys and values. Nulls and empty mappings count as missing. `usual_key` is the key of a missing
    argument, with `{name}` or `{flag}`.
    """

    def __init__(self, source: Notes, entries: Iterable[tuple[str, Any]], usual_key: str = "--{flag}") -> None:
        self.source, self._usual_key = source, usual_key
        self._arguments: dict[str, tuple[str, Any]] = {}
        for key, value in entries:
            if value is None or value == {}:
                continue
            if previous := self._arguments.get(name := flag_name(key)):
                source.note(previous[0], f"dropped ({previous[1]}): {key} comes later")
            self._arguments[name] = (key, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a flag, `default` if it is missing."""
        return self._arguments.get(name, ("", default))[1]

    def has(self, name: str) -> bool:
        """Return whether a flag is present."""
        return name in self._arguments

    def names(self) -> list[str]:
        """Return the names of all flags."""
        return list(self._arguments)

    def key(self, name: str) -> str:
        """Return the full key of a flag; for a missing flag, its usual key."""
        usual_key = self._usual_key.format(name=name, flag=name.replace("_", "-"))
        return self._arguments.get(name, (usual_key, None))[0]

    def note(self, name: str, text: str, at: str = "") -> None:
        """Add a note on a flag."""
        self.source.note(self.key(name), text, at)


def flag_name(key: str) -> str:
    """Return the name of the flag for a key: its last part with underscores."""
    return key.rpartition(".")[2].lstrip("-").replace("-", "_")


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


NOT_PREDICTED = {
    "_per_stage": "all stages recompute alike",
    "schedules_method": "1F1B, interleaved with virtual stages",
    "moe_fb_overlap": "experts communicate between the products",
    "rampup_batch_size": "all steps have the full batch",
}
"""Parts of the names of flags that predictions leave out, and what they assume instead."""

_DROPOUTS = ("attention_dropout", "hidden_dropout")


def options(flags: Flags, *, on_meshes: bool = False) -> dict[str, Any]:
    """Return the keys of `train` that a spec needs in addition to the command. With `on_meshes`, each mesh
    has its own recompute.
    """
    result: dict[str, Any] = {"precision": _precision(flags)}
    has_flash, backend = flags.get("use_flash_attn", flags.get("use_flash_attention")), flags.get("attention_backend")
    if backend in ("unfused", "local") or (has_flash is False and flags.get("transformer_impl") == "local"):
        result["attention"] = "unfused"
    elif backend in ("flash", "fused") or (backend is None and has_flash):
        result["attention"] = "flash"
    for key in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if (layers := flags.get(key)) is not None:
            flags.note(key, f"{layers} applies to all candidates: only pipelines that it fits are tried", "train")
    for name in flags.names():
        of_mesh = on_meshes and name.endswith("_per_stage_micro_batch")
        if why := next((why for part, why in NOT_PREDICTED.items() if part in name and not of_mesh), ""):
            flags.note(name, f"not in the predictions: {why}", "train")
    settings: dict[str, Any] = {name: 0.1 for name in _DROPOUTS if not flags.has(name)}  # Megatron's default
    if flags.get("peft_type") is not None:
        settings["trainable"] = "adapters"
    if settings:
        result["settings"] = settings
    return result


def _precision(flags: Flags) -> str:
    precision = "fp32"
    for name in ("fp16", "bf16"):
        value = flags.get(name)
        if not isinstance(value, (bool, type(None))):
            flags.source.report(flags.key(name), "must be true or false", value=value)
        precision = name if value else precision
    fp8_format, recipe = flags.get("fp8", flags.get("fp8_format")), flags.get("fp8_recipe")
    if not fp8_format:
        return precision
    if recipe not in (None, "mxfp8"):
        flags.note("fp8_recipe", f"{recipe}: all recipes but mxfp8 are predicted alike", "train.precision")
    return "mxfp8" if recipe == "mxfp8" else "fp8"
