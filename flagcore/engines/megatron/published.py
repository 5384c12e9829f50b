"""What a job record means that does not say: the defaults of a run that was published, decided here and nowhere else.

- `implementation`: transformer-engine's layers, Megatron-LM's own default.
- `overlap_grad_reduce` and `overlap_param_gather`: on with a distributed optimizer, off without. Tuned runs have all
  three; sweeps of plain Megatron have none.
- `tp_comm_overlap`: on in dense models with a distributed optimizer, sequence parallelism, fused attention and
  transformer-engine's layers: the published recipes of such runs turn it on.
- `grad_reduce_in_bf16`: on with these overlaps in 8 and 4 bits, as in the recipes of NeMo and Megatron-Bridge
  (`grad_reduce_in_fp32` is off in the latter's `scripts/performance/configs`; most of these runs would not fit
  otherwise).
- `fp8_param_gather`: on with those in 8 bits: Megatron-Bridge's `training/mixed_precision.py` turns it on for delayed
  and current scaling and for mxfp8, which `scripts/performance/utils/precision.py` takes; with nvfp4 it refuses it.
- `moe_token_dispatcher_type`: alltoall. `moe_grouped_gemm`: on, but experts one by one with local layers.
- `cp_comm_type`: p2p.
- `attention_dropout` and `hidden_dropout`: with unfused attention 0.1, Megatron-LM's default, as when models still were
  trained with dropout; else none.
- All other settings: Megatron-LM's defaults.
- Notes that name the pipeline's schedule are those of papers on schedules (arXiv 2104.04473, 2401.10241): their
  Megatron-LM had no fused attention and waited for each message, whatever the record says. Their printed memory
  (34 + 5 a s / h bytes a value of a layer's input) says so too.
- A model's name that says LoRA: adapters are trained.
- Layers that do not divide over the stages: see `stages.published_split`.

What the record says comes first, then what its notes say, then these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import SettingValue, Task
from flagcore.engines.megatron.notes import read_notes
from flagcore.engines.megatron.stages import LAYOUT, parse_layout, published_split

IMPLEMENTATION = "transformer_engine"
PIPELINE, VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
SPLITS = (
    LAYOUT,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def published(
    task: Task, values: Mapping[str, KnobValue], notes: str
) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
    """Return the task and the knobs of a job record with all that it leaves out, and what its notes alone say.

    Raises SpecError for a layout of stages that is none.
    """
    train, values, noted = task.spec.train, dict(values), read_notes(f"{notes}; {_trains(task.spec.model.name)}")
    if "pipeline_schedule" in noted:
        train = replace(train, attention="unfused")
        noted = {"overlap_p2p_comm": False, **noted}
        task = replace(task, spec=replace(task.spec, work=train))
    kind = train.implementation or IMPLEMENTATION
    settings = {**noted, **train.settings}
    settings = _defaults(task, kind, settings, values) | settings
    stages = int(values.get(PIPELINE) or 1)
    layout = settings.get(LAYOUT)
    if layout:
        held = parse_layout(str(layout), task.spec.model.num_layers, task.spec.model.mtp_num_layers)
        if not values.get(VIRTUAL) and len(held) % stages == 0:
            values[VIRTUAL] = len(held) // stages
    elif not any(settings.get(key) or values.get(key) for key in SPLITS):
        settings |= published_split(task.spec.model, stages * int(values.get(VIRTUAL) or 1))
    spec = replace(task.spec, work=replace(train, implementation=kind, settings=settings))
    return replace(task, spec=spec), values, frozenset(noted.keys() - train.settings.keys())


def _tuned(task: Task, kind: str, given: Mapping[str, SettingValue], overlaps: bool) -> bool:
    """Return whether a run has the gradients of Megatron-Bridge's tuned recipes, which are reduced in 16 bits."""
    narrow = task.spec.train.precision in ("fp8", "mxfp8", "nvfp4")
    return overlaps and kind == IMPLEMENTATION and narrow and "accumulate_allreduce_grads_in_fp32" not in given


def _trains(name: str) -> str:
    """Return what a model's name says of the weights that are trained: runs of adapters are told by it alone."""
    found = re.search(r"\b(lora|peft)\b", name, re.IGNORECASE)
    return found[0] if found else ""


def _defaults(
    task: Task, kind: str, given: Mapping[str, SettingValue], values: Mapping[str, KnobValue]
) -> dict[str, SettingValue]:
    flash, sharded = task.spec.train.attention == "flash", bool(values.get("use_distributed_optimizer"))
    split = bool(values.get("sequence_parallel")) and int(values.get("tensor_model_parallel_size") or 1) > 1
    dense = task.spec.model.num_moe_experts is None
    overlaps = bool(given.get("overlap_grad_reduce", sharded))
    return {
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps and sharded,
        "grad_reduce_in_bf16": _tuned(task, kind, given, overlaps and sharded),
        "fp8_param_gather": _tuned(task, kind, given, overlaps and sharded) and task.spec.train.precision != "nvfp4",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": kind != "local",
        "cp_comm_type": "p2p",
        "attention_dropout": 0.0 if flash else 0.1,
        "hidden_dropout": 0.0 if flash else 0.1,
        "tp_comm_overlap": flash and sharded and split and dense and kind == IMPLEMENTATION,
    }
