"""Predictions without trials: candidates of a spec, the gain of mixing chips, and changes that make a candidate fit."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from flagcore.api.candidate_parser import broken_rules_of
from flagcore.api.inputs import SpecLike, about_sections, changed_spec, open_spec
from flagcore.api.jobs import NEAREST, PublishedRuns, detailed_predictions, expected_seconds
from flagcore.contracts import Platform, Problem
from flagcore.domain.engine import ForcedSetting
from flagcore.domain.knob import Knob
from flagcore.domain.metrics import PER_DEVICE
from flagcore.domain.prediction import Predictions, idle_of
from flagcore.domain.records import model_table, prediction_record
from flagcore.domain.space import IntArray, Space, pareto
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.errors import FlagError, NothingFits
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins
from flagcore.report.estimate import ChipPlan, Estimate, Mixing
from flagcore.report.text import DEPTHS, candidate_line, nearest_limit
from flagcore.tuner.effects import effects_of_row
from flagcore.tuner.feasibility import caveat_text, no_time, nothing_fits_text, planned_gain, search_time
from flagcore.tuner.problem import (
    LAST,
    build_problem,
    candidate_columns,
    lacks_margin,
    listed_last,
    no_launch_reason,
    recommended,
    recommended_row,
    rows_by_time,
)
from flagcore.tuner.search_state import SearchState, count
from flagcore.tuner.stages.predict import limit, with_figures


def estimate(
    spec: SpecLike,
    *,
    chip: str | None = None,
    top: int = 10,
    distinct: bool = False,
    objective: str | None = None,
    evidence: bool = False,
    without: Collection[str] = (),
    on_first: Callable[[str], object] | None = None,
    on_page: Callable[[str], object] | None = None,
    start: Callable[[str], str] | None = None,
    plan: bool = True,
    change: Callable[[Spec], Spec] = lambda spec: spec,
) -> Estimate:
    """Predict all candidates of a spec and return the `top` fastest. No trial runs, and no hardware is needed.

    They are in the order of their predicted time or objective, and one of them is `recommended`. With `distinct`, only
    the fastest candidate of each layout is returned, and its `variants` is the number of other candidates with the
    layout. `chip` and `objective` replace the values of the spec. With `evidence`, `published` contains all published
    runs on the chip. `on_first` receives a line with the fastest usual candidate, before the whole space is predicted.
    `on_page` receives the plan as an HTML page, with the command that `start` returns for the `target` of the estimate.
    With `plan` false, the space is that of trials on this machine. `change`: see `open_spec`. Raises `FlagError`.
    """
    if objective is not None:
        spec = changed_spec(spec, {"auto_tuner.objective": objective})
    on_usual = None if on_first is None else partial(_first_line, on_first)
    opened = open_spec(spec, chip, without, plan=plan, on_usual=on_usual, change=change)
    problem, loaded = opened.problem, opened.plugins
    task, order = problem.task, rows_by_time(problem)
    groups, precision = task.cluster.groups, task.spec.work.precision
    if not order.size:
        is_detected = task.spec.cluster.chip == AUTO and not task.spec.cluster.groups  # no change of it helps
        to_fit = None if is_detected or task.spec.work.only_best else partial(cheapest_change, problem, loaded)
        raise NothingFits(nothing_fits_text(problem, to_fit))
    place = recommended(problem, order)
    can_start = not task.spec.work.missing
    row, target = int(order[place]), ""
    if start and can_start:
        from flagcore.api.commands.export import first_target  # takes long to import, and plans as data need none

        target = first_target(opened, problem.space.candidate(row))
    planned_s = float(problem.predictions.step_time_s[row])
    expected_s, expected = expected_seconds(problem, planned_s, loaded)
    untimed = int(np.isnan(problem.predictions.step_time_s[order]).sum())
    candidates = _candidates(problem, order, top, place, distinct=distinct)
    about = about_sections(spec, task.spec.work.step_tokens, expected_s or (planned_s,))
    if expected_s:
        best = next(each for each in candidates["candidates"] if each["recommended"])
        best["expected_s"] = dict(zip(("value", "low", "high"), expected_s, strict=True))
    found = Estimate(
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        counts=count(problem.space, problem.pruned, SearchState()),
        **candidates,
        behind=1.0 - float(problem.predictions.step_time_s[order[0]]) / planned_s,
        gain=planned_gain(problem, row),
        limits=task.spec.work.slo,
        defaults=_engine_defaults(problem),
        expected_s=expected_s,
        expected=" ".join(filter(None, [expected, *about])),
        unmet=caveat_text(problem),
        objective=task.spec.objective,
        model=tuple(model_table(problem.engine.plans.model(task))),
        untimed=untimed,
        no_time=no_time(task, problem.costs) if untimed else "",
        precision=precision,
        published=PublishedRuns(problem, loaded, None if evidence else NEAREST),
        best_mfu=groups[0].chip.best_mfu.get(precision) if len(groups) == 1 else None,
        runs=_runs(problem),
        assumed=_assumed(task),
        notes=plugin_notes(problem.platform),
        unmodelled=tuple(each.name for each in problem.platform.unmodelled),
        search=search_time(problem) if can_start and not problem.engine.plans.only(task.spec) else None,
        mixing=mixing_of(opened.spec, problem, loaded) if len(groups) > 1 else None,
        knobs=problem.knobs,
        labels=problem.engine.plans.labels,
        target=target,
    )
    if on_page is not None:
        from flagcore.api.commands.report import plan_report

        on_page(plan_report(problem, spec, start(target) if start and target else "", found.expected))
    return found


def _first_line(report: Callable[[str], object], platform: Platform, space: Space, predictions: Predictions) -> None:
    """Pass the fastest candidate of the engine's usual space that leaves a margin of memory to `report`, if any."""
    has_margin = predictions.fits & ~lacks_margin(platform.task, predictions)
    seconds = np.where(has_margin & np.isfinite(predictions.step_time_s), predictions.step_time_s, np.inf)
    if seconds.size and np.isfinite(seconds.min()):
        row, knobs = int(seconds.argmin()), {each.name: each for each in platform.engine.knobs}
        found = with_figures(platform.task, predictions.row(row))
        name, candidate = _("fastest of {count} usual layouts, so far", count=len(space)), space.candidate(row)
        report(candidate_line(name, candidate.as_dict(), found, knobs))


