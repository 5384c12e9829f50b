"""How a task's settings and a candidate's knobs assign layers to pipeline stages, by columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.knob import in_versions
from flagcore.domain.space import BoolArray, Columns, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.megatron.options import release, schedule, settings_in_force, takes_layouts
from flagcore.engines.megatron.stages import EMBEDDING, FIRST, LAST, LAYOUT, LOSS, VIRTUAL, parse_layout

PIPELINE, EACH = "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
TENSOR, EXPERT_TENSOR = "tensor_model_parallel_size", "expert_tensor_parallel_size"
BY_STAGE = ("recompute_num_layers_per_stage", "offload_stages", "offload_modules")
SPLIT, BALANCED = "layer_split", 1
"""The knob of the split, and the code of its value `balanced`: a split derived for each candidate."""
SPLITS_SINCE = ">=0.11"
"""Earlier releases take no virtual stages beside a number of layers of the first or the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Layers of a model and the settings about their split. `layout_layers` are the layers of each stage of a layout.

    A derived split has at least one layer on each virtual stage but the last; here only their mean is known. With
    `equal_stages` it has as many on all virtual stages of one device, and the leading dense ones on the first.

    `counted` is the number of layers in an even split: embedding and loss may count as one each. `last_stages` is how
    many of the layout's last stages must be the last of a device: those from the one with multi-token prediction on.
    """

    layers: int
    counted: int
    layout_layers: tuple[int, ...]
    last_stages: int
    first: int
    last: int
    expert_tensor: int
    equal_stages: bool
    leading: int

    @classmethod
    def of(cls, task: Task) -> Split:
        """Read the settings. Raises SpecError for a layout that is none."""
        model, settings = task.spec.model, settings_in_force(task.spec)
        layout = settings.get(LAYOUT)
        stages = parse_layout(str(layout), model.num_layers, model.mtp_num_layers) if layout else ()
        mtp = [place for place, stage in enumerate(stages) if stage.mtp]
        return cls(
            layers=model.num_layers,
            counted=model.num_layers + bool(settings.get(EMBEDDING)) + bool(settings.get(LOSS)),
            layout_layers=tuple(stage.layers for stage in stages),
            last_stages=len(stages) - mtp[0] if mtp else 0,
            first=int(settings.get(FIRST) or 0),
            last=int(settings.get(LAST) or 0),
            expert_tensor=int(settings.get(EXPERT_TENSOR) or 0),
            equal_stages=not takes_layouts(task.spec),
            leading=0 if model.num_moe_experts is None else model.moe_first_dense_layers,
        )

    def virtual(self, c: Columns) -> IntArray:
        """Return the virtual stages of a device, 1 where stages are not interleaved; rounded down."""
        if self.layout_layers:
            return np.maximum(len(self.layout_layers) // c[PIPELINE], 1)
        stage, each = self.counted // c[PIPELINE], c[EACH]
        parts = stage // np.maximum(each, 1)
        parts = np.where(balanced(c), -(-self.layers // (c[PIPELINE] * np.maximum(each, 1))), parts)
        from_each = np.where(each > 0, np.maximum(parts, 1), 1)
        number = c.get(VIRTUAL, np.zeros_like(each))
        return np.where(number > 0, number, from_each)

    def ends(self, c: Columns) -> tuple[IntArray, IntArray]:
        """Return the layers of the first and of the last stage if they are set, else 0."""
        none = np.zeros_like(c[PIPELINE])
        first, last = c.get(FIRST, none), c.get(LAST, none)
        return np.where(first > 0, first, self.first), np.where(last > 0, last, self.last)

    def expert_tensor_size(self, c: Columns) -> IntArray:
        """Return the devices that split each expert: the candidate's, the settings' or those of the other layers."""
        own = c.get(EXPERT_TENSOR, np.zeros_like(c[TENSOR]))
        return np.where(own > 0, own, self.expert_tensor or c[TENSOR])

    def uneven(self, c: Columns) -> BoolArray:
        """Return where the layers do not divide over the pipeline stages, or a stage stays empty."""
        if self.layout_layers:
            broken: BoolArray = (len(self.layout_layers) % c[PIPELINE] != 0) | (c[PIPELINE] < self.last_stages)
            return broken
        middle, stages = self._middle(c)
        first, last = self.ends(c)
        complete: BoolArray = middle * stages + first + last == self.counted
        empty: BoolArray = (stages > 0) & (middle < 1)
        return np.where(balanced(c), self.layers < self._least(c), ~complete | empty)

    def ragged(self, c: Columns) -> BoolArray:
        """Return where a device's layers do not divide over its virtual stages."""
        number, each = c.get(VIRTUAL, np.zeros_like(c[PIPELINE])), c[EACH]
        if self.layout_layers:
            other: BoolArray = (each > 0) | ((number > 0) & (number * c[PIPELINE] != len(self.layout_layers)))
            return other
        first, last = self.ends(c)
        by_each = (each > 0) & (((self.counted // c[PIPELINE]) % np.maximum(each, 1) != 0) | (first > 0) | (last > 0))
        by_number = sum((part % np.maximum(number, 1) for part in (self._middle(c)[0], first, last)), np.int64(0))
        broken: BoolArray = np.where(number > 0, by_number > 0, by_each)
        virtual = self.virtual(c)
        few = self.layers // virtual < self._least(c) if self.equal_stages else self.layers < c[PIPELINE] * virtual - 1
        return np.where(balanced(c), few | ((self.layers % virtual != 0) & self.equal_stages), broken)

    def _least(self, c: Columns) -> IntArray:
        """Return the fewest layers of a derived split without virtual stages."""
        return c[PIPELINE] - 1 + (max(self.leading, 1) if self.equal_stages else 0)

    def stage_layers(self, c: Columns) -> IntArray:
        """Return the layers of the largest pipeline stage."""
        if self.layout_layers:
            return max(self.layout_layers) * self.virtual(c)
        first, last = self.ends(c)
        largest: IntArray = np.maximum(np.maximum(first, last), self._middle(c)[0])
        return np.where(balanced(c), -(-self.layers // c[PIPELINE]), largest)

    def chunk_layers(self, c: Columns) -> list[IntArray]:
        """Return all numbers of layers that a virtual stage may have, the largest first."""
        if self.layout_layers:
            return [np.full_like(c[PIPELINE], number) for number in sorted(set(self.layout_layers), reverse=True)]
        chunk = self.stage_layers(c) // self.virtual(c)
        chunk = np.where(balanced(c), -(-self.layers // (c[PIPELINE] * self.virtual(c))), chunk)
        return [chunk] if self.counted == self.layers else [chunk, np.maximum(chunk - 1, 0)]

    def _middle(self, c: Columns) -> tuple[IntArray, IntArray]:
        """Return the layers of a stage whose number is not given, and how many such stages there are."""
        first, last = self.ends(c)
        stages = c[PIPELINE] - (first > 0) - (last > 0)
        return np.where(stages > 0, (self.counted - first - last) // np.maximum(stages, 1), 0), stages


def balanced(c: Columns) -> BoolArray:
    """Return which rows have a derived split."""
    none = np.zeros_like(c[PIPELINE])
    chosen: BoolArray = (c.get(SPLIT, none) == BALANCED) & (c[PIPELINE] > 1)
    return chosen


def derived(task: Task) -> bool:
    """Return whether splits can be derived: no setting is about the split, or treats stages one by one, the engine's
    release takes such splits, and all stages are on devices of one kind.
    """
    settings = settings_in_force(task.spec)
    given = any(settings.get(key) for key in (LAYOUT, EMBEDDING, LOSS, FIRST, LAST, *BY_STAGE))
    named = schedule(settings.get("pipeline_schedule")) is not None
    takes = in_versions(SPLITS_SINCE, release(task.spec))
    return not given and not named and len(task.cluster.groups) == 1 and takes
