"""Transfer from earlier runs: their measurements and current predictions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from flagcore.contracts import Platform, Plugins, Problem, Workload
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.effects import engine_task
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import Observations, PastMeasurements, features
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.errors import FlagError
from flagcore.plugins import engines
from flagcore.spec import read_job
from flagcore.tuner.calibration import Experience
from flagcore.tuner.learning.trials import MEMORY_NOISE, MIN_NOISE
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.stages.build import canonical, legality
from flagcore.tuner.stages.discover import costs
from flagcore.tuner.stages.predict import predict_columns

GIB = 2**30
MAX_PAST = 300
"""Maximum number of earlier measurements. Chosen to limit the run time of the model, which is cubic in this number."""
MAX_LOG_RATIO = 3.0
"""A record whose logarithm of measured over predicted exceeds this (a factor of 20) is skipped. Chosen: such a
factor is not a model error."""


def past_of_problem(problem: Problem, plugins: Plugins, run: str) -> PastMeasurements:
    """Return the measurements of earlier runs, except `run`, on the chip of a problem; empty if the spec disables
    them.
    """
    spec, chip = problem.task.spec, problem.task.cluster.groups[0].chip
    if not spec.control.use_experience:
        return PastMeasurements.empty()
    records = Experience.of_user().records(chip, spec.work.engine, exclude_run=run)
    return past(records, chip, plugins, problem.workload, spec.objective, problem.platform.knobs)


def past(
    records: Iterable[Mapping[str, Any]],
    chip: Chip,
    plugins: Plugins,
    workload: Workload,
    objective: str,
    knobs: Sequence[Knob] = (),
) -> PastMeasurements:
    """Return observations from measured records of `chip`.

    Records that cannot be read or predicted, and records of servers with another `objective`, are skipped. `knobs` are
    the knobs of plugins that a record may have.
    """
    tasks: dict[str, list[tuple[Task, Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    installed = engines()
    for record in islice(records, MAX_PAST):
        with suppress(FlagError, KeyError, TypeError, ValueError):
            kind = record["kind"]
            work_data = dict(record[kind])
            command = tuple(work_data.pop("command", None) or ()) or None  # a job record has no key for it
            if kind == "serve" and record["measured"]["objective"] != objective:
                continue
            engine_values = dict(record["candidate"])
            own_knobs = tuple(knob for knob in knobs if knob.name in engine_values)
            plugin_values = {knob.name: engine_values.pop(knob.name) for knob in own_knobs}
            for knob in own_knobs:
                knob.parse(plugin_values[knob.name], knob.name)
            job = read_job({**record, kind: work_data, "candidate": engine_values}, installed)
            work = replace(job.work, command=command)
            nodes = job.devices // job.devices_per_node
            group = NodeGroup(chip=chip, nodes=nodes, devices_per_node=job.devices_per_node)
            spec = Spec(model=job.model, cluster=ClusterSpec(chip=chip.name), work=work, objective=objective)
            task = Task(spec=spec, cluster=Cluster(groups=(group,)), knobs=own_knobs)
            key = repr((job.model, work, group, sorted(plugin_values)))
            tasks[key].append((task, {**job.candidate, **plugin_values}, record["measured"]))
    past_points = []
    for number, members in enumerate(tasks.values(), start=1):
        with suppress(FlagError, TypeError, ValueError, ArithmeticError):
            past_points.append(_observations(number, members, plugins, workload))
    return PastMeasurements(
        time=Observations.join([time for time, _ in past_points]),
        memory=Observations.join([memory for _, memory in past_points]),
    )


def _observations(
    number: int,
    members: list[tuple[Task, Mapping[str, Any], Mapping[str, Any]]],
    plugins: Plugins,
    workload: Workload,
) -> tuple[Observations, Observations]:
    task = members[0][0]
    group_costs = costs(task.cluster, plugins, task.spec.work.engine)
    platform = Platform(task=task, workload=workload, costs=group_costs)
    legal = legality(platform)
    each = [candidate_columns(platform, candidate) for _, candidate, _ in members]
    columns = {knob: np.concatenate([some[knob] for some in each]) for knob in each[0]}
    columns = canonical(columns, legal.merges)
    predictions = predict_columns(platform, columns)
    known_features = features(legal.axes, columns, predictions, workload.sizes(engine_task(task), columns))
    figures = (("step_time_s", predictions.step_time_s, 1.0), ("device_used_gib", predictions.device_used_bytes, GIB))
    pairs = []
    for name, expected, unit in figures:
        measured_values = np.array([float(each.get(name) or math.nan) * unit for _, _, each in members])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.log(measured_values) - np.log(expected)
        rows = np.flatnonzero(np.abs(ratio) < MAX_LOG_RATIO)
        min_noise = MIN_NOISE if unit == 1.0 else MEMORY_NOISE
        pairs.append(
            Observations(
                known_features.take(rows), ratio[rows], np.full(rows.size, min_noise), np.full(rows.size, number)
            )
        )
    return pairs[0], pairs[1]