def _candidates(problem: Problem, order: IntArray, top: int, plan: int, *, distinct: bool) -> dict[str, Any]:
    """Return the fields of `Estimate` with records of candidates: `baseline`, `crowded` and `candidates`."""
    listed, more = _listed(problem, order, top, plan, distinct=distinct)
    others = [np.array([problem.row_of(problem.baseline)]), _crowded(problem, order)]
    found = iter(_records(problem, np.concatenate((*others, order[listed]))))  # at once, because each call takes long
    baseline, crowded = (next(found) if rows.size else None for rows in others)
    numbered = zip(listed.tolist(), found, more, strict=True)
    candidates = [{"number": place + 1, **each, **counted} for place, each, counted in numbered]
    candidates.sort(key=lambda each: ("last" in each, each.get("step_time_s", {}).get("value", math.inf)))
    return {"baseline": baseline, "crowded": crowded, "candidates": tuple(candidates)}


def _listed(
    problem: Problem, order: IntArray, top: int, plan: int, *, distinct: bool
) -> tuple[IntArray, list[dict[str, Any]]]:
    """Return the first `top` places of `order`, or the first with different layouts, and what their records also have.

    The place `plan` of the recommended candidate replaces the first of its layout, or the last one. `last` is why a
    candidate is listed after all others. For servers, `pareto` is whether no other candidate is predicted to be better
    both in rate per device and in rate per user.
    """
    places, figures = np.arange(order.size), problem.predictions.figures
    variants = np.zeros(order.size, dtype=np.int64)
    if distinct:
        _found, places, layouts, counts = np.unique(_layouts(problem, order), True, True, True)
        places[layouts[plan]], variants = plan, counts[layouts] - 1
        places = np.sort(places)
    places = places[:top] if plan in places[:top] else np.append(places[: top - 1], plan)
    columns = (places.tolist(), variants[places].tolist(), listed_last(problem)[order[places]].tolist())
    more: list[dict[str, Any]] = [
        {"recommended": place == plan}
        | ({"variants": count} if distinct else {})
        | ({"last": LAST[why]} if why else {})
        for place, count, why in zip(*columns, strict=True)
    ]
    if PER_DEVICE in figures and (latency := figures.get("tpot_s.p50")) is not None:
        front = set(pareto(figures[PER_DEVICE][order], -latency[order]).tolist())
        more = [{**each, "pareto": place in front} for place, each in zip(places.tolist(), more, strict=True)]
    return places, more


