"""The knobs and settings of Megatron training, which are the rows of `knobs.yaml`, and the columns of a candidate.

Specs and job records use these names. They are the names in Megatron-core, except for knobs without a flag, which only
flagcore has.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flagcore_training.knobs import read_knobs

from flagcore.domain.knob import Knob
from flagcore.domain.model import Model
from flagcore.domain.space import Axis, Candidate, IntArray, KnobValue
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.errors import SpecError
from flagcore_megatron.space import meshes
from flagcore_megatron.space.meshes import DP, MBS, MESHES, OWN, PP, SPLIT, Meshes

SELECTIVE, FULL = 1, 2
UNIFORM, BLOCK = 1, 2
_KNOBS = read_knobs(__package__)
SPACE_KNOBS = tuple(knob for knob in _KNOBS if knob.searchable)
"""The knobs of a space, in the order of enumeration."""
SETTINGS = tuple(knob for knob in _KNOBS if "setting" in knob.scope)
"""The settings: knobs that have one value for all candidates of a run."""
KNOBS = (*SPACE_KNOBS, meshes.KNOB, *_KNOBS[len(SPACE_KNOBS) :])
"""All knobs of Megatron."""

BY_NAME: Mapping[str, Knob] = {knob.name: knob for knob in KNOBS}
_OF_RECORDS = [(knob, knob.axis(())) for knob in _KNOBS if knob.searchable or "record" in knob.scope]


def axes(task: Task) -> tuple[Axis, ...]:
    """Return the axes of the space. A knob that is missing in the space is `auto`."""
    plain = tuple(knob.axis(task.listed_values(knob, AUTO)) for knob in SPACE_KNOBS)
    listed = task.listed_values(meshes.KNOB, AUTO)
    if len(task.cluster.groups) == 1:
        _require_no_meshes(f"auto_tuner.space.{MESHES}", next((each for each in listed if each), None))
        return plain
    knob = replace(meshes.KNOB, words=Meshes.from_task(task).texts)
    return (knob.axis(listed), *plain)


def candidate_columns(values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Encode one candidate's knob values as one-row columns. Missing knobs are neutral. Raises SpecError for an invalid
    value.

    Knobs that only job records have are 0 if they are missing. Meshes are omitted, because they depend on the task.
    """
    return {knob.name: _column(knob, axis, values.get(knob.name, knob.neutral)) for knob, axis in _OF_RECORDS}


def columns(task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Encode one candidate of `task` as one-row columns.

    A missing data-parallel size is derived from the number of devices.
    """
    row = candidate_columns(values)
    if len(task.cluster.groups) > 1:
        row[MESHES] = meshes.encoded(task, values.get(MESHES))
    else:
        _require_no_meshes(MESHES, values.get(MESHES))
    if values.get("data_parallel_size") is None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        used = np.prod([row[name] for name in sizes], axis=0)
        row["data_parallel_size"] = np.maximum(task.cluster.devices // used, 1)
    if values.get("use_recompute") is None:
        row["use_recompute"] = (row["recompute_granularity"] > 0).astype(np.int64)
    return row


def _require_no_meshes(key: str, value: KnobValue) -> None:
    """Raise SpecError if meshes are set although there is only one node group."""
    if value is not None:
        problem, fix = "needs a cluster of several groups", "remove it, or list cluster.groups"
        raise SpecError(key=key, value=value, problem=problem, fix=fix)


def _column(knob: Knob, axis: Axis, value: KnobValue) -> IntArray:
    try:
        code = axis.encode(value)
    except (ValueError, TypeError):
        raise SpecError(key=knob.name, value=value, problem="is not a valid value of this knob") from None
    return np.array([code], dtype=np.int64)


def program_runs_meshes(spec: Spec) -> bool:
    """Return whether trials can run meshes, because the trial program starts on the hosts of each group."""
    return spec.train.command is None and spec.on_each_host


def names_several_chips(spec: Spec) -> bool:
    """Return whether node groups have other chips, so that no trial program of one build starts on all of them."""
    return len({group.chip for group in spec.cluster.groups}) > 1


def plain_values(task: Task, candidate: Candidate) -> dict[str, KnobValue]:
    """Return the knob values of a candidate, for a trial.

    If flagcore's trial program runs the candidate's meshes, the knobs of a single mesh replace the knob `meshes`.
    """
    values = candidate.as_dict()
    if not program_runs_meshes(task.spec):
        return values
    text = values.pop(MESHES, None)
    if text is None:
        return values
    table = Meshes.from_task(task)
    number = 1 + table.texts.index(str(text))
    mesh_values = {knob: BY_NAME[knob].axis(()).decode(int(table.codes[knob][number, 0])) for knob in OWN}
    if table.splits_data[number]:
        replicas = int(table.codes[DP][number][table.groups[number] >= 0].sum())
        samples = int(table.codes[MBS][number, 0]) or values[MBS]
        return values | mesh_values | {DP: replicas, MBS: samples, SPLIT: None}
    return values | mesh_values | {PP: int(table.lengths[number]), SPLIT: "balanced"}


def in_space(values: Mapping[str, KnobValue], model: Model) -> Mapping[str, KnobValue]:
    """Return the knobs of a run of `model`, with the length of a virtual stage if there is a number of them."""
    number = int(values.get("virtual_pipeline_model_parallel_size") or 1)
    stages = number * int(values.get("pipeline_model_parallel_size") or 1)
    length = -(-model.num_layers // stages)
    return {**values, "num_layers_per_virtual_pipeline_stage": length} if number > 1 else values
