"""The search problem of a spec before any trial: its platform, space, predictions, baseline and published runs."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from flagcore import plugins
from flagcore.contracts import Engine, Platform, Problem
from flagcore.domain.chip import normalize_name
from flagcore.domain.engine import RefusedValues
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import (
    BoolArray,
    Candidate,
    Columns,
    FloatArray,
    IntArray,
    KnobValue,
    Legality,
    Space,
    as_candidate,
)
from flagcore.domain.spec import JobRecord, Spec, Task
from flagcore.domain.trial import ESTIMATE, Trial
from flagcore.errors import FlagError, NothingFits, SpecError
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins
from flagcore.tuner.effects import plugin_columns
from flagcore.tuner.shorten import SmallerTask
from flagcore.tuner.stages.build import NOT_LIKELY, PLANNED_SHARE, bounds, build, check, legality, same_for_all
from flagcore.tuner.stages.complete import complete
from flagcore.tuner.stages.predict import predict
from flagcore.tuner.stages.prune import prune

OnUsual: TypeAlias = Callable[[Platform, Space, Predictions], object]


def build_problem(
    spec: Spec,
    plugins: LoadedPlugins,
    engine: Engine,
    *,
    plan: bool = False,
    on_usual: OnUsual | None = None,
    completed: Mapping[str, KnobValue] | None = None,
) -> Problem:
    """Complete `spec`, build the space, predict all candidates and prune them.

    No trial runs if `plan` is true or the fidelity is `estimate`. In this case, if trials could not run on this
    machine, the problem uses the defaults of production on the chip. `on_usual` is called as soon as the engine's usual
    space is predicted, if the spec has no baseline. `completed`: the baseline of an earlier call, with a value for each
    knob; the baseline of the spec has only the values that the user gave. Raises NothingFits if no combination is
    legal; the message counts the combinations that each rule removed.
    """
    plan = plan or spec.control.fidelity == ESTIMATE
    platform = complete(spec, plugins, engine, plan=plan)
    legal = legality(platform)
    own = platform.task.spec
    smaller = SmallerTask(platform, own.trial_nodes) if own.trial_nodes < own.cluster.nodes else None
    legal = replace(legal, rules=(*legal.rules, smaller.rule())) if smaller else legal
    about = (platform.task, platform.costs, platform.value_rules, platform.unmodelled, platform.devices, plan)
    space, predictions, known_s, baseline, is_usual, adds_baseline = plugins.kept(
        partial(_predicted, platform, legal, on_usual, completed, plan=plan), (*about, completed)
    )
    first, all_of = bounds(platform, space.axes, None), partial(same_for_all, True)  # what a cut space lacks
    first = tuple(replace(each, broken=all_of) if each.name in space.illegal else each for each in first)
    legal = replace(legal, bounds=bounds(platform, space.axes, known_s, plan=plan) or first)
    rules = (*engine.pruning_rules(platform.task), *([smaller] if smaller else []))
    problem = Problem(
        platform=platform,
        legality=legal,
        space=space,
        predictions=predictions,
        pruned=prune(space, predictions, rules),
        baseline=baseline,
        usual_baseline=is_usual,
        rules=rules,
        knobs={knob.name: knob for knob in (*engine.knobs, *platform.task.knobs)},
        adds_baseline=adds_baseline,
        published=nearest_runs(platform.task, plugins),
    )
    return engine.plans.scheduled(problem)


def _predicted(
    platform: Platform,
    legal: Legality,
    on_usual: OnUsual | None,
    completed: Mapping[str, KnobValue] | None,
    *,
    plan: bool,
) -> tuple[Space, Predictions, float, Candidate, bool, bool]:
    """Return the space, its predictions, the time that bounds it, the baseline, and `Problem`'s two facts about it."""
    baseline, is_usual = _baseline(platform, legal, on_usual, completed)
    values = baseline.as_dict()
    axes = tuple(replace(axis, extra_values=(values[axis.knob],)) for axis in legal.axes)
    built = partial(build, axes, legal.rules, legal.merges, first=[knob.name for knob in platform.task.knobs])
    first = bounds(platform, axes, None)
    space, known_s = built(first), math.inf
    if is_bounded := NOT_LIKELY in space.illegal:
        known_s = _known_seconds(predict(platform, space))
    rules = bounds(platform, axes, known_s, plan=plan) or first
    space = built(rules) if is_bounded else space
    if not len(space):
        raise NothingFits(_nothing_legal(space, legal))
    columns = candidate_columns(platform, values)
    is_hopeless = any(rule.name in space.illegal and rule.broken(columns).any() for rule in rules)
    is_outside = bool(platform.task.spec.space) and space.find(baseline) is None
    space, adds_baseline = space.with_candidate(baseline), is_outside and not is_hopeless
    return space, predict(platform, space), known_s, baseline, is_usual, adds_baseline


