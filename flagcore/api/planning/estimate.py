"""Predictions without trials: the candidates of a spec, counts by outcome, and the knobs of plugins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from flagcore.api.inputs import SpecLike, loaded_plugins, spec_data, with_objective
from flagcore.api.planning.advice import bottleneck_text, cheapest_change, mfu_warning
from flagcore.api.planning.mixing import mixing_of
from flagcore.api.snapshot import build_problem_of_spec, prediction_records, read_spec
from flagcore.contracts import Platform, Problem
from flagcore.domain.effects import engine_task
from flagcore.domain.engine import ForcedSetting
from flagcore.domain.knob import Knob
from flagcore.domain.plan import Counts, count
from flagcore.domain.search_state import SearchState
from flagcore.domain.serving import PER_DEVICE, ServeSpec
from flagcore.domain.space import IntArray
from flagcore.domain.spec import AUTO, Task, pareto
from flagcore.errors import NothingFits
from flagcore.i18n import _
from flagcore.report.estimate import Estimate
from flagcore.report.formats import lookup
from flagcore.report.text import serving_load_text
from flagcore.tuner.feasibility import no_time, nothing_fits_text, only_baseline_text, unmet_text
from flagcore.tuner.problem import candidate_columns, no_launch_reason, rows_by_time
from flagcore.tuner.stages.limit import search_time
from flagcore.tuner.stages.predict import model_table, record


def estimate(
    spec: SpecLike,
    *,
    chip: str | None = None,
    top: int = 10,
    distinct: bool = False,
    objective: str | None = None,
    without: Collection[str] = (),
    data: Mapping[str, Any] | None = None,
) -> Estimate:
    """Predict all candidates of a spec and return the `top` fastest. No trial runs, and no hardware is needed.

    With `distinct`, these are the fastest of each layout, and `variants` is the number of further candidates with the
    layout. `chip` and `objective` replace those of the spec, `data` is the content of the file if it was imported.
    Raises the errors of `flagcore.errors`.
    """
    if objective is not None:
        data = with_objective(spec_data(spec, data)[1], objective)
    problem = build_problem_of_spec(spec, chip, without, data, plan=True)
    task, order, mixing = problem.task, rows_by_time(problem), None
    if not order.size:
        is_detected = task.spec.cluster.chip == AUTO and not task.spec.cluster.groups
        raise NothingFits(
            nothing_fits_text(problem, None if is_detected else partial(cheapest_change, problem, without))
        )
    if len(task.cluster.groups) > 1:
        with loaded_plugins(without) as loaded:
            mixing = mixing_of(read_spec(spec, chip, without, data), problem, loaded)
    untimed = int(np.isnan(problem.predictions.step_time_s[order]).sum())
    model = model_table(problem.workload.parts(task))
    fastest: Any = record(task, problem.predictions.row(int(order[0])))
    return Estimate(
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        counts=before_trials(problem),
        baseline=_records(problem, np.array([problem.space.find(problem.baseline)]))[0],
        defaults=_engine_defaults(problem),
        unmet=unmet_text(problem) or only_baseline_text(problem),
        candidates=_candidates(problem, order, top, distinct=distinct),
        model=tuple(model),
        bottleneck=bottleneck_text(fastest),
        warning=mfu_warning(problem, without, fastest, sum(float(str(part["params"])) for part in model)),
        untimed=untimed,
        no_time=no_time(task, problem.costs) if untimed else "",
        runs=_runs(task),
        assumed=_assumed(task),
        notes=plugin_notes(problem.platform),
        search=search_time(problem),
        mixing=mixing,
        knobs=problem.knobs,
        labels=problem.workload.labels,
    )


def _candidates(problem: Problem, order: IntArray, top: int, *, distinct: bool) -> tuple[Mapping[str, Any], ...]:
    """Return the records of the first `top` rows of `order`, or of the first rows with different layouts.

    For servers, `pareto` tells whether no candidate is predicted to have higher rates both per device and per user.
    """
    places, figures = np.arange(min(top, order.size)), problem.predictions.figures
    more: list[dict[str, Any]] = [{} for _place in places]
    if distinct:
        _layouts_found, first, counts = np.unique(_layouts(problem, order), return_index=True, return_counts=True)
        fastest = np.argsort(first)[:top]
        places, more = first[fastest], [{"variants": int(count) - 1} for count in counts[fastest]]
    if PER_DEVICE in figures and (latency := figures.get("tpot_s.p50")) is not None:
        front = set(pareto(figures[PER_DEVICE][order], -latency[order]).tolist())
        more = [{**each, "pareto": place in front} for place, each in zip(places.tolist(), more, strict=True)]
    numbered = zip(places.tolist(), _records(problem, order[places]), more, strict=True)
    return tuple({"number": place + 1, **record, **counted} for place, record, counted in numbered)


def _layouts(problem: Problem, rows: IntArray) -> IntArray:
    """Return a number for each row that is equal for rows with equal layouts."""
    names = [name for name, knob in problem.knobs.items() if knob.layout]
    numbers = np.zeros(rows.size, dtype=np.int64)
    for start in range(0, rows.size, LAYOUT_ROWS):
        part = slice(start, start + LAYOUT_ROWS)
        columns = problem.space.columns(rows[part])
        for name in names:
            numbers[part] = numbers[part] * LARGEST_SIZE + columns[name]  # overflows, as a hash
    return numbers


LAYOUT_ROWS = 100_000
"""The number of rows that are decoded at once."""
LARGEST_SIZE = 1_000_003
"""A prime above the largest size of a layout."""


def _runs(task: Task) -> str:
    """Return the runner of a predicted job: the user's command, the engine, or the trial program."""
    if isinstance(task.spec.work, ServeSpec):
        work = task.spec.work
        return _("as {engine} serves {load} (serve.profile)", engine=work.engine, load=serving_load_text(work))
    train = task.spec.train
    if train.command is not None:
        return _("as train.command runs it")
    if train.implementation in (None, "local"):
        method = _("as flagcore's trial program runs it, without overlap (see train.implementation)")
    else:
        names = {"engine": train.engine, "implementation": train.implementation}
        method = _("as {engine} runs it with the layers of {implementation}", **names)
    return _("{how}; with train.settings", how=method) if train.settings else method


