"""Times of torch's separate kernels beyond the shared formulas, which assume fused ones, and of its attention.

Passes are counted as the bytes that each operator of torch 2.13 reads and writes, over a tensor of 16-bit values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from flagcore_models.layers import attention_counts, head_of, mixer_counts, network_counts
from flagcore_models.parts.norm import Norm
from flagcore_training.frameworks import has_fused_layers, has_torch_attention
from flagcore_training.layout import Layout, Training
from flagcore_training.weights import used_products

from flagcore.contracts import AttentionShape, Costs, KernelCosts
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Spec, Task

INTERVAL, PRETRAINING_INTERVAL = (0.5, 2.0), (0.8, 1.5)
"""80% intervals of the step time relative to the prediction. The first is chosen by hand. The second is of
`fully_shard` without adapters and samples of several lengths: it holds 43 of 47 published runs (40 of
`benchmarks/published_fsdp2.py`, 7 of 2026), of which none was fitted."""
BATCH_ROWS = 1 << 14
"""Candidates per batch of formulas."""
FUSED = {"norm": Norm.passes, "activation": (3.0, 5.0), "rotation": (2.0, 2.0)}
"""Memory passes that the shared formulas assume for one kernel, forward and backward: over the tensor between layers,
one of the FFN's width, and queries and keys."""
SEPARATE_NORM, SEPARATE_ACTIVATION = (20.0, 50.0), (5.0, 9.0)
"""Passes of separate kernels, in 16-bit values: of a norm in fp32, which torch before 2.9 has, and of a gated
activation."""
GRADIENT_SUMS = (3.0, 1.0)
"""Passes over the tensor between layers per gradient that is added to another one of the same input, in separate
kernels and beside the kernel of a norm. Queries, keys, values and both halves of a gated block have separate products.
"""
SEPARATE_LOSS = 40.0 - 24.0
"""Memory traffic of the loss in separate kernels in fp32 per 16-bit logit, in bytes, beyond the shared formulas."""
CAST_BYTES = (4.0, 8.0)
"""Traffic of fp8 products beyond the casts of the shared formulas, in bytes per value of an input and of a weight.

Each operand is cast in forward and again in backward, with its largest value searched before. Source: torchao 0.13
`float8/float8_linear.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What differs between training programs with plain layers of torch.

    `rotation`: memory passes over queries and keys of rotary embeddings without compilation, forward and backward.
    `fused_norm`, `fused_activation`: whether norms, and gated activations, are one kernel each.
    `compiled_loss`: whether `compile` includes the loss.
    `loss_parts`: as in `MemoryInputs`.
    `stops_early`: whether checkpoints stop when all that they stored is computed again, as torch's do by default.
    `masked`: whether context-parallel attention computes all scores and masks half of them.
    `whole_gradients`: whether ranks keep whole gradients until the last micro-batch, in which they are reduced.
    `casts`: as in `MemoryInputs`, if the states have fp32.
    `narrow_loss`: whether the loss is computed in 16 bits. `own_attention`: whether attention is the vendor's kernel.
    `neighbours`: whether tokens go to neighbouring experts, as in benchmarks with a fake router.
    """

    rotation: tuple[float, float]
    fused_norm: bool = True
    fused_activation: bool = False
    compiled_loss: bool = False
    loss_parts: float = 1.0
    masked: bool = False
    whole_gradients: bool = False
    casts: bool = False
    narrow_loss: bool = False
    own_attention: bool = False
    neighbours: bool = False
    stops_early: bool = True