def _layouts(problem: Problem, rows: IntArray) -> IntArray:
    """Return a number for each row. Rows with equal layouts have equal numbers."""
    names = [name for name, knob in problem.knobs.items() if knob.layout]
    numbers = np.zeros(rows.size, dtype=np.int64)
    for start in range(0, rows.size, LAYOUT_ROWS):
        chunk = slice(start, start + LAYOUT_ROWS)
        columns = problem.space.columns(rows[chunk])
        for name in names:
            numbers[chunk] = numbers[chunk] * LARGEST_SIZE + columns[name]  # an overflow is harmless: this is a hash
    return numbers


LAYOUT_ROWS = 100_000
"""The number of rows that are decoded at a time."""
LARGEST_SIZE = 1_000_003
"""A prime number above the largest size in a layout."""


def _runs(problem: Problem) -> str:
    """Return the name of what would run the trials, the user's command or the engine, and the samples of a step."""
    spec, work = problem.task.spec, problem.task.spec.work
    text = work.runs_as or problem.engine.plans.runs_as(spec) or _("as {engine} runs it", engine=work.engine)
    if samples := work.step_samples:
        tokens = f"{work.step_tokens / samples:,.0f}"
        text = _("{how}; a step has {samples:,} samples of {tokens} tokens", how=text, samples=samples, tokens=tokens)
    return _("{how}; with train.settings", how=text) if work.settings and not work.runs_as else text


def _assumed(task: Task) -> Mapping[str, Any]:
    """Return the implementation, the settings and the depths of multi-token prediction that a plan assumes, if any."""
    work = task.spec.work
    found = {"implementation": task.spec.train.implementation, **work.assumed} if work.assumed else {}
    return {**found, DEPTHS: task.spec.model.mtp_num_layers} if work.untrained_depths is not None else found


def _records(problem: Problem, rows: IntArray) -> list[dict[str, Any]]:
    """Return candidates with their predictions, and with the memory by component on the stage that needs the most.

    `slo`: the predicted figures of a server that exceed their limits, in seconds. `nearest_limit`: the closest's name.
    """
    task, space, limits = problem.task, problem.space, problem.task.spec.work.slo
    records, known = [], problem.predictions.take(rows)  # of one candidate alone, a search for a load may end elsewhere
    for row, found in zip(rows, detailed_predictions(problem.platform, space.columns(rows), known), strict=True):
        candidate = space.candidate(int(row))
        is_assumed = bool(task.spec.work.assumed)
        more: dict[str, Any] = {"assumed": problem.engine.plans.assumed(task, candidate)} if is_assumed else {}
        if limits:
            figures = {name: found.figures.get(name, 0.0) for name in limits}
            more |= {"slo": {name: figure for name, figure in figures.items() if figure > limits[name]}}
            more["nearest_limit"] = nearest_limit(figures, limits)[0]
        records.append({"candidate": candidate.as_dict(), **prediction_record(found), **more})
    return records


def _engine_defaults(problem: Problem) -> dict[str, Any] | None:
    """Return the candidate of the engine's own defaults with its prediction. None if it is the baseline or illegal."""
    values = {**problem.baseline.as_dict(), **problem.engine.plans.defaults(problem.task.for_engine())}
    columns = candidate_columns(problem.platform, values)
    if values == problem.baseline.as_dict() or broken_rules_of(problem, columns):
        return None
    return {"candidate": values, **prediction_record(detailed_predictions(problem.platform, columns)[0])}


def _crowded(problem: Problem, order: IntArray) -> IntArray:
    """Return the row of the fastest candidate without a margin of memory, if it is faster than the first of `order`."""
    seconds, crowded = problem.predictions.step_time_s, order[lacks_margin(problem.task, problem.predictions)[order]]
    return crowded[: int(crowded.size and seconds[crowded[0]] < seconds[order[0]])]


def plugin_notes(platform: Platform) -> tuple[str, ...]:
    """Return the settings that plugins give all candidates, their notes, and the settings that are not predicted."""
    rules = (each for each in platform.value_rules if isinstance(each, ForcedSetting))
    text = N_("{setting} = {value} (rule {name}): {reason}")
    forced = (_(text, setting=e.setting, value=e.value, name=e.name, reason=_(e.reason)) for e in rules)
    not_predicted = map(str, platform.unmodelled)
    return (*filter(None, [platform.precision_reason]), *forced, *map(_, platform.support.notes), *not_predicted)