def _assumed(task: Task) -> Mapping[str, Any]:
    """Return the implementation and the settings that a plan assumes; empty if it assumes none."""
    work = task.spec.work
    if isinstance(work, ServeSpec) or not work.assumed:
        return {}
    return {"implementation": work.implementation, **work.assumed}


def before_trials(problem: Problem) -> Counts:
    """Return the counts of combinations by outcome before any trial."""
    no_trials = SearchState(by_candidate={}, repeats=(), baseline=None, best=None)
    return count(problem.space, problem.pruned, no_trials)


def _records(problem: Problem, rows: IntArray) -> list[dict[str, Any]]:
    """Return candidates with their predictions and the memory of their worst stages by component.

    `slo` are the figures of a predicted server that exceed their limit, in seconds.
    """
    task, space, limits = problem.task, problem.space, problem.task.spec.limits
    records = []
    for row, known in zip(rows, prediction_records(problem.platform, space.columns(rows)), strict=True):
        candidate = space.candidate(int(row))
        more: dict[str, Any] = {"assumed": problem.workload.assumed(task, candidate)} if _assumed(task) else {}
        if limits:
            figures = {name: lookup(known, name) or 0.0 for name in limits}
            more = {"slo": {name: figure for name, figure in figures.items() if figure > limits[name]}, **more}
        records.append({"candidate": candidate.as_dict(), **known, **more})
    return records


def _engine_defaults(problem: Problem) -> dict[str, Any] | None:
    """Return the candidate of the engine's own defaults with its predictions, None if it is the baseline."""
    values = {**problem.baseline.as_dict(), **problem.workload.defaults(engine_task(problem.task))}
    if values == problem.baseline.as_dict():
        return None
    columns = candidate_columns(problem.platform, values)
    return {"candidate": values, **prediction_records(problem.platform, columns)[0]}


def plugin_notes(platform: Platform) -> tuple[str, ...]:
    """Return the plugins' settings for all candidates, and their notes on engine and chip."""
    rules = (each for each in platform.value_rules if isinstance(each, ForcedSetting))
    forced = (f"{each.setting} = {each.value} (rule {each.name}): {each.reason}" for each in rules)
    return (*filter(None, [platform.precision_reason]), *forced, *platform.support.notes)


def knob_record(task: Task, knob: Knob) -> dict[str, Any]:
    """Return a plugin's knob as plain data. `not_launched` gives the reason for each value that no trial can have."""
    not_launched = {value: no_launch_reason(task, knob, value) for value in knob.effects}
    source = knob.source
    return {
        "knob": knob.name,
        "values": list(knob.values),
        "in_space": knob in task.knobs,
        "help": knob.help,
        "claim": knob.claim,
        "effect": f"{knob.effect_source.kind}: {knob.effect_source.detail}" if knob.effect_source else None,
        "needs": [str(each) for each in knob.requires] + ["a mixture of experts"] * knob.experts_only,
        "effects": [{"value": value, **asdict(effect)} for value, effect in knob.effects.items()],
        "not_launched": {str(value): reason for value, reason in not_launched.items() if reason},
        "source": f"{source.kind}: {source.detail}" if source else None,
    }