def with_learned(problem: Problem, trials: Sequence[Trial]) -> Problem:
    """Return `problem` with what the engine learns about the task from trials, and with new predictions."""
    task = problem.engine.learned(problem.task, trials)
    if task == problem.task:
        return problem
    platform = replace(problem.platform, task=task)
    return replace(problem, platform=platform, predictions=predict(platform, problem.space))


def candidate_columns(platform: Platform, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Encode the values of engine and plugin knobs as columns with one row. Raises SpecError for an invalid value."""
    task = platform.task
    plugin = plugin_columns(task, values)
    engine_values = {name: value for name, value in values.items() if name not in plugin}
    return {**platform.engine.columns(task.for_engine(), engine_values), **plugin}


def require_launchable(problem: Problem) -> None:
    """Raise SpecError if the space lists a value with an `Effect` that trials cannot use.

    It is also raised if the environment of this process already has a variable that such a knob sets.
    """
    task = problem.task
    for knob in task.knobs:
        key = f"auto_tuner.space.{knob.name}"
        for value, effect in knob.effects.items():
            if effect.passed:
                try:
                    problem.engine.ready(task.for_engine([effect]).spec)
                except SpecError as error:
                    if error.key == f"train.settings.{knob.name}":
                        raise SpecError(key=key, value=value, problem=error.problem, fix=error.fix) from None
        for name in {name for effect in knob.effects.values() for name in effect.environment} & os.environ.keys():
            conflict = f"sets the variable {name}, which is also set in this shell"
            raise SpecError(key=key, value=os.environ[name], problem=conflict, fix=f"unset {name}")
        listed, baseline = task.spec.space.get(knob.name, ()), problem.baseline.as_dict().get(knob.name, knob.neutral)
        for value in (*(() if isinstance(listed, str) else listed), baseline):
            if reason := no_launch_reason(task, knob, value):
                fix = "remove it; `flag estimate` can predict it"
                raise SpecError(key=key, value=value, problem=f"cannot run in a trial: {reason}", fix=fix)


def no_launch_reason(task: Task, knob: Knob, value: KnobValue) -> str:
    """Return why trials of `task` cannot use a value of a knob, or an empty string if they can."""
    effect = knob.effect(value)
    return effect.no_launch_reason(user_command=task.spec.work.starts_itself) if effect else ""


def rows_by_time(problem: Problem) -> IntArray:
    """Return the rows that were not pruned, sorted by predicted time, with ties sorted by predicted memory.

    Last come the candidates without a predicted time, and those of `listed_last`.
    """
    rows = problem.pruned.open_rows
    time = np.nan_to_num(problem.predictions.step_time_s[rows], nan=np.inf)
    last = listed_last(problem)
    return np.asarray(rows[np.lexsort((problem.predictions.device_used_bytes[rows], time, last[rows]))])


LAST = ("", N_("little memory left"), N_("latency limit"), N_("not in the space"), N_("no program starts it"))
"""Why a plan lists a candidate after all others: it has a predicted time, but leaves no margin of memory; it exceeds a
limit; it is a baseline that the space of the spec does not contain, unless the spec gives it and no other is faster; or
nothing starts it (`unusual` is infinite)."""


def listed_last(problem: Problem) -> IntArray:
    """Return the place in LAST of each row. It is 0 for rows that are not listed last."""
    predictions = problem.predictions
    last = 1 * (lacks_margin(problem.task, predictions) & np.isfinite(predictions.step_time_s))
    last[~predictions.keeps_limits(problem.task.spec.work.slo)] = 2
    if problem.adds_baseline:
        row, rows, seconds = problem.row_of(problem.baseline), problem.pruned.open_rows, predictions.step_time_s
        is_first = not last[row] and (seconds[row] <= seconds[rows[last[rows] == 0]]).all()
        last[row] = 0 if is_first and problem.task.spec.baseline is not None else 3
    for knob in problem.task.knobs:
        effects, axis = knob.effects.items(), knob.axis(knob.values)
        if codes := [axis.encode(value) for value, effect in effects if effect.no_launch_reason(user_command=True)]:
            last[np.isin(problem.space.columns()[knob.name], codes)] = 4
    if len(problem.task.cluster.groups) > 1:
        columns = problem.space.columns(np.arange(last.size))
        last[np.isinf(problem.engine.plans.unusual(problem.task, columns, predictions))] = 4
    return last


def recommended(problem: Problem, order: IntArray) -> int:
    """Return the place in `order` (part of `rows_by_time`) of the candidate that a plan recommends.

    It is the fastest, where each unusual property counts as UNUSUAL_SHARE of the time, and the layout of a published
    run near the task as minus one property.
    """
    seconds, last = problem.predictions.step_time_s, listed_last(problem)[order]

    def handicapped(rows: IntArray) -> FloatArray:
        columns = problem.space.columns(rows)
        weights = problem.engine.plans.unusual(problem.task, columns, problem.predictions.take(rows))
        unusual = np.nan_to_num(weights, posinf=0.0)
        return np.asarray(seconds[rows] * (1.0 + UNUSUAL_SHARE * (unusual - _is_published(problem, columns))))

    most = handicapped(order[:1])[0] / (1.0 - UNUSUAL_SHARE)
    near = order[: max(1, int(((last == last[0]) & (seconds[order] <= most)).sum()))]
    return int(np.lexsort((problem.predictions.device_used_bytes[near], handicapped(near)))[0])


UNUSUAL_SHARE = 0.02
"""Chosen by hand, well below the errors of predictions: predicted differences of this size do not decide."""


def recommended_row(problem: Problem) -> int | None:
    """Return the row that a plan recommends, or None if all were pruned."""
    order = rows_by_time(problem)
    return int(order[recommended(problem, order)]) if order.size else None


def _is_published(problem: Problem, columns: Columns) -> BoolArray:
    """Return whether each candidate has the layout, apart from the number of replicas, of a published run near the
    task. On several kinds of chips, none has."""
    task, engine = problem.task, problem.engine
    names = {name for name, knob in problem.knobs.items() if knob.layout} - {engine.replicas}
    axes = [axis for axis in problem.legality.axes if axis.knob in names]
    found = np.zeros(next(iter(columns.values())).size, dtype=np.bool_)
    for job, _record in problem.published if len(task.cluster.groups) == 1 else ():
        if distance(task, job) <= NEAR and job.work.engine == engine.name:
            codes = ((axis.knob, axis.encode(job.candidate.get(axis.knob, axis.neutral))) for axis in axes)
            found |= np.logical_and.reduce([columns[knob] == code for knob, code in codes])
    return found


NEAR = 1.0
"""The largest `distance` of a run whose layout counts. Chosen by hand: within it are runs of the same model in another
precision, or in the same precision of models of up to twice the size or at up to 16 times the scale."""


def lacks_margin(task: Task, predictions: Predictions) -> BoolArray:
    """Return whether each row needs more than PLANNED_SHARE of the memory, so that a plan proposes other rows first.

    Servers reserve a share that a knob sets, and `cluster.memory_per_device` is a budget in which the user has already
    left a margin: for these, no row lacks one.
    """
    has_budget = task.spec.work.reserves_memory or task.spec.cluster.memory_bytes_per_device
    return predictions.share_in_use > (np.inf if has_budget else PLANNED_SHARE)


def _baseline(
    platform: Platform, legal: Legality, on_usual: OnUsual | None, completed: Mapping[str, KnobValue] | None
) -> tuple[Candidate, bool]:
    """Return the baseline of an earlier call or the spec, or else the candidate that an expert would choose without
    measuring.

    Also return whether the spec or the engine's usual space has it.

    This candidate comes from the engine's usual space, or from the whole space if no candidate of the usual space is
    legal or fits. Candidates that do not fit, and then those without a margin of memory, are avoided. If none fits,
    it is the one that needs the least memory.
    """
    task, engine = platform.task, platform.engine
    if completed is not None:  # knobs that are newer than the earlier call have their neutral value
        values = {axis.knob: completed.get(axis.knob, axis.neutral) for axis in legal.axes}
        return _given_baseline(platform, values, legal), True
    if task.spec.baseline is not None:
        return _given_baseline(platform, task.spec.baseline, legal), True
    usual_task = replace(task, spec=replace(task.spec, space=engine.usual_space(task.for_engine())))
    predictions = None
    for searched in (legality(replace(platform, task=usual_task)), legal):
        limits = bounds(platform, legal.axes, None) if searched is legal else ()
        if not len(built := build(searched.axes, searched.rules, searched.merges, limits)):
            continue
        is_first, space, predictions = predictions is None, built, predict(platform, built, rough=on_usual is None)
        if on_usual is not None and is_first:
            on_usual(platform, space, predictions)
        if predictions.fits.any():
            break
    if predictions is None:
        raise NothingFits(_nothing_legal(built, legal))
    smallest = predictions.share_in_use == np.min(predictions.share_in_use)
    choices = (predictions.fits & ~lacks_margin(task, predictions), predictions.fits, smallest)
    rows = next((np.flatnonzero(each) for each in choices if each.any()), np.arange(len(space)))
    row = rows[engine.rule_of_thumb(task, space.columns(rows), predictions.take(rows))]
    return space.candidate(int(row)), is_first


def _given_baseline(platform: Platform, baseline: Mapping[str, KnobValue], legal: Legality) -> Candidate:
    """Return the baseline of the spec as a candidate. Raises SpecError, which names the keys, if it is not legal."""
    task, engine = platform.task, platform.engine
    columns, broken = check(candidate_columns(platform, baseline), legal.rules, legal.merges)
    if broken:
        names = {rule.name for rule in broken}
        for each in platform.value_rules:
            if isinstance(each, RefusedValues) and each.knob == "precision" and each.name in names:
                fix = "set it to the format of your weights, or use other weights or another chip"
                why = f"is not possible: {each.reason}"
                raise SpecError(key=f"{engine.kind}.precision", value=task.spec.work.precision, problem=why, fix=fix)
        names = {name for rule in broken for name in rule.knobs}
        given = {name: value for name, value in baseline.items() if name in names}
        values = ", ".join(f"{name} = {value}" for name, value in given.items())
        problem = f"{values and f'with {values} '}is not legal: {'; '.join(rule.message for rule in broken)}"
        fix = f"remove auto_tuner.baseline, or set its {', '.join(given or sorted(names))} to match"
        raise SpecError(key="auto_tuner.baseline", problem=problem, fix=fix)
    return as_candidate(legal.axes, columns)


def _known_seconds(predictions: Predictions) -> float:
    """Return the step time in seconds of the tenth fastest candidate that fits with a margin, inf if none does.

    With fewer than ten, it is that of the slowest one. Slower candidates cannot be among the first ten of a plan.
    """
    seconds = predictions.step_time_s[predictions.share_in_use <= PLANNED_SHARE]
    return float(np.sort(seconds)[:10][-1]) if seconds.size else np.inf


def _nothing_legal(space: Space, legal: Legality) -> str:
    messages = {rule.name: rule.message for rule in legal.rules}
    removed = reversed(list(space.illegal.items()))  # the last rule removed all combinations that the others had left
    counts = ", ".join(f"{name} {number:,} ({_(messages[name])})" for name, number in removed)
    reason = counts or _("the space is empty")
    return _("no legal candidate among {count:,} combinations: {why}", count=space.combinations, why=reason)


def nearest_runs(
    task: Task, loaded: LoadedPlugins, *, others: bool = False
) -> tuple[tuple[JobRecord, Mapping[str, Any]], ...]:
    """Return the published runs of the same kind on the task's kinds of chips (or on `others`), the nearest first.

    Only runs of jobs with steps can be compared.
    """
    if not (work := task.spec.work).has_steps:
        return ()
    from flagcore.spec.jobs import read_job  # takes long to import

    names = {name for group in task.cluster.groups for name in group.chip.spellings}
    engines, found = plugins.engines(), []
    for record in loaded.published_runs():
        with suppress(FlagError, KeyError):
            chip = record["cluster"]["chip"]
            is_other = normalize_name(chip) not in names
            if is_other != others or record["kind"] != work.kind or (others and not loaded.find_chip(chip)):
                continue
            job = read_job(record, engines)
            found.append((distance(task, job), job, record))
    return tuple((job, record) for _, job, record in sorted(found, key=lambda each: each[0]))


def distance(task: Task, job: JobRecord) -> float:
    """Return how much a published job differs from `task`: in model, devices, and as `Work.distance` returns."""
    model = task.spec.model
    sizes = [math.log2(each.num_layers * each.hidden_size**2) for each in (model, job.model)]
    is_other_kind = (not model.experts) != (not job.model.experts)
    scale = abs(math.log2(task.cluster.devices / job.devices))
    return abs(sizes[0] - sizes[1]) + 2 * is_other_kind + task.spec.work.distance(job.work) + scale / 4