def knob_record(task: Task, knob: Knob) -> dict[str, Any]:
    """Return a plugin's knob as plain data, with the reason for each value that trials cannot use."""
    not_launched = {value: no_launch_reason(task, knob, value) for value in knob.effects}
    source = knob.source
    return {
        "knob": knob.name,
        "values": list(knob.values),
        "in_space": knob in task.knobs,
        "help": knob.help,
        "claim": knob.claim,
        "effect": f"{_(knob.effect_source.kind)}: {_(knob.effect_source.detail)}" if knob.effect_source else None,
        "needs": [str(each) for each in knob.requires] + [N_("a mixture of experts")] * knob.experts_only,
        "effects": [{"value": value, **asdict(effect)} for value, effect in knob.effects.items()],
        "not_launched": {str(value): reason for value, reason in not_launched.items() if reason},
        "source": f"{_(source.kind)}: {source.detail}" if source else None,
    }


def mixing_of(spec: Spec, problem: Problem, plugins: LoadedPlugins) -> Mixing | None:
    """Compare a mixed cluster with each of its chips alone. Returns None if no mixed plan has a predicted time.

    The way of the recommended candidate comes first, and a way that no program starts last.
    """
    order, titles = rows_by_time(problem), problem.task.cluster.names
    plan, last = int(order[recommended(problem, order)]), listed_last(problem)
    ways = problem.engine.plans.splits(problem.task, problem.space.columns(order))
    rows_of_ways = {name: order[rows] for name, rows in ways.items()} or {"": order}
    best = {name: int(rows[recommended(problem, rows)]) for name, rows in rows_of_ways.items() if rows.size}
    plans = [(row, _plan(problem, row, name, LAST[last[row]])) for name, row in best.items()]
    known_plans = [(row != plan, last[row], found.step_time_s, row, found) for row, found in plans if found]
    if not known_plans:
        return None
    (*_key, row, mixed), *other_plans = sorted(known_plans, key=lambda each: each[:3])
    alone = {title: _alone(spec, problem, group, plugins) for group, title in enumerate(titles)}
    return Mixing(
        mixed=mixed,
        others=tuple(each[-1] for each in other_plans),
        alone=tuple(plan for plan in alone.values() if plan),
        unable=tuple(title for title, plan in alone.items() if plan is None),
        limit=limit(problem.predictions.row(row)),
        kinds=titles,
        **_stages_of_kinds(problem, row),
    )


def _stages_of_kinds(problem: Problem, row: int) -> dict[str, Any]:
    """Return the fields of `Mixing` about the pipelines of a candidate: `idle`, `slowest` and `stages`."""
    columns, titles = problem.space.columns(np.array([row])), problem.task.cluster.names
    task = problem.task.for_engine(effects_of_row(problem.task, columns))
    pipelines = problem.engine.plans.pipelines(task, columns, problem.costs)
    shares = {title: idle_of(pipelines, number) for number, title in enumerate(titles)}
    times = [
        (seconds, titles[group])
        for each in pipelines
        for seconds, group in zip(np.add(each.forward_s, each.backward_s) * each.microbatches, each.groups, strict=True)
    ]
    layers = (zip(each.groups, each.layers, strict=True) for each in pipelines if each.layers)
    return {
        "idle": {title: share for title, share in shares.items() if share is not None},
        "slowest": max(times, default=(0.0, ""))[1],
        "stages": tuple(tuple((titles[group], count) for group, count in pipeline) for pipeline in layers),
    }


def _alone(spec: Spec, mixed: Problem, group: int, plugins: LoadedPlugins) -> ChipPlan | None:
    """Return the fastest plan of one kind of chips, or None if it cannot run the job or has no predicted time."""
    engine, fixed = mixed.engine, {name: values for name, values in spec.space.items() if values != AUTO}
    space = engine.plans.space_alone(mixed.task, group, fixed)
    spec_of_kind = replace(spec, cluster=spec.cluster.groups[group], space=space, baseline=None)
    try:
        problem = build_problem(spec_of_kind, plugins, engine, plan=True)
        return None if (row := recommended_row(problem)) is None else _plan(problem, row)
    except FlagError:
        return None


