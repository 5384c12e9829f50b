"""What the modules of a layer hold of one micro-batch, and how rows of modules add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.megatron.parallel.layout import Layout, Training


@dataclass(frozen=True, slots=True)
class Extra:
    """Further bytes that a module needs, at most those that each other layer in flight does not store."""

    bytes: FloatArray
    spared: FloatArray

    def extra_bytes(self, layers: FloatArray) -> FloatArray:
        return np.minimum(self.bytes, np.maximum(layers - 1.0, 0.0) * self.spared)


@dataclass(frozen=True, slots=True)
class Module:
    """Bytes of one micro-batch. `tensors` wait for the backward pass, by name; `work` is what is allocated above all
    that a row of modules stores up to and with this one, at the worst moment of this module's forward or backward;
    `extras` are what a module that saves memory needs in addition.
    """

    component: str
    tensors: Mapping[str, FloatArray]
    work: FloatArray
    extras: tuple[Extra, ...] = ()

    @property
    def stored(self) -> FloatArray:
        return sum(self.tensors.values(), np.zeros(()))


def stored(modules: Sequence[Module]) -> FloatArray:
    """Return the bytes that a row of modules stores."""
    return sum((module.stored for module in modules), np.zeros(()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of tensors that recur, of one micro-batch.

    `hidden` lies between layers; `whole` is the same for all tokens of a tensor-parallel group; `gathered` and
    `scattered` are the copies that sequence parallelism makes of them in backward. `unit` is the width of a value,
    `linear` that of a saved input of a linear layer, `weight` what the gradient of one weight takes before it is
    added to its buffer: nothing where the kernel adds it.
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
        split = layout.sequence_parallel * (layout.tensor > 1)
        return cls(
            unit=unit,
            linear=LINEAR_BYTES.get(train.precision, unit),
            weight=0.0 if train.transformer_engine else unit,
            tokens=tokens,
            rows=rows,
            local=tokens / layout.tensor,
            hidden=unit * h * rows,
            whole=unit * h * tokens,
            gathered=split * unit * h * tokens,
            scattered=split * unit * h * rows,
        )


LINEAR_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element that a linear layer saves of its input: 8 or 4 bits and the scale of its block of 32 or 16."""