TRIAL = Program(rotation=(9.0, 12.0), masked=True)
"""The program of the engine `fsdp2`: a decoder in plain torch."""
FRAMEWORK = replace(TRIAL, whole_gradients=True)
"""A framework on accelerate (1.15 `Accelerator.no_sync`, transformers 5.24 `Trainer`), or NeMo AutoModel (0.7
`distributed/utils.py`)."""
RECIPE = Program(
    rotation=FUSED["rotation"], whole_gradients=True, narrow_loss=True, own_attention=True, neighbours=True
)
"""NeMo AutoModel's recipes of models with experts (`examples/llm_benchmark` @36044ad3): transformer-engine's norms,
rotary embeddings and attention, and fp32_upcast: false."""
TORCHTITAN = Program(rotation=(10.0, 10.5), compiled_loss=True, stops_early=False)
"""torchtitan 0.3, whose rotary embeddings are complex numbers in fp32."""
PLAIN = Program(rotation=(10.2, 10.1), fused_norm=False)
"""A script whose layers are those of transformers 4 (`modeling_llama.py`): rotated halves, and norms in fp32."""
ATTENTION_SHARE = {"sm_90": 0.35, "gfx942": 0.17}
"""The largest share of the peak that torch's attention kernel, FlashAttention-2, reaches, by architecture. On others
the chip's own kernel times hold. Sources: arXiv 2407.08608, abstract; for gfx942 both passes together, 223 to 232 of
1307 TFLOP/s (ROCm/flash-attention issue 142, heads of width 128 and 16k tokens; forward alone 310 to 356)."""
VENDORS_ATTENTION = ("sm_90", "sm_100")
"""The architectures on which torch takes cuDNN's attention first, since 2.11."""
BACKWARD_FLOPS = 2.5
"""Flops of the backward of a fused attention core, relative to its forward: five products instead of two."""


def with_fused_layers(program: Program, spec: Spec) -> Program:
    """Return the program with Liger's kernels if a framework's command has them: one each for norms, gated activations
    and rotary embeddings (liger-kernel 0.8.5 `transformers/monkey_patch.py`)."""
    if not has_fused_layers(spec):
        return program
    return replace(program, fused_norm=True, fused_activation=True, rotation=FUSED["rotation"])


def seconds(
    train: Training,
    layout: Layout,
    kernels: KernelCosts,
    program: Program,
    *,
    checkpointing: FloatArray,
    again: FloatArray,
    weights: FloatArray,
    compiled: bool = False,
) -> FloatArray:
    """Return the seconds of a rank per micro-batch beyond the shared formulas.

    `checkpointing`: 0 none, 1 selective, 2 full. `weights`: the number of gathered weights of a rank's layers.
    `again`: the share of a layer's forward that the shared formulas compute again. Selective checkpoints compute all of
    it again but for some products.
    """
    repeats = 1.0 * (checkpointing > 0)
    forward, backward, fused = _separate_bytes(train, layout, program, compiled=compiled)
    moved = forward * (1.0 + repeats) + backward + fused * (repeats - again)
    once = _once_bytes(train, layout, weights, compiled=compiled and program.compiled_loss)
    found = kernels.memory_seconds(moved / layout.pipeline + once)
    if program.masked:
        masked = _masked_seconds(train, layout, kernels, checkpointing)
        found = found + (layout.context > 1) * masked / layout.pipeline
    return found


