"""Measured sweeps as tuning tasks: job records that differ only in their candidate.

The space of a sweep has only the measured candidates. Predictions are those of `flag estimate`. If the curve of the
chip was fitted to the sweep's source, they use the curve of the fit without this source (`left_out_parameters` of
`fitted.json`). If a source does not report the memory in use, the predicted memory replaces it.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fit_curves import FAMILIES, curve_of

from flagcore import plugins
from flagcore.contracts import Costs, Engine, Platform, Problem
from flagcore.domain.chip import Chip
from flagcore.domain.prediction import Predictions
from flagcore.domain.probe import Probe, RankMeasurement, RankProbe
from flagcore.domain.space import Axis, Candidate, FloatArray, IntArray, Space
from flagcore.domain.spec import AUTO, ClusterSpec, Control, JobRecord, Spec, Task
from flagcore.domain.trial import TrialState
from flagcore.errors import FlagError
from flagcore.physics.roofline import Roofline
from flagcore.plugins import LoadedPlugins
from flagcore.spec.jobs import read_job
from flagcore.tuner.stages.build import build, canonical, legality
from flagcore.tuner.stages.complete import complete_by_plugins
from flagcore.tuner.stages.prune import prune

FITTED = Path(__file__).with_name("fitted.json")
MIN_CANDIDATES = 8
"""Minimum number of measured candidates of a sweep."""
EACH, VIRTUAL = "num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size"
PIPELINE = "pipeline_model_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A tuning task with measurements of every candidate. Arrays have one element per row of the problem's space.

    `seconds` are step times, NaN for candidates that ran out of memory. `used_bytes` is the memory in use on a device.
    `start_seconds` is the time of a trial outside its steps, 0 if unknown. `probes` are measurements of candidates on
    one device before a run, by row. `candidates` is the number of legal and distinct candidates with the measured
    values of knobs, `combinations` the number of all their combinations.
    """

    name: str
    source: str
    problem: Problem
    engine: Engine
    seconds: FloatArray
    used_bytes: FloatArray
    start_seconds: FloatArray
    probes: Mapping[int, Probe]
    candidates: int
    combinations: int

    @property
    def best(self) -> float:
        """The fastest measured step."""
        return float(np.nanmin(self.seconds))


@dataclass(frozen=True, slots=True)
class _Row:
    job: JobRecord
    task: Task
    columns: Mapping[str, IntArray]
    measured: Mapping[str, Any]


def read_sweeps(records: Iterable[Mapping[str, Any]], loaded_plugins: LoadedPlugins) -> list[Sweep]:
    """Return the sweeps among job records, in their order.

    Records that are invalid or cannot be predicted are left out; the invalid ones are reported on stderr.
    """
    groups: dict[str, list[tuple[JobRecord, Mapping[str, Any]]]] = defaultdict(list)
    for record in records:
        measured = record.get("measured") or {}
        if measured.get("step_time_s") or measured.get("oom"):
            try:
                job = read_job(record, plugins.engines())
            except FlagError as error:
                print(f"record {record.get('id')} is left out: {error}", file=sys.stderr)
                continue
            job_key = job.model, job.chip, job.devices, job.devices_per_node, job.work, job.notes, _extras(job)
            capacity = (record.get("provenance") or {}).get("memory_bytes_per_device")
            reported = {"source": record.get("source", ""), "capacity": capacity}
            groups[f"{reported}: {job_key!r}"].append((job, {**measured, **reported}))
    some = [
        members
        for members in groups.values()
        if sum(bool(reported.get("step_time_s")) for _, reported in members) >= MIN_CANDIDATES
    ]
    return [
        sweep
        for sweep in (_sweep(members, loaded_plugins) for members in some)
        if sweep and len(sweep.problem.space) >= MIN_CANDIDATES
    ]


def with_predictions(sweep: Sweep, predictions: Predictions) -> Sweep:
    """Return the sweep with other predictions."""
    problem, engine = sweep.problem, sweep.engine
    pruned = prune(problem.space, predictions, problem.rules)
    baseline = _baseline(problem.platform.task, engine, problem.space, predictions)
    return replace(sweep, problem=replace(problem, predictions=predictions, pruned=pruned, baseline=baseline))


