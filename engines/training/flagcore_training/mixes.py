"""The layers of each pipeline stage by kind, in models whose layers are unlike.

A kind is a mixer or a feed-forward network: those of a layer are predicted alone, and their times, weights and stored
bytes add up. Other models, and stages that no candidate's split determines, have the mean of the model's layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from flagcore_models.layers import dense_of, layers_of, mixer_counts, network_counts

from flagcore.domain.model import Mixer, Model, Network, Part
from flagcore.domain.schedule import Schedule
from flagcore.domain.space import FloatArray
from flagcore_training.layout import distinct

Share: TypeAlias = FloatArray | float
"""A share of layers: of all candidates, or of each one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLayer:
    """The mixers and networks of several layers, each with the share of these layers that have it.

    All shares of a plain layer are 1.
    """

    mixers: tuple[tuple[Mixer, Share], ...] = ()
    networks: tuple[tuple[Network, Share], ...] = ()

    @classmethod
    def of_parts(cls, parts: Iterable[tuple[Part, Share]]) -> "MeanLayer":
        """Return the mean of layers of which these shares have each part."""
        pairs = list(parts)
        return cls(
            mixers=tuple((part, share) for part, share in pairs if isinstance(part, Mixer)),
            networks=tuple((part, share) for part, share in pairs if isinstance(part, Network)),
        )

    @property
    def parts(self) -> tuple[tuple[Part, Share], ...]:
        return *self.mixers, *self.networks

    def share(self, kind: str) -> Share:
        """Return the share of layers with a feed-forward network of one kind, "dense" or "experts"."""
        return sum(share for network, share in self.networks if network.kind == kind)


def mean_layer(model: Model, *, experts: bool) -> MeanLayer:
    """Return the mean of a model's layers, of a model with `experts` that of the layers after the leading dense ones.

    The mixers are the mean of all layers.
    """
    mixers = tuple((mixer, number / model.num_layers) for mixer, number in mixer_counts(model).items())
    counts = dict(network_counts(model))
    has_experts = any(network.kind == "experts" for network in counts)
    if has_experts and not experts:
        return MeanLayer(mixers=mixers, networks=((dense_of(model), 1.0),))
    leading = model.moe_first_dense_layers if has_experts else 0
    if leading:
        counts[dense_of(model)] -= leading
    rest = float(model.num_layers - leading)
    networks = tuple((network, number / rest) for network, number in counts.items() if number)
    return MeanLayer(mixers=mixers, networks=networks)


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The kinds of layers of a model.

    `parts`: the mixer or the network of each kind. `counts`: how many of the first n layers have it, of shape (kinds,
    layers + 1).
    """

    parts: tuple[Part, ...]
    counts: FloatArray

    def between(self, start: FloatArray, end: FloatArray) -> tuple[FloatArray, ...]:
        """Return the number of layers of each kind from `start` to `end`. Parts of a layer count as a share of it."""
        places = np.arange(self.counts.shape[1])
        return tuple(np.interp(end, places, each) - np.interp(start, places, each) for each in self.counts)

    def mean(self, shares: Sequence[Share]) -> MeanLayer:
        """Return the mean of layers of which these `shares` have each kind."""
        return MeanLayer.of_parts(zip(self.parts, shares, strict=True))


@lru_cache(maxsize=64)
def layer_kinds(model: Model) -> LayerKinds | None:
    """Return the kinds of layers of a model. None if all its layers after the leading dense ones are alike."""
    layers = layers_of(model)
    if len({(each.mixer, each.network) for each in layers[model.moe_first_dense_layers :]}) < 2:
        return None
    parts = (*mixer_counts(model), *sorted(network_counts(model), key=lambda each: each.kind))
    has = [[part in (each.mixer, each.network) for each in layers] for part in parts]
    counts = np.cumsum(np.pad(np.array(has, dtype=np.float64), ((0, 0), (1, 0))), axis=1)
    return LayerKinds(parts, counts)


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
