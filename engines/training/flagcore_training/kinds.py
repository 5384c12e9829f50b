"""The kinds of layers of a model, and how many of each some of its layers have."""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from flagcore_models.layers import layers_of

from flagcore.domain.model import Layer, Model, Network, Part
from flagcore.domain.space import FloatArray

Numbers: TypeAlias = tuple[FloatArray, ...]
"""The numbers of layers of each kind, one array per kind with one element per candidate."""
EVERY = slice(None)


class LayerKinds(NamedTuple):
    """The distinct layers of a model: the `leading` ones before the first layer with experts, then the others.

    `counts`: how many of the first n layers are of each kind, of shape (kinds, layers + 1).
    """

    layers: tuple[Layer, ...]
    leading: int
    counts: FloatArray

    @property
    def groups(self) -> tuple[slice, ...]:
        """The kinds of leading layers, if any, and those of the others.

        What is not linear in layers, peaks and overlaps, is that of the mean layer of a group.
        """
        return (*[slice(self.leading)] * (self.leading > 0), slice(self.leading, len(self.layers)))

    @property
    def are_plain(self) -> bool:
        """Whether all layers of each group are alike."""
        return len(self.layers) == len(self.groups)

    def between(self, start: FloatArray, end: FloatArray) -> Numbers:
        """Return the numbers of layers from `start` to `end`. Parts of a layer count as a share of it."""
        places = np.arange(self.counts.shape[1])
        return tuple(np.interp(end, places, each) - np.interp(start, places, each) for each in self.counts)

    def mean(self, layers: FloatArray, leading: FloatArray) -> Numbers:
        """Return the numbers for `layers` layers at no certain place, of which the first `leading` ones lead."""
        totals, numbers = self.counts[:, -1], (leading, layers - leading)[-len(self.groups) :]
        pairs = zip(self.groups, numbers, strict=True)
        return tuple(number * share for group, number in pairs for share in totals[group] / totals[group].sum())

    def parts(self, numbers: Numbers, group: slice = EVERY) -> dict[Part, FloatArray]:
        """Return the mixers and the networks of the layers of a group, by default of all, each with its number.

        Networks are after mixers, and experts last.
        """
        found: dict[Part, Any] = {}
        for layer, number in zip(self.layers[group], numbers[group], strict=True):
            found |= {part: found.get(part, 0.0) + number for part in layer.parts}
        return dict(sorted(found.items(), key=lambda each: (isinstance(each[0], Network), each[0].kind)))

    def with_experts(self, numbers: Numbers) -> FloatArray | float:
        """Return the number of layers with experts."""
        return sum(number for part, number in self.parts(numbers).items() if part.kind == "experts")


@lru_cache(maxsize=64)
def layer_kinds(model: Model) -> LayerKinds:
    """Return the kinds of layers of a model."""
    layers, first = [replace(each, repeats=False) for each in layers_of(model)], model.moe_first_dense_layers
    leading, others = (dict.fromkeys(each) for each in (layers[:first], layers[first:]))
    kinds = [*((layer, True) for layer in leading), *((layer, False) for layer in others)]
    has = [[(each, place < first) == kind for place, each in enumerate(layers)] for kind in kinds]
    counts = np.cumsum(np.pad(np.array(has, dtype=np.float64), ((0, 0), (1, 0))), axis=1)
    return LayerKinds((*leading, *others), len(leading), counts)
