"""Bytes that the modules of a layer store of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray
from flagcore.engines.megatron.parallel.layout import Layout, Training


@dataclass(frozen=True, slots=True)
class ExtraBytes:
    """Bytes that a saving adds to a module's peak, at most `saved_per_layer` for each other layer in flight."""

    bytes: FloatArray
    saved_per_layer: FloatArray

    def extra_bytes(self, layers: FloatArray) -> FloatArray:
        return np.minimum(self.bytes, np.maximum(layers - 1.0, 0.0) * self.saved_per_layer)


@dataclass(frozen=True, slots=True)
class Module:
    """Bytes of one micro-batch in one module.

    `tensors` are stored for the backward pass, by name. `work` is the peak of this module's forward or backward above
    the bytes that it and the modules before it store. `extras` are added to the peak by recompute and offload.
    """

    component: str
    tensors: Mapping[str, FloatArray]
    work: FloatArray
    extras: tuple[ExtraBytes, ...] = ()

    @property
    def stored(self) -> FloatArray:
        return sum(self.tensors.values(), np.zeros(()))

    def only(self, rows: BoolArray) -> Module:
        """Return this module in some rows, and an empty one in the others."""
        tensors = {name: value * rows for name, value in self.tensors.items()}
        return Module(self.component, tensors, self.work * rows, self.extras)


def stored(modules: Sequence[Module]) -> FloatArray:
    """Return the bytes that `modules` store."""
    return sum((module.stored for module in modules), np.zeros(()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of common tensors of one micro-batch.

    `hidden` is the bytes of the tensor between layers on one rank, `whole` of all tokens of its tensor-parallel group.
    `gathered` and `scattered` are their copies in backward under sequence parallelism. `unit` is the bytes of an
    activation, `linear` of an element of a linear layer's saved input, `weight` of the temporary gradient of a weight
    (0 if the kernel accumulates it). `tokens`, `rows` and `local` are counts of tokens: of the tensor-parallel group,
    of one rank outside the tensor-parallel layers, and `tokens` over the tensor-parallel size.
    """

    unit: float
    linear: float
    weight: float
    tokens: FloatArray
    rows: FloatArray
    local: FloatArray
    hidden: FloatArray
    whole: FloatArray
    gathered: FloatArray
    scattered: FloatArray

    @classmethod
    def of(cls, train: Training, layout: Layout) -> Sizes:
        unit, h = float(train.value_bytes), float(train.model.hidden_size)
        tokens, rows = layout.tokens(train.sequence), layout.token_rows(train.sequence)
        is_split = layout.sequence_parallel * (layout.tensor > 1)
        return cls(
            unit=unit,
            linear=LINEAR_BYTES.get(train.precision, unit),
            weight=0.0 if train.transformer_engine else unit,
            tokens=tokens,
            rows=rows,
            local=tokens / layout.tensor,
            hidden=unit * h * rows,
            whole=unit * h * tokens,
            gathered=is_split * unit * h * tokens,
            scattered=is_split * unit * h * rows,
        )


LINEAR_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes per element of a linear layer's saved input: 8 or 4 bits, and the scale of a block of 32 or 16 elements.
From the definitions of the number formats."""
