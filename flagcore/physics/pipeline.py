"""How a pipeline divides the layers, and how many micro-batches a stage holds at its worst moment.

Only stages that can be the worst are looked at: the first, the second, the first one without leading dense
layers, and the last. All others equal one of these and hold fewer micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.physics.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of each candidate. `first` and `last` are 1.0 where it is that one; `chunk` is the layers of
    one virtual stage, `in_flight` the micro-batches whose activations are held at the worst moment.
    """

    index: FloatArray
    first: FloatArray
    last: FloatArray
    dense: FloatArray
    moe: FloatArray
    chunk: FloatArray
    in_flight: FloatArray

    @property
    def layers(self) -> FloatArray:
        """Number of layers on the stage."""
        return self.dense + self.moe


def stages(model: Model, layout: Layout) -> list[Stage]:
    """Return the stages that can be the worst of each candidate; short pipelines repeat the last one."""
    end = layout.pipeline - 1.0
    chunk = _chunk_layers(model, layout)
    wanted = [np.zeros_like(end), np.minimum(end, 1.0)]
    if model.num_moe_experts is not None and model.moe_first_dense_layers:
        wanted.append(np.minimum(end, np.ceil(model.moe_first_dense_layers / np.maximum(chunk, 1.0))))
    return [stage(model, layout, index) for index in (*wanted, end)]


def stage(model: Model, layout: Layout, index: FloatArray) -> Stage:
    """Return stage `index` of each candidate.

    Layers that do not divide are put on all stages but the last, rounded up, as usual layouts do.
    """
    end = layout.pipeline - 1.0
    chunk, first = _chunk_layers(model, layout), (index == 0).astype(np.float64)
    last = (index == end).astype(np.float64)
    middle = chunk * layout.virtual
    head = np.where(layout.first_layers > 0, layout.first_layers, middle)
    rest = model.num_layers - head * (end > 0) - middle * np.maximum(end - 1.0, 0.0)
    tail = np.where((layout.last_layers > 0) & (end > 0), layout.last_layers, np.maximum(rest, 0.0))
    layers = np.where(last > 0, tail, np.where(first > 0, head, middle))
    dense = layers if model.num_moe_experts is None else np.minimum(_leading_dense(model, layout, index, head), layers)
    return Stage(
        index=index,
        first=first,
        last=last,
        dense=dense,
        moe=layers - dense,
        chunk=layers / layout.virtual,
        in_flight=in_flight(layout, index),
    )


def recomputed_share(model: Model, layout: Layout) -> FloatArray:
    """Return the share of layers whose forward pass runs twice, as on a stage in the middle of the pipeline."""
    block = np.minimum(layout.block / np.maximum(_chunk_layers(model, layout), 1.0), 1.0)
    return np.where(layout.uniform > 0, 1.0, block)


def in_flight(layout: Layout, index: FloatArray) -> FloatArray:
    """Return the micro-batches (in units of a whole stage) whose activations stage `index` holds at most.

    1F1B: min(m, p - r) (Narayanan et al. 2021, arXiv 2104.04473). Interleaved: 2 (p - r - 1) + (v - 1) p + 1
    chunks of 1/v stage, at most all m v of them (megatron-core 0.16, `pipeline_parallel/schedules.py`).
    """
    behind = layout.pipeline - 1.0 - index
    chunks = 2.0 * behind + (layout.virtual - 1.0) * layout.pipeline + 1.0
    interleaved = np.minimum(chunks / layout.virtual, layout.microbatches)
    return np.where(layout.virtual > 1, interleaved, np.minimum(behind + 1.0, layout.microbatches))


def _chunk_layers(model: Model, layout: Layout) -> FloatArray:
    """Return the layers of one virtual stage in the middle of the pipeline."""
    given_first, given_last = layout.first_layers > 0, layout.last_layers > 0
    others = layout.pipeline - given_first - given_last
    spread = model.num_layers - layout.first_layers - layout.last_layers
    return np.ceil(spread / np.maximum(others * layout.virtual, 1.0))


def _leading_dense(model: Model, layout: Layout, index: FloatArray, head: FloatArray) -> FloatArray:
    """Return how many of the model's leading dense layers lie on stage `index`; chunks go round the stages."""
    first_chunk = np.maximum(head / layout.virtual, 1.0)
    chunk = np.maximum(_chunk_layers(model, layout), 1.0)
    count = np.zeros_like(index)
    for layer in range(model.moe_first_dense_layers):
        place = np.where(layer < first_chunk, 0.0, 1.0 + (layer - first_chunk) // chunk)
        count += place % layout.pipeline == index
    return count