def select_rows(sweep: Sweep, rows: IntArray) -> Sweep:
    """Return the sweep with only `rows`, which are in ascending order."""
    space = replace(sweep.problem.space, rows=sweep.problem.space.rows[rows])
    smaller = replace(
        sweep,
        problem=replace(sweep.problem, space=space),
        seconds=sweep.seconds[rows],
        used_bytes=sweep.used_bytes[rows],
        start_seconds=sweep.start_seconds[rows],
        probes={place: sweep.probes[row] for place, row in enumerate(rows.tolist()) if row in sweep.probes},
    )
    return with_predictions(smaller, sweep.problem.predictions.take(rows))


def on_smaller_devices(sweep: Sweep, share: float) -> Sweep:
    """Return the sweep on smaller devices, on which only `share` of its candidates fit."""
    capacity = float(np.quantile(sweep.used_bytes, share, method="inverted_cdf"))
    seconds = np.where(sweep.used_bytes > capacity, np.nan, sweep.seconds)
    predictions = replace(sweep.problem.predictions, capacity_bytes=capacity)
    return with_predictions(replace(sweep, seconds=seconds), predictions)


def _extras(job: JobRecord) -> tuple[object, ...]:
    """Return the values of a record's candidate that are not knobs of a space; they define another task."""
    return tuple((knob, job.candidate.get(knob)) for knob in ("expert_tensor_parallel_size", *_ENDS))


_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def _sweep(members: Sequence[tuple[JobRecord, Mapping[str, Any]]], loaded_plugins: LoadedPlugins) -> Sweep | None:
    first, source = members[0][0], str(members[0][1]["source"])
    engine, platform = (
        plugins.find_engine(first.work.engine),
        _platform(first, members[0][1]["capacity"], loaded_plugins),
    )
    costs = left_out(platform.costs, platform.task.cluster.groups[0].chip, source)
    rows = [row for job, measured in members for row in _row(job, measured, engine, platform.task)]
    if not rows:
        return None
    space = _space(rows, engine)
    positions = np.array([space.find(_candidate(row, space.axes)) for row in rows])
    _, order = np.unique(positions, return_index=True)
    task = rows[0].task
    platform = replace(platform, task=task, costs=costs)
    legal = build(space.axes, engine.rules(task), engine.merges(task))
    predictions = _predicted(rows, engine, costs).take(order)
    rules = engine.pruning_rules(task)
    problem = Problem(
        platform=platform,
        legality=legality(platform),
        space=space,
        predictions=predictions,
        pruned=prune(space, predictions, rules),
        baseline=_baseline(task, engine, space, predictions),
        rules=rules,
    )
    name = f"{first.model.name}, {first.devices} x {first.chip}, batch {first.work.global_batch_size}"
    used_bytes = _figure(rows, positions, "device_used_gib", 2.0**30)
    return Sweep(
        name=f"{name}, sequence {first.work.seq_length}",
        source=source,
        problem=problem,
        engine=engine,
        seconds=_figure(rows, positions, "step_time_s", 1.0),
        used_bytes=np.where(np.isnan(used_bytes), predictions.device_used_bytes, used_bytes),
        start_seconds=np.nan_to_num(_figure(rows, positions, "start_s", 1.0)),
        probes={
            int(place): _probe(row, space.candidate(int(place)), engine, costs)
            for place, row in zip(positions, rows, strict=True)
            if row.measured.get("probe")
        },
        candidates=len(legal),
        combinations=legal.combinations,
    )


def _probe(row: _Row, candidate: Candidate, engine: Engine, costs: Costs) -> Probe:
    """Return the probe in a record of `benchmarks/measure_sweep.py`."""

    def rank(report: Mapping[str, Any]) -> RankProbe:
        return RankProbe(
            rank=report["rank"],
            state=TrialState(report["state"]),
            predicted=engine.probes.predict(row.task, row.columns, report["rank"], costs),
            measured=RankMeasurement(**report["measured"]) if report["measured"] else None,
            reason=report["reason"],
            duration_s=report["duration_s"],
        )

    return Probe(candidate=candidate, ranks=tuple(map(rank, row.measured["probe"])))


