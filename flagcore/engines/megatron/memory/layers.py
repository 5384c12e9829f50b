"""A layer of one kind: what it keeps of a micro-batch, and how far its worst moment lies above that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray
from flagcore.engines.megatron.memory.modules import kept
from flagcore.engines.megatron.memory.savings import Extra, Place
from flagcore.engines.megatron.parallel.parameters import Parts, add_parts


@dataclass(frozen=True, slots=True)
class Moments:
    """How far a layer's moments lie above what it keeps: the worst of those that save nothing, and each that does."""

    plain: FloatArray
    saving: tuple[tuple[FloatArray, tuple[Extra, ...]], ...]

    @classmethod
    def of(cls, row: Sequence[Place], beside: FloatArray | float = 0.0, split: int = 0) -> Moments:
        """Return the moments of a row, higher by `beside`. The first `split` modules do not wait for those behind."""
        plain, behind, saving = np.zeros(()), np.zeros(()), []
        for place in reversed(range(len(row))):
            module, extras = row[place].module, row[place].extras
            if place == split - 1:
                behind = np.zeros(())
            above = module.work - behind + beside
            behind = behind + module.kept
            if extras:
                saving.append((above, extras))
            else:
                plain = np.maximum(plain, above)
        return cls(plain, tuple(saving))

    def worst(self, layers: FloatArray) -> FloatArray:
        """Return the worst moment where so many layers of this kind are in flight."""
        found = self.plain
        for above, extras in self.saving:
            found = np.maximum(found, above + sum(extra.beside(layers) for extra in extras))
        return found


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of one kind, bytes of one micro-batch: what it keeps, and its moments; `crossing` are those while a layer
    of another micro-batch runs forward beside its backward, None where none does.
    """

    parts: Parts
    kept: FloatArray
    moments: Moments
    crossing: Moments | None = None

    @classmethod
    def of(cls, row: Sequence[Place], front: int = 0) -> Layer:
        """Add up a row of modules. With `front`, its backward may run beside another micro-batch's forward.

        Both go module by module (megatron-core 0.16 `model_chunk_schedule_plan.py`): the other layer has run its first
        `front` modules, attention and router, before this one's backward of the rest, the experts, and that rest before
        this one's backward of attention.
        """
        parts: Parts = {}
        for place in row:
            add_parts(parts, {place.module.component: place.module.kept})
        total = kept([place.module for place in row])
        crossing = None
        if front:
            crossing = Moments.of(row, kept([place.module for place in row[:front]]), front)
        return cls(parts, total, Moments.of(row), crossing)

    def above(self, layers: FloatArray, crossed: BoolArray | bool = False) -> FloatArray:
        """Return how far the worst moment lies above what is kept, with so many layers of this kind in flight."""
        alone = self.moments.worst(layers)
        if self.crossing is None:
            return alone
        return np.where(crossed, self.crossing.worst(layers), alone)
