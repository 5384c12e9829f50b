"""What engines say about the commands of fine-tuning frameworks, which trials do not start."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import read_config
from flagcore_models.layers import head_of
from flagcore_training.frameworks import Reading, framework_of, has_tiled_loss, reading
from flagcore_training.real_job import CHECKPOINTS, changed, key_of

from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import Knob
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import package_yaml
from flagcore_trainers import fully_shard as fs
from flagcore_trainers.fully_shard.memory import LOSS_BYTES

DS_CONFIG: Mapping[str, Any] = package_yaml(__package__, "deepspeed.yaml")["configuration"]
"""The configuration of DeepSpeed for commands that name none in a file here."""


def loss_warnings(task: Task) -> list[str]:
    """Return a line if the logits of one sample take LARGE of a device's memory: fused losses need less.

    Liger's fused loss has the logits of as many tokens at once as take about the memory of the hidden states
    (liger-kernel 0.8.5 `ops/backends/_triton/fused_linear_cross_entropy.py`).
    """
    train, facts = task.spec.train, [group.chip.memory_bytes for group in task.cluster.groups]
    memory = min((fact.value for fact in facts if fact), default=math.inf)
    head = head_of(task.spec.model)
    size = (LOSS_BYTES + 2.0 + head.kept(2.0)) * train.seq_length * head.logits
    if size < LARGE * memory or has_tiled_loss(task.spec):
        return []
    given = reading(task.spec).given if framework_of(train.command or ()) else {}
    on = next((key for key, value in given.items() if "liger" in key and value in (True, "true", "True")), "")
    text = N_(
        "the loss of a sample of {length} tokens takes {size} of {memory} GiB: a fused loss (Liger) needs less, which "
        "is not in the predictions; adapters on 4-bit weights (QLoRA) leave more memory"
    )
    if train.adapter and train.adapter.base == "nf4":
        text = N_(
            "the loss of a sample of {length} tokens takes {size} of {memory} GiB: a fused loss (Liger) needs less, "
            "which is not in the predictions"
        )
    if on:
        text = N_(
            "the loss of a sample of {length} tokens is predicted with {size} of {memory} GiB: with {on}, which is not "
            "in the predictions, it needs less, and larger micro-batches may fit"
        )
    sizes = {"size": f"{size / 2**30:.3g}", "memory": f"{memory / 2**30:.3g}"}
    return [_(text, length=f"{train.seq_length:,}", on=on, **sizes)]


LARGE = 0.2
"""Chosen by hand: from this share of a device's memory on, the logits decide on what fits."""


def expert_warnings(task: Task) -> list[str]:
    """Return a line for a model with experts: a published run on ZeRO 3 takes 27 times as long (ms-swift @3602360a
    `Megatron-SWIFT/Quick-start.md`)."""
    text = _(
        "experts are predicted as grouped products: transformers before 5 computes them one by one, which with ZeRO 3"
        " takes many times as long"
    )
    return [text] * (task.spec.model.experts > 0)


def fp32_products(task: Task) -> list[Unmodelled]:
    """Return the effect of experts in fp32 on step times.

    Autocast leaves their grouped products in the type of the weights (transformers 5.24 `integrations/moe.py`, torch
    2.13). The largest factor is that of an H100's peaks in bf16 and fp32.
    """
    adapter = task.spec.train.adapter
    if adapter is None or not adapter.fp32_experts or not task.spec.model.experts:
        return []
    why = N_("transformers computes the products of experts in fp32, which takes longer than in the job's precision")
    return [Unmodelled(name="train.adapter.fp32_experts", why=why, time=(1.0, 15.0))]


def ds_config(read: Reading) -> dict[str, Any]:
    """Return the configuration of DeepSpeed of a command, or the usual one if no file here has it."""
    given = read.value("deepspeed")
    if isinstance(given, str) and os.path.isfile(Path(read.directory, given)):
        return read_config(given, str(read.directory), key="deepspeed")
    inside = {key[10:]: value for key, value in read.given.items() if key.startswith("deepspeed.")}
    return changed(DS_CONFIG, inside)


def fixed(read: Reading, knobs: Sequence[Knob], own: Mapping[str, KnobValue]) -> dict[str, tuple[KnobValue, ...]]:
    """Return the values of the knobs that a command cannot set, or not all. `own`: those of the command.

    Weights are shared by the ranks that the other sizes leave.
    """
    found = dict[str, tuple[KnobValue, ...]]()
    is_replaced = read.is_on("checkpointing") and not read.has_checkpoints()
    for knob in knobs:
        value = own.get(knob.name, knob.neutral)
        if knob.name == fs.AC and value in CHECKPOINTS and key_of(read, knob.name) and not is_replaced:
            found[knob.name] = CHECKPOINTS
        elif knob.name != fs.SHARD and (knob.name == fs.AC or not key_of(read, knob.name)):
            found[knob.name] = (value,)
    return found