def _platform(job: JobRecord, capacity: int | None, loaded_plugins: LoadedPlugins) -> Platform:
    """Return the platform of the cluster; `capacity` is a device's memory in bytes, None for the chip's memory."""
    devices = min(job.devices_per_node, job.devices)
    cluster = ClusterSpec(
        chip=job.chip, nodes=job.devices // devices, devices_per_node=devices, memory_bytes_per_device=capacity
    )
    spec = Spec(model=job.model, cluster=cluster, work=job.work, control=Control())
    return complete_by_plugins(spec, loaded_plugins, plugins.find_engine(job.work.engine))


def left_out(costs: Costs, chip: Chip, source: str) -> Costs:
    """Return `costs` with a curve of a fit without `source`."""
    reported = json.loads(FITTED.read_text(encoding="utf-8"))
    for name, family in FAMILIES.items():
        if chip.name in family.chips and source in reported[name]["sources"]:
            parameters = reported[name]["sources"][source]["left_out_parameters"]
            return replace(costs, kernels=Roofline(chip=chip, curve=curve_of(family, parameters, chip.name)))
    return costs


def _row(job: JobRecord, measured: Mapping[str, Any], engine: Engine, bare: Task) -> list[_Row]:
    """Return a record in the form for predictions, None if it cannot be predicted."""
    try:
        task, values, *_ = engine.published(bare, job.candidate, job.notes)
        columns = engine.columns(task, values)
    except FlagError:
        return []
    return [_Row(job, task, canonical(columns, engine.merges(task)), measured)]


def _candidate(row: _Row, axes: Sequence[Axis]) -> Candidate:
    codes = {axis.knob: int(row.columns[axis.knob][0]) for axis in axes}
    virtual = int(row.columns[VIRTUAL][0])
    if virtual > 1 and not codes[EACH]:
        codes[EACH] = row.job.model.num_layers // (virtual * codes[PIPELINE])
    return Candidate(tuple((axis.knob, axis.decode(codes[axis.knob])) for axis in axes))


def _space(rows: Sequence[_Row], engine: Engine) -> Space:
    """Return the space of the measured candidates."""
    axes = engine.axes(rows[0].task)
    values = [_candidate(row, axes).as_dict() for row in rows]
    axes = tuple(
        replace(axis, values=tuple(axis.decode(code) for code in sorted({axis.encode(v[axis.knob]) for v in values})))
        for axis in axes
    )
    codes = tuple(np.array(sorted({axis.encode(v) for v in (*axis.values, axis.neutral)})) for axis in axes)
    space = Space(axes=axes, codes=codes, rows=np.zeros(0, dtype=np.int64), combinations=0)
    for candidate in values:
        space = space.with_candidate(Candidate.of(candidate))
    return space


def _predicted(rows: Sequence[_Row], engine: Engine, costs: Costs) -> Predictions:
    """Return the predictions of `rows`, grouped by task."""
    tasks: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        tasks[repr(row.task.spec.train)].append(place)
    parts = []
    for places in tasks.values():
        columns = {knob: np.concatenate([rows[at].columns[knob] for at in places]) for knob in rows[0].columns}
        parts.append(engine.predict(rows[places[0]].task, columns, costs))
    return Predictions.join(parts).take(np.argsort(np.concatenate([*tasks.values()])))


def _baseline(task: Task, engine: Engine, space: Space, predictions: Predictions) -> Candidate:
    """Return the baseline of `flag tune`: the rule of thumb among the measured candidates of the usual space."""
    columns = space.columns()
    usual_rows = np.ones(len(space), dtype=np.bool_)
    for axis in space.axes:
        allowed = engine.usual_space(task).get(axis.knob, AUTO)
        if not isinstance(allowed, str):
            codes = [axis.encode(value) for value in (*allowed, axis.neutral)]
            usual_rows &= np.isin(columns[axis.knob], codes)
    rows = np.flatnonzero(usual_rows) if usual_rows.any() else np.arange(len(space))
    row = engine.rule_of_thumb(task, space.columns(rows), predictions.take(rows))
    return space.candidate(int(rows[row]))


def _figure(rows: Sequence[_Row], positions: IntArray, name: str, unit: float) -> FloatArray:
    """Return a measured value by row of the space, the median of repeated measurements."""
    figures = np.array([float(row.measured.get(name) or np.nan) * unit for row in rows])
    return np.array([np.median(figures[positions == place]) for place in range(int(positions.max()) + 1)])
