"""The passes of a candidate's pipelines, for timelines and idle times."""

from __future__ import annotations

from dataclasses import replace

from flagcore.contracts import Costs
from flagcore.domain.prediction import Passes
from flagcore.domain.space import Columns
from flagcore.domain.spec import Task
from flagcore.engines.megatron.meshes import by_groups, by_replicas, groups_of_row
from flagcore.engines.megatron.predict import inputs
from flagcore.engines.megatron.time import step


def pipelines(task: Task, columns: Columns, costs: Costs) -> list[Passes]:
    """Return the passes of the pipelines of the first row that differ: one for each kind of chips with replicas of its
    own. It is empty if they are unknown.
    """
    row = {knob: values[:1] for knob, values in columns.items()}
    order = groups_of_row(task, row)
    parts = [(some, group_costs) for _, some, group_costs in by_groups(task, row, costs)]
    for _, meshes in by_replicas(task, row, costs):
        parts = meshes
    found = []
    for number, (some, group_costs) in enumerate(parts):
        if (made := step.passes(*inputs(task, some, group_costs), group_costs)) is None:
            return []
        groups = order[number : number + 1] if len(parts) > 1 else order
        found.append(replace(made, groups=tuple(groups[group] for group in made.groups)))
    return found
