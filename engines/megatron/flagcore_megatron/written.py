"""A candidate's values with the layout of its stages, as commands and job files have it."""

from flagcore_training.layout import Layout, Training

from flagcore.contracts import Platform
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import Task
from flagcore_megatron.layers.fastest import layouts, virtual_stages
from flagcore_megatron.predict import inputs
from flagcore_megatron.space import meshes as mixed
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.knobs import plain_values
from flagcore_megatron.space.options import is_hybrid, settings_in_force, takes_layouts
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT
from flagcore_megatron.space.stages import LAYOUT, PATTERN, pattern_text


def with_layout(platform: Platform, candidate: Candidate) -> dict[str, KnobValue]:
    """Return a candidate's knob values with the layout of its stages in place of `balanced`.

    An even split needs no layout. A layout includes the virtual stages, so the number of layers per virtual stage,
    which Megatron then refuses, is unset. A hybrid model has bars in its pattern instead.
    """
    task = platform.task
    values = plain_values(task, candidate)
    is_balanced, is_pattern = values.pop(SPLIT, None) == "balanced", is_hybrid(task.spec.model)
    if not is_balanced and not is_pattern:
        return values
    ((_, ((row, costs), *_)),) = mixed.by_kinds(task, row_of(task, candidate.as_dict()), platform.costs)
    train, layout = inputs(task, row, costs)
    if is_pattern:
        return values | _pattern(task, train, layout)
    (text,) = layouts(train, layout)
    return values | ({LAYOUT: text, LAYERS_PER_VIRTUAL: None} if text else {})


def _pattern(task: Task, train: Training, layout: Layout) -> dict[str, KnobValue]:
    """Return the hybrid pattern of a candidate, if it is not that of the job.

    A release without bars, and explicit numbers of layers of the ends, keep the pattern. So does an even split without
    virtual stages in a command without a pattern, whose program has it.
    """
    given = str(settings_in_force(task.spec).get(PATTERN) or "")
    (chunks,), is_whole = virtual_stages(train, layout), not takes_layouts(task.spec)
    stages = int(layout.pipeline[0] * layout.virtual[0])
    if not chunks and (is_whole or layout.first_layers[0] or layout.last_layers[0]):
        stages = 1
    if task.spec.train.command is not None and not given and not chunks and layout.virtual[0] == 1:
        return {}
    text = pattern_text(task.spec.model, chunks or [task.spec.model.num_layers // stages] * stages, given)
    return {PATTERN: text, LAYERS_PER_VIRTUAL: None} if text and text != given else {}
