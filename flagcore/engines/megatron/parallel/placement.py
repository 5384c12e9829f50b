"""Which node group each pipeline stage lies on: in Megatron's order of ranks the stages go over the groups in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.layout import Layout, pick


@dataclass(frozen=True, slots=True)
class Placement:
    """The first stage of each node group but the first, an array of candidates each; none in a cluster of one group.

    Stage i of p has the ranks i W/p to (i+1) W/p of W. That no stage has devices of two groups is for the caller.
    """

    starts: tuple[FloatArray, ...]

    @classmethod
    def of(cls, layout: Layout, costs: Costs) -> Placement:
        """Place the stages of each candidate."""
        size = layout.tensor * layout.context * layout.data
        end = layout.pipeline - 1.0
        return cls(tuple(np.minimum(np.ceil(first / size), end) for first in costs.further))

    def group(self, index: FloatArray) -> IntArray:
        """Return the number of the group on which stage `index` of each candidate lies."""
        number = np.zeros(index.shape, dtype=np.int64)
        for start in self.starts:
            number += index >= start
        return number

    def pick(self, index: FloatArray, values: Sequence[FloatArray]) -> FloatArray:
        """Return of `values`, one a group, those of stage `index` of each candidate."""
        return values[0] if len(values) == 1 else pick(self.group(index), values)

    def stages(self, layout: Layout) -> list[FloatArray]:
        """Return how many stages each group has."""
        edges = (np.zeros_like(layout.pipeline), *self.starts, layout.pipeline)
        return [after - before for before, after in pairwise(edges)]
