"""Splits of layers over pipeline stages, computed from a task's settings and the knob columns of candidates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from flagcore_training.splits import StageLayers

from flagcore.domain.model import Model
from flagcore.domain.space import BoolArray, Columns, IntArray
from flagcore.domain.spec import Task
from flagcore_megatron.space.meshes import MESHES
from flagcore_megatron.space.options import Settings, schedule, settings_in_force, takes_layouts
from flagcore_megatron.space.stages import (
    EMBEDDING,
    FIRST,
    LAST,
    LAYOUT,
    LOSS,
    PATTERN,
    SPLIT_SETTINGS,
    VIRTUAL_STAGES,
    may_start_empty,
    parse_layout,
    pattern_stages,
)

PP, LAYERS_PER_VIRTUAL = "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
TP, EXPERT_TENSOR = "tensor_model_parallel_size", "expert_tensor_parallel_size"
STAGE_SETTINGS = ("offload_stages", "offload_modules")
SPLIT, BALANCED = "layer_split", 1
"""The knob of the split, and the code of its value `balanced`, for which a split is derived for each candidate."""


class Split(NamedTuple):
    """The number of a model's layers, and the settings that determine their split.

    `counted` is the number of layers in an even split, where embedding and loss may count as one layer each.
    `layout_layers` are the layers of each stage of a layout, or of a hybrid pattern that `has_bars`. `last_stages` is
    the number of the layout's last stages that must be on the last device: all stages from multi-token prediction on.

    A derived split has at least one layer on each virtual stage but the last and, if it has virtual stages and
    `may_start_empty`, the first, which has the embedding.
    """

    layers: int
    counted: int
    layout_layers: tuple[int, ...]
    last_stages: int
    first: int
    last: int
    expert_tensor: int
    may_start_empty: bool
    has_bars: bool

    @classmethod
    def from_task(cls, task: Task) -> Split:
        """Return the split that the settings of `task` describe. Raises SpecError for an invalid layout."""
        model, settings = task.spec.model, settings_in_force(task.spec)
        stages = stages_of(model, settings)
        mtp = [place for place, stage in enumerate(stages) if stage.mtp]
        return cls(
            layers=model.num_layers,
            counted=model.num_layers + bool(settings.get(EMBEDDING)) + bool(settings.get(LOSS)),
            layout_layers=tuple(stage.layers for stage in stages),
            last_stages=len(stages) - mtp[0] if mtp else 0,
            first=int(settings.get(FIRST) or 0),
            last=int(settings.get(LAST) or 0),
            expert_tensor=int(settings.get(EXPERT_TENSOR) or 0),
            may_start_empty=may_start_empty(model),
            has_bars=bool(stages and not settings.get(LAYOUT)),
        )

    def given(self, c: Columns) -> BoolArray:
        """Return a mask of the candidates whose stages are those of `layout_layers`: without other bars."""
        replaced: BoolArray = self.has_bars & (c.get(SPLIT, np.zeros_like(c[PP])) == BALANCED)
        return ~replaced & bool(self.layout_layers)

    def virtual(self, c: Columns) -> IntArray:
        """Return the number of virtual stages per device, rounded down; 1 if stages are not interleaved."""
        stage, per_virtual = self.counted // c[PP], c[LAYERS_PER_VIRTUAL]
        parts = stage // np.maximum(per_virtual, 1)
        parts = np.where(balanced(c), -(-self.layers // (c[PP] * np.maximum(per_virtual, 1))), parts)
        from_each = np.where(per_virtual > 0, np.maximum(parts, 1), 1)
        number = c.get(VIRTUAL_STAGES, np.zeros_like(per_virtual))
        of_layout = np.maximum(len(self.layout_layers) // c[PP], 1)
        return np.where(self.given(c), of_layout, np.where(number > 0, number, from_each))

    def ends(self, c: Columns) -> tuple[IntArray, IntArray]:
        """Return the explicit numbers of layers of the first and of the last stage; 0 where they are not set."""
        zeros = np.zeros_like(c[PP])
        first, last = c.get(FIRST, zeros), c.get(LAST, zeros)
        return np.where(first > 0, first, self.first), np.where(last > 0, last, self.last)

    def expert_tensor_size(self, c: Columns) -> IntArray:
        """Return the number of devices that split each expert, which is by default the tensor-parallel size."""
        knob = c.get(EXPERT_TENSOR, np.zeros_like(c[TP]))
        return np.where(knob > 0, knob, self.expert_tensor or c[TP])

    def uneven(self, c: Columns) -> BoolArray:
        """Return a mask of the candidates without an even split of layers over stages, or only with an empty stage."""
        middle, stages = self._middle(c)
        first, last = self.ends(c)
        complete: BoolArray = middle * stages + first + last == self.counted
        empty: BoolArray = (stages > 0) & (middle < 1)
        wrong = (len(self.layout_layers) % c[PP] != 0) | (c[PP] < self.last_stages)
        return np.where(self.given(c), wrong, np.where(balanced(c), self.layers < c[PP] - 1, ~complete | empty))

    def ragged(self, c: Columns) -> BoolArray:
        """Return a mask of the candidates whose layers per device cannot be divided evenly over virtual stages."""
        number, per_virtual = c.get(VIRTUAL_STAGES, np.zeros_like(c[PP])), c[LAYERS_PER_VIRTUAL]
        contradicts = (per_virtual > 0) | ((number > 0) & (number * c[PP] != len(self.layout_layers)))
        first, last = self.ends(c)
        remainder = (self.counted // c[PP]) % np.maximum(per_virtual, 1)
        uneven = (per_virtual > 0) & ((remainder != 0) | (first > 0) | (last > 0))
        by_number = sum((part % np.maximum(number, 1) for part in (self._middle(c)[0], first, last)), np.int64(0))
        broken: BoolArray = np.where(number > 0, by_number > 0, uneven)
        virtual = self.virtual(c)
        least = c[PP] * virtual - 1 - ((virtual > 1) & self.may_start_empty)
        return np.where(self.given(c), contradicts, np.where(balanced(c), self.layers < least, broken))

    def stage_layers(self, c: Columns) -> IntArray:
        """Return the number of layers of the largest pipeline stage."""
        of_layout = max(self.layout_layers, default=0) * np.maximum(len(self.layout_layers) // c[PP], 1)
        first, last = self.ends(c)
        largest: IntArray = np.maximum(np.maximum(first, last), self._middle(c)[0])
        return np.where(self.given(c), of_layout, np.where(balanced(c), -(-self.layers // c[PP]), largest))

    def chunk_layers(self, c: Columns) -> list[IntArray]:
        """Return the numbers of layers that a virtual stage may have, for each candidate, in descending order."""
        chunk = self.stage_layers(c) // self.virtual(c)
        chunk = np.where(balanced(c), -(-self.layers // (c[PP] * self.virtual(c))), chunk)
        if self.layout_layers:
            given, numbers = self.given(c), sorted(set(self.layout_layers), reverse=True)
            return [np.where(given, number, chunk) for number in numbers]
        return [chunk] if self.counted == self.layers else [chunk, np.maximum(chunk - 1, 0)]

    def _middle(self, c: Columns) -> tuple[IntArray, IntArray]:
        """Return the number of layers of a stage without an explicit number, and the number of such stages."""
        first, last = self.ends(c)
        stages = c[PP] - (first > 0) - (last > 0)
        return np.where(stages > 0, (self.counted - first - last) // np.maximum(stages, 1), 0), stages


def stages_of(model: Model, settings: Settings, release: str | None = None) -> tuple[StageLayers, ...]:
    """Return the stages of the layout, or of the bars in the hybrid pattern, in `settings`; empty if there are none.

    Raises SpecError for an invalid text, or one that the engine `release` does not read.
    """
    if layout := settings.get(LAYOUT):
        return parse_layout(str(layout), model.num_layers, model.mtp_num_layers)
    return pattern_stages(str(pattern), model, release) if (pattern := settings.get(PATTERN)) else ()


def balanced(c: Columns) -> BoolArray:
    """Return a mask of the candidates whose layer split flagcore derives."""
    zeros = np.zeros_like(c[PP])
    is_derived: BoolArray = (c.get(SPLIT, zeros) == BALANCED) & (c[PP] > 1) | (c.get(MESHES, zeros) > 0)
    return is_derived


def derived(task: Task) -> bool:
    """Return whether flagcore can derive layer splits for a task.

    This requires an engine release with layouts, the engine's own schedule, and no setting that fixes the split or
    applies to single stages.
    """
    settings = settings_in_force(task.spec)
    is_set = any(settings.get(key) for key in (*SPLIT_SETTINGS, *STAGE_SETTINGS))
    has_own_schedule = schedule(settings.get("pipeline_schedule")) is not None
    return not is_set and not has_own_schedule and takes_layouts(task.spec)