def _separate_bytes(
    train: Training, layout: Layout, program: Program, *, compiled: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return bytes of all layers per micro-batch: beyond one kernel each in forward and in backward, and of forward."""
    model, tokens = train.model, layout.tokens(train.sequence)
    rows = train.value_bytes * model.hidden_size * layout.token_rows(train.sequence)
    scale = train.value_bytes * tokens / layout.tensor
    attention, networks = attention_counts(model), network_counts(model)
    parts = (*mixer_counts(model).items(), *networks.items())
    blocks = sum(number for _, number in parts)
    rotated = sum(number * each.rotated for each, number in attention.items())
    norm = FUSED["norm"] if compiled or program.fused_norm else SEPARATE_NORM
    tensors = [
        (norm, FUSED["norm"], blocks * rows),
        (FUSED["rotation"] if compiled else program.rotation, FUSED["rotation"], rotated * scale),
    ]
    for network, number in networks.items():
        is_separate = network.gated and not (compiled or program.fused_activation)
        passes = SEPARATE_ACTIVATION if is_separate else FUSED["activation"]
        tensors.append((passes, FUSED["activation"], number * network.active_width * scale))

    def total(each: int, *, beyond: bool) -> FloatArray:
        return sum(((own[each] - fused[each] * beyond) * size for own, fused, size in tensors), np.zeros(()))

    gates = sum(number * each.gated for each, number in networks.items())
    sums = GRADIENT_SUMS[compiled] * (2.0 * sum(attention.values()) + gates)
    # Selective checkpoints compute again the sum between the mixer and the network of a layer, in three passes.
    forward, residual = total(0, beyond=True), 3.0 * (blocks - model.num_layers) * rows
    backward = total(1, beyond=True) + sums * train.value_bytes * model.hidden_size * tokens
    if train.precision == "fp8":
        inputs = sum(number * each.inner(layout.tensor) for each, number in used_products(model, parts))
        backward = backward + CAST_BYTES[0] * inputs * tokens
    return forward, backward, total(0, beyond=False) - forward + residual


def _once_bytes(train: Training, layout: Layout, weights: FloatArray, *, compiled: bool) -> FloatArray:
    """Return bytes per micro-batch of the loss and of casts of weights, beyond the shared formulas."""
    logits = layout.tokens(train.sequence) * head_of(train.model).logits / layout.tensor
    loss = (0.0 if compiled else SEPARATE_LOSS) * logits / layout.pipeline
    return loss + CAST_BYTES[1] * (train.precision == "fp8") * weights


def _masked_seconds(train: Training, layout: Layout, kernels: KernelCosts, checkpointing: FloatArray) -> FloatArray:
    """Return the seconds of all layers per micro-batch that scores need which a mask hides."""
    total, ones = np.zeros_like(layout.tensor), np.ones_like(layout.tensor)
    precision = train.precision if train.value_bytes == 4 else "bf16"
    for mixer, number in attention_counts(train.model).items():
        heads, groups = (count / layout.tensor for count in (mixer.num_heads, mixer.groups))
        sizes = {"queries": train.sequence * ones, "keys": train.sequence * ones, "head_dim": mixer.head_dim * ones}
        shape = AttentionShape(batch=layout.micro_batch, heads=heads, groups=groups, kernel="flash", **sizes)
        forward = kernels.attention_seconds(shape, precision) * (1.0 + (checkpointing == 2))
        total = total + number * (forward + kernels.attention_backward_seconds(shape, precision)) / layout.context
    return total


@dataclass(frozen=True)
class _TorchKernels:
    """Kernel times of a chip, with attention at most at `rate` flops per second."""

    kernels: Any
    rate: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        seconds: FloatArray = np.maximum(self.kernels.attention_seconds(shape, precision), self._least(shape))
        return seconds

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        seconds = self.kernels.attention_backward_seconds(shape, precision)
        limited: FloatArray = np.maximum(seconds, BACKWARD_FLOPS * self._least(shape))
        return limited

    def _least(self, shape: AttentionShape) -> FloatArray:
        """Return the seconds of the causal half of both products of a forward."""
        return 2.0 * shape.batch * shape.heads * shape.queries * shape.keys * shape.head_dim / self.rate


def has_own_attention(task: Task) -> bool:
    """Return whether torch chooses the kernel of attention on a chip on which it chooses the vendor's."""
    return task.cluster.groups[0].chip.architecture in VENDORS_ATTENTION and has_torch_attention(task.spec)


def with_torch_attention(task: Task, costs: Costs) -> Costs:
    """Return costs in which attention is no faster than torch's kernel."""
    chip = task.cluster.groups[0].chip
    share, peak = ATTENTION_SHARE.get(chip.architecture), chip.dense_flops_per_second.get("bf16")
    if share is None or peak is None:
        return costs
    return replace(costs, kernels=cast("KernelCosts", _TorchKernels(costs.kernels, share * peak.value)))