def _plan(problem: Problem, row: int, split: str = "", last: str = "") -> ChipPlan | None:
    """Return a candidate as a plan, or None if its time is unknown."""
    cluster, train, prediction = problem.task.cluster, problem.task.spec.train, problem.predictions.row(row)
    if (seconds := prediction.step_time_s) is None:
        return None
    tokens = train.step_tokens
    return ChipPlan(
        chips=cluster.chips,
        devices=cluster.devices,
        tokens_per_second=tokens / seconds,
        step_time_s=seconds,
        candidate=problem.space.candidate(row).as_dict(),
        implementation=train.implementation or "local",
        time=prediction.time_s,
        split=split,
        last=last,
        unlimited_tokens_per_second=tokens / float(np.nanmin(problem.predictions.step_time_s)),
    )


DOUBLINGS = 4
"""How many times the number of nodes is doubled."""


def cheapest_change(problem: Problem, plugins: LoadedPlugins) -> str:
    """Return the first change of the spec with which a candidate fits: other knobs, then more devices or nodes.

    If no change helps, returns advice to use another chip, or an empty string if rules and not memory are the reason.
    """
    task, most = problem.task, problem.task.cluster.groups[0].chip.devices_per_node
    is_whole = not task.spec.work.takes_any_flag and all(values == AUTO for values in task.spec.space.values())
    least = float(problem.predictions.share_in_use.min()) if is_whole else 1.0
    for change, spec in _changes_to_fit(problem, most):
        factor = max(1.0, spec.cluster.nodes * (spec.cluster.devices_per_node or most) / task.cluster.devices)
        if factor < least:  # more devices divide the memory by their number at most
            continue
        with suppress(FlagError):
            changed = build_problem(spec, plugins, problem.engine, plan=True)
            least = factor * float(changed.predictions.share_in_use.min()) if factor > 1 else least
            if changed.pruned.open_rows.size:
                candidate = changed.set_knobs(changed.space.candidate(recommended_row(changed) or 0))
                return _("with {change}, this candidate fits: {candidate}", change=change, candidate=candidate)
    if problem.predictions.fits.any():  # rules, and not memory, remove the candidates
        return ""
    nodes = task.cluster.groups[0].nodes << DOUBLINGS
    return _("neither other knobs nor up to {nodes} nodes help: use a chip with more memory", nodes=nodes)


def _changes_to_fit(problem: Problem, most: int) -> Iterator[tuple[str, Spec]]:
    """Yield the description of each change, and the changed spec, the cheapest change first.

    `most` is the number of devices of a whole node. Servers keep the settings of the baseline, but not its layout.
    """
    spec, work, baseline = problem.task.spec, problem.task.spec.work, problem.task.spec.baseline or {}
    widest = replace(spec, space={}, baseline=None)
    if work.takes_any_flag:
        knobs = _knobs_by_name(problem)
        if shares := [name for name, knob in knobs.items() if knob.kind == "share"]:
            others = {name: value for name, value in baseline.items() if name not in shares}
            changed = replace(spec, baseline=others or None, work=work.without_args(shares))
            yield _("{keys} removed", keys=", ".join(shares)), changed
        kept = {name: value for name, value in baseline.items() if name in knobs and not knobs[name].layout}
        widest = replace(widest, baseline=kept or None, work=work.with_default_space())
    if spec.space:
        yield _("all knobs in the space"), widest
    if not spec.cluster.groups:
        yield from _more_devices(widest, most)


def _knobs_by_name(problem: Problem) -> dict[str, Knob]:
    """Return the known knobs of a server's arguments and of its baseline, by the names that these use."""
    spec = problem.task.spec
    knobs = {name: each for each in problem.knobs.values() for name in (*each.names, *(f.name for f in each.flags))}
    arguments = {name: knobs.get(name, knobs.get(name.lstrip("-").replace("_", "-"))) for name in spec.work.engine_args}
    named = arguments | {name: knobs.get(name) for name in spec.baseline or {}}
    return {name: knob for name, knob in named.items() if knob}


def _more_devices(spec: Spec, most: int) -> Iterator[tuple[str, Spec]]:
    """Yield changes to more devices of one node, up to `most`, and then to more nodes, with the changed spec."""
    cluster = spec.cluster
    devices = cluster.devices_per_node or most
    while (devices := 2 * devices) <= most and cluster.nodes == 1:
        changed = replace(spec, cluster=replace(cluster, devices_per_node=devices))
        yield _("cluster.devices_per_node = {devices}", devices=devices), changed
    for doubling in range(1, DOUBLINGS + 1):
        nodes = cluster.nodes << doubling
        yield _("cluster.nodes = {nodes}", nodes=nodes), replace(spec, cluster=replace(cluster, nodes=nodes, hosts=()))
