"""The layers of each pipeline stage by kind, in models whose layers are unlike.

A kind is a mixer or a feed-forward network: those of a layer are predicted alone, and their times, weights and stored
bytes add up. Other models, and stages that no candidate's split determines, have the mean of the model's layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from flagcore_models.shapes import MeanLayer

from flagcore.domain.model import Attention, Model
from flagcore.domain.schedule import Schedule
from flagcore.domain.space import FloatArray
from flagcore_training.layout import distinct


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The kinds of layers of a model.

    `parts`: one layer of each kind. `counts`: how many of the first n layers have it, of shape (kinds, layers + 1).
    """

    parts: tuple[MeanLayer, ...]
    counts: FloatArray

    def between(self, start: FloatArray, end: FloatArray) -> tuple[FloatArray, ...]:
        """Return the number of layers of each kind from `start` to `end`. Parts of a layer count as a share of it."""
        places = np.arange(self.counts.shape[1])
        return tuple(np.interp(end, places, each) - np.interp(start, places, each) for each in self.counts)

    def mean(self, shares: Sequence[FloatArray | float]) -> MeanLayer:
        """Return the mean of layers of which these `shares` have each kind."""
        pairs = list(zip(self.parts, shares, strict=True))
        return MeanLayer(
            attentions=tuple((each, share) for part, share in pairs for each, _ in part.attentions),
            mixers=tuple((each, share) for part, share in pairs for each, _ in part.mixers),
            dense=next((share for part, share in pairs if part.dense), 0.0),
            experts=next((share for part, share in pairs if part.experts), 0.0),
        )


@lru_cache(maxsize=64)
def layer_kinds(model: Model) -> LayerKinds | None:
    """Return the kinds of layers of a model. None if all its layers after the leading dense ones are alike."""
    if len({*model.layers[model.moe_first_dense_layers :]}) < 2:
        return None
    parts, has = list[MeanLayer](), list[list[bool]]()
    for mixer in model.mixers:
        has.append([each.mixer == mixer for each in model.layers])
        if isinstance(mixer, Attention):
            parts.append(MeanLayer(attentions=((model.with_attention(mixer), 1.0),)))
        else:
            parts.append(MeanLayer(attentions=(), mixers=((mixer, 1.0),)))
    networks = {"dense": MeanLayer(attentions=(), dense=1.0), "experts": MeanLayer(attentions=(), experts=1.0)}
    for name, part in networks.items():
        if model.feed_forward_layers(name):
            has.append([each.feed_forward == name for each in model.layers])
            parts.append(part)
    counts = np.cumsum(np.pad(np.array(has, dtype=np.float64), ((0, 0), (1, 0))), axis=1)
    return LayerKinds(tuple(parts), counts)


def mix(
    model: Model, before: FloatArray, layers: FloatArray, virtual: FloatArray, schedule: Schedule
) -> tuple[FloatArray, ...]:
    """Return the number of layers of each kind on a stage. Empty for a model without unlike layers.

    `before`: the layers of all stages before it. Virtual stages of a device are assumed to have equal numbers of
    layers. If the schedule folds the pipeline, a device has the same number of the first and of the last layers. With
    several copies, it is the mean of its two stages, from both ends.
    """
    kinds = layer_kinds(model)
    if kinds is None:
        return ()
    first, index = distinct([before, layers, virtual])
    before, layers, virtual = before[first], layers[first], virtual[first]
    if schedule.parts == 2:
        size = layers if schedule.copies > 1 else layers / 2.0
        start = before * size / np.maximum(layers, 1.0)
        chunks = [kinds.between(each, each + size) for each in (start, model.num_layers - start - size)]
        return tuple((sum(pair) * layers / np.maximum(2.0 * size, 1.0))[index] for pair in zip(*chunks, strict=True))
    total = tuple(np.zeros_like(layers) for _ in kinds.parts)
    for place in range(int(virtual.max(initial=1.0))):
        start = (before + place * model.num_layers) / virtual
        found = kinds.between(start, start + layers / virtual)
        total = tuple(sum_ + np.where(place < virtual, each, 0.0) for sum_, each in zip(total, found, strict=True))
    return tuple(each[index] for each in total)


def mixes_of(model: Model, chunks: Sequence[float] | FloatArray, length: int) -> FloatArray:
    """Return the number of layers of each kind on each of `length` stages, of shape (stages, kinds).

    `chunks`: the number of layers of each (virtual) stage in model order, the first `length` of which are on one device
    each. There are no kinds for a model without unlike layers.
    """
    kinds = layer_kinds(model)
    if kinds is None:
        return np.zeros((length, 0))
    edges = np.cumsum([0.0, *chunks])
    of_chunks = np.stack(kinds.between(edges[:-1], edges[1:]), axis=1)
    mixes: FloatArray = of_chunks.reshape(-1, length, len(kinds.parts)).sum(axis=0)
    return mixes
