"""Messages between neighbouring pipeline stages: the usual ones, and those that go from one node group to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import CollectiveCosts, Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.parallel.parameters import layer_input_bytes
from flagcore.engines.megatron.parallel.placement import Placement
from flagcore.engines.megatron.time.exchange import integers
from flagcore.physics.schedules.catalogue import SCHEDULES


@dataclass(frozen=True, slots=True)
class Messages:
    """Seconds of one message: the `usual` one, the slowest inside a node group, and how much `longer` it takes from one
    group to the next. None where nothing is, as in a cluster of one group.
    """

    usual: FloatArray
    longer: FloatArray | None = None

    @classmethod
    def of(cls, train: Training, layout: Layout, costs: Costs, place: Placement) -> Messages:
        """Return the messages of one micro-batch's hidden states.

        Schedules that fold the pipeline go from group to group both ways, and take the slowest message for all.
        """
        payload, stage = layer_input_bytes(train, layout), layout.tensor * layout.context * layout.data
        pair = integers(np.minimum(layout.pipeline, 2.0))
        if costs.between is None:
            return cls(_mean_send(costs.collectives, payload, stage, layout.pipeline))
        counts, stride = place.stages(layout), integers(stage)
        inside = [
            _mean_send(each.collectives, payload, stage, count)
            for each, count in zip(costs.groups, counts, strict=True)
        ]
        between = costs.between.seconds("send", payload, pair, stride)
        several = np.maximum.reduce(counts) > 1.0
        usual = np.where(several, np.maximum.reduce(inside), between)
        if SCHEDULES[train.options.schedule or "interleaved"].parts == 2:
            return cls(np.maximum(usual, between))
        return cls(usual, np.maximum(between - usual, 0.0))

    def mean(self, layout: Layout, place: Placement) -> FloatArray:
        """Return the mean over all messages of a micro-batch."""
        if self.longer is None:
            return self.usual
        ring = (layout.virtual > 1.0) * 1.0  # the last stage hands on to the first
        crossings = len(place.starts) + ring
        return self.usual + self.longer * crossings / np.maximum(layout.pipeline - 1.0 + ring, 1.0)

    def held_up(
        self, length: int, rows: IntArray, layout: Layout, place: Placement
    ) -> tuple[FloatArray, FloatArray] | None:
        """Return for how much longer each stage sends forward and backward in pipelines of `length`, (stages, rows)."""
        if self.longer is None:
            return None
        each, longer = layout.virtual[rows], self.longer[rows]
        forward, backward = np.zeros((2, length, rows.size))
        for stage in range(1, length):
            crosses = np.logical_or.reduce([start[rows] == stage for start in place.starts])
            forward[stage - 1] = backward[stage] = each * longer * crosses
        forward[-1] = backward[0] = (each - 1.0) * longer
        return forward, backward


def _mean_send(collectives: CollectiveCosts, payload: FloatArray, stage: FloatArray, stages: FloatArray) -> FloatArray:
    """Return the mean time of a message between neighbours of `stages` stages of `stage` devices each.

    Where several stages share a node, or a rack, some of the borders between them are its own: of p stages,
    p / 2**k - 1 borders lie at multiples of 2**k stages, and messages over them travel as far as such a block is wide.
    """
    pair, borders = integers(np.clip(stages, 1.0, 2.0)), np.maximum(stages - 1.0, 1.0)
    total, width = np.zeros_like(payload), 1.0
    while np.any(width < np.maximum(stages, 2.0)):
        here = np.maximum(np.ceil(stages / width) - 1.0, 0.0) - np.maximum(np.ceil(stages / (2.0 * width)) - 1.0, 0.0)
        some = np.flatnonzero(here > 0) if width > 1.0 else slice(None)
        distance = integers(stage[some] * width)
        total[some] += here[some] * collectives.seconds("send", payload[some], pair[some], distance)
        width *= 2.0
    return total / borders
