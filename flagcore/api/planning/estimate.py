"""Predictions without trials: the candidates of a spec, the gain of mixing chips, and the change that helps most."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from flagcore.api.inputs import SpecLike, loaded_plugins, spec_data, with_objective
from flagcore.api.snapshot import build_problem_of_spec, prediction_records, read_spec
from flagcore.contracts import Platform, Problem, Workload
from flagcore.domain.effects import effects_of_row, engine_task
from flagcore.domain.engine import ForcedSetting
from flagcore.domain.knob import Knob
from flagcore.domain.plan import Counts, count
from flagcore.domain.prediction import idle_of
from flagcore.domain.serving import PER_DEVICE, ServeSpec
from flagcore.domain.space import IntArray
from flagcore.domain.spec import AUTO, Spec, Task, pareto
from flagcore.errors import FlagError, NothingFits
from flagcore.i18n import _
from flagcore.plugins import LoadedPlugins
from flagcore.report.estimate import Estimate
from flagcore.report.explanation import part_name
from flagcore.report.formats import lookup, size_text
from flagcore.report.text import serving_load_text
from flagcore.tuner.feasibility import no_time, nothing_fits_text, only_baseline_text, unmet_text
from flagcore.tuner.problem import build_problem, candidate_columns, no_launch_reason, rows_by_time
from flagcore.tuner.stages.limit import search_time
from flagcore.tuner.stages.predict import limit, model_table, record
from flagcore.tuner.stages.rank import learn


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

    With `distinct`, only the fastest candidate of each layout is returned, and its `variants` is the number of other
    candidates with the layout. `chip` and `objective` replace the values of the spec. `data` is the content of the file
    if it was imported. Raises the errors of `flagcore.errors`.
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

    For servers, `pareto` is whether no other candidate is predicted to be better both in rate per device and in rate
    per user.
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
    """Return a number for each row. Rows with equal layouts have equal numbers."""
    names = [name for name, knob in problem.knobs.items() if knob.layout]
    numbers = np.zeros(rows.size, dtype=np.int64)
    for start in range(0, rows.size, LAYOUT_ROWS):
        part = slice(start, start + LAYOUT_ROWS)
        columns = problem.space.columns(rows[part])
        for name in names:
            numbers[part] = numbers[part] * LARGEST_SIZE + columns[name]  # an overflow is harmless: this is a hash
    return numbers


LAYOUT_ROWS = 100_000
"""The number of rows that are decoded at a time."""
LARGEST_SIZE = 1_000_003
"""A prime number above the largest size in a layout."""


def _runs(task: Task) -> str:
    """Return what runs a predicted job: the user's command, the engine, or the trial program."""
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
    """Return the implementation and the settings that a plan assumes, or an empty string if it assumes none."""
    work = task.spec.work
    if isinstance(work, ServeSpec) or not work.assumed:
        return {}
    return {"implementation": work.implementation, **work.assumed}


def before_trials(problem: Problem) -> Counts:
    """Return the counts of all combinations by outcome, before any trial."""
    return count(problem.space, problem.pruned, learn(()))


def _records(problem: Problem, rows: IntArray) -> list[dict[str, Any]]:
    """Return candidates with their predictions, and with the memory of their worst stage by component.

    `slo` contains the predicted figures of a server that exceed their limits, in seconds.
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
    """Return the candidate of the engine's own defaults with its prediction, or None if it is the baseline."""
    values = {**problem.baseline.as_dict(), **problem.workload.defaults(engine_task(problem.task))}
    if values == problem.baseline.as_dict():
        return None
    columns = candidate_columns(problem.platform, values)
    return {"candidate": values, **prediction_records(problem.platform, columns)[0]}


def plugin_notes(platform: Platform) -> tuple[str, ...]:
    """Return the settings that plugins give all candidates, and their notes on engine and chip."""
    rules = (each for each in platform.value_rules if isinstance(each, ForcedSetting))
    forced = (f"{each.setting} = {each.value} (rule {each.name}): {each.reason}" for each in rules)
    return (*filter(None, [platform.precision_reason]), *forced, *platform.support.notes)


def knob_record(task: Task, knob: Knob) -> dict[str, Any]:
    """Return a plugin's knob as plain data.

    `not_launched` contains the reason for each value that trials cannot use.
    """
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


def mixing_of(spec: Spec, problem: Problem, plugins: LoadedPlugins) -> dict[str, Any] | None:
    """Return the fastest plan that mixes kinds of chips, and the fastest plan of each kind alone, as plain data.

    Returns None if no mixed plan has a predicted time.

    - `split`: how the mixed plan divides the work between the kinds.
    - `others`: the fastest plans that divide it in the other ways of the engine.
    - `of_sum`: the throughput relative to the sum over all kinds alone.
    - `of_best_alone`: the throughput relative to the fastest kind alone, `best_alone`.
    - `idle`: the share of the pipeline's time in which the devices of a kind have no work.
    - `limit`: the bottleneck of the mixed plan.
    - `slowest`: the kind with the slowest stage.
    - `layers`: the layers of the plan's stages.
    - `balanced`: the layers and the step time of the derived split, or None if the plan already has that split.
    """
    order, titles = rows_by_time(problem), problem.task.cluster.names
    ways = problem.workload.splits(problem.task, problem.space.columns(order))
    rows_of_ways = {name: order[rows] for name, rows in ways.items()} or {"": order}
    plans = [(name, rows[:1], _plan(problem, rows)) for name, rows in rows_of_ways.items()]
    found = [(plan | {"split": name}, row) for name, row, plan in plans if plan]
    if not found:
        return None
    (mixed, row), *others = sorted(found, key=lambda pair: float(pair[0]["step_time_s"]))
    alone = [plan for group in range(len(titles)) if (plan := _alone(spec, problem, group, plugins))]
    total = sum(each["tokens_per_second"] for each in alone)
    best = max(alone, key=lambda each: float(each["tokens_per_second"]), default=None)
    columns = problem.space.columns(row)
    task = engine_task(problem.task, effects_of_row(problem.task, columns))
    pipelines = problem.workload.pipelines(task, columns, problem.costs)
    shares = {title: idle_of(pipelines, number) for number, title in enumerate(titles)}
    stages = [
        (seconds, titles[group])
        for each in pipelines
        for seconds, group in zip(np.add(each.forward_s, each.backward_s) * each.microbatches, each.groups, strict=True)
    ]
    return {
        "mixed": mixed,
        "others": [plan for plan, _ in others],
        "alone": alone,
        "of_sum": mixed["tokens_per_second"] / total if alone else None,
        "of_best_alone": mixed["tokens_per_second"] / best["tokens_per_second"] if best else None,
        "best_alone": best["chips"] if best else "",
        "idle": {title: share for title, share in shares.items() if share is not None},
        "limit": limit(problem.predictions.row(int(row[0]))),
        "slowest": max(stages, default=(0.0, ""))[1],
        "layers": [count for each in pipelines for count in each.layers],
        "balanced": _balanced(problem, row),
    }


def _balanced(problem: Problem, row: IntArray) -> dict[str, Any] | None:
    """Return the layers and the step time of a candidate with the derived split, or None if it has that split."""
    columns, workload = problem.space.columns(row), problem.workload
    found = workload.with_derived_split(engine_task(problem.task, effects_of_row(problem.task, columns)), columns)
    pipelines = workload.pipelines(*found, problem.costs) if found else ()
    if found is None or len(pipelines) != 1:
        return None
    seconds = float(workload.predict(*found, problem.costs).step_time_s[0])
    return {"layers": list(pipelines[0].layers), "step_time_s": seconds}


def _alone(spec: Spec, mixed: Problem, group: int, plugins: LoadedPlugins) -> dict[str, Any] | None:
    """Return the fastest plan of one kind of chips, or None if it cannot run the job or has no predicted time."""
    workload, fixed = mixed.workload, {name: values for name, values in spec.space.items() if values != AUTO}
    space = {**workload.values_alone(mixed.task, group), **fixed}
    space = {name: values for name, values in space.items() if name not in workload.derived_knobs}
    own = replace(spec, cluster=spec.cluster.groups[group], space=space, baseline=None)
    try:
        problem = build_problem(own, plugins, workload, plan=True)
        return _plan(problem, rows_by_time(problem))
    except FlagError:
        return None


def _plan(problem: Problem, rows: IntArray) -> dict[str, Any] | None:
    """Return the first of `rows` as a plan, or None if there are no rows or its time is unknown."""
    cluster, train = problem.task.cluster, problem.task.spec.train
    for row in rows[:1].tolist():
        if (seconds := problem.predictions.row(row).step_time_s) is not None:
            return {
                "chips": cluster.chips,
                "devices": cluster.devices,
                "tokens_per_second": train.global_batch_size * train.seq_length / seconds,
                "step_time_s": seconds,
                "candidate": problem.space.candidate(row).as_dict(),
                "implementation": train.implementation or "local",
            }
    return None


DOUBLINGS = 4
"""How many times the number of nodes is doubled."""


def cheapest_change(problem: Problem, without: Collection[str]) -> str:
    """Return the first change with which a candidate remains: other knobs, then more devices or nodes.

    Returns an empty string if no change helps and candidates fit into memory, because then rules remove them.
    """
    task = problem.task
    changes = _changes_to_fit(task.spec, task.cluster.groups[0].chip.devices_per_node)
    for change, changed, first in _fastest_of_each(changes, problem.workload, without):
        candidate = changed.set_knobs(changed.space.candidate(first))
        return _("with {change}, this candidate fits: {candidate}", change=change, candidate=candidate)
    if problem.predictions.fits.any():  # rules, and not memory, remove the candidates
        return ""
    nodes = task.cluster.groups[0].nodes << DOUBLINGS
    return _("neither other knobs nor up to {nodes} nodes help: use a chip with more memory", nodes=nodes)


def _fastest_of_each(
    changes: Iterable[tuple[str, Spec]], workload: Workload, without: Collection[str]
) -> Iterator[tuple[str, Problem, int]]:
    """Yield each change that leaves a candidate, with the changed problem and its first row by predicted time."""
    with loaded_plugins(without) as loaded:
        for change, spec in changes:
            try:
                changed = build_problem(spec, loaded, workload, plan=True)
            except FlagError:
                continue
            if changed.pruned.open_rows.size:
                yield change, changed, int(rows_by_time(changed)[0])


def _changes_to_fit(spec: Spec, most: int) -> Iterator[tuple[str, Spec]]:
    """Yield the description of each change, and the changed spec, the cheapest change first.

    `most` is the number of devices of a whole node.
    """
    work = replace(spec.work, default_space=True) if isinstance(spec.work, ServeSpec) else spec.work
    widest = replace(spec, space={}, baseline=None, work=work)
    if spec.space:
        yield _("all knobs in the space"), widest
    if spec.cluster.groups:
        return
    devices = spec.cluster.devices_per_node or most
    while (devices := 2 * devices) <= most and spec.cluster.nodes == 1:
        cluster = replace(spec.cluster, devices_per_node=devices)
        yield _("cluster.devices_per_node = {devices}", devices=devices), replace(widest, cluster=cluster)
    for doubling in range(1, DOUBLINGS + 1):
        nodes = spec.cluster.nodes << doubling
        cluster = replace(spec.cluster, nodes=nodes, hosts=())
        yield _("cluster.nodes = {nodes}", nodes=nodes), replace(widest, cluster=cluster)


USUAL_MFU = (0.38, 0.43)
"""The range of MFU that is reported for a large pretraining job: Llama 3 in bf16, https://arxiv.org/abs/2407.21783,
table 4."""
PRECISIONS = ("bf16", "fp16")
"""The precisions for which that range holds. In fp8, the peak is twice as high, and the MFU is lower."""
FAR_BELOW = 0.5
"""An MFU is reported as far below the range if it is less than this share of the lower end. Chosen by hand."""
LARGE = 1e9
"""The minimum number of parameters for a comparison with that range. Chosen by hand; kernels of smaller models use less
of a device."""
MIN_PART = 0.05
"""The minimum share of a part of a step that is listed."""
MAX_BATCH_DOUBLINGS = 3
"""How many times the global batch size is doubled."""
WORTH = 1.1
"""The minimum factor by which a change must improve the MFU to be named."""


def bottleneck_text(predicted: Mapping[str, Any]) -> str:
    """Return what limits a predicted training step, with its share.

    Returns an empty string without a predicted time.
    """
    name, time = predicted.get("limit"), predicted.get("time") or {}
    memory, total = predicted["memory"], sum(time.values())
    if name == "memory":
        used, capacity = size_text(memory["device_used_gib"]), size_text(memory.get("capacity_gib"))
        return _("Bottleneck: memory, ~{used} of {capacity}.", used=used, capacity=capacity)
    seconds = next((value for part, value in time.items() if part_name(part) == name), None)
    if seconds is None or not total:
        return ""
    return _("Bottleneck: {limit}, ~{share:.0%} of a step.", limit=_(str(name)), share=seconds / total)


def mfu_warning(problem: Problem, without: Collection[str], predicted: Mapping[str, Any], params: float) -> str:
    """Return a warning if the predicted MFU is far below the MFU of large jobs, with the cause and the cheapest change.

    Returns an empty string for servers, small models, other precisions, and if the MFU is unknown.
    """
    spec, mfu = problem.task.spec, predicted.get("mfu")
    if isinstance(spec.work, ServeSpec) or mfu is None or params < LARGE or spec.train.precision not in PRECISIONS:
        return ""
    if mfu >= FAR_BELOW * USUAL_MFU[0]:
        return ""
    low, high = USUAL_MFU
    text = _("MFU ~{mfu:.1%} is far below the {low:.0%} to {high:.0%} of large jobs.", mfu=mfu, low=low, high=high)
    return " ".join(filter(None, [text, _why(predicted), _cheapest_speedup(problem, without, mfu)]))


def _why(predicted: Mapping[str, Any]) -> str:
    """Return a phrase with the largest parts of a step other than compute, or a phrase about slow kernels."""
    time, step = predicted["time"], sum(predicted["time"].values())
    parts = sorted((part for part in time if part != "compute_s"), key=lambda part: -time[part])
    large = [part for part in parts[:3] if time[part] > MIN_PART * step]
    shares = ", ".join(f"{_(part_name(part))} {time[part] / step:.0%}" for part in large)
    compute_mfu = predicted["mfu"] * step / time["compute_s"] if time.get("compute_s") else 0.0
    if shares and compute_mfu >= FAR_BELOW * USUAL_MFU[0]:
        return _("The step has {parts}.", parts=shares)
    kernels = _("Its kernels alone reach {mfu:.1%}: they are small, or limited by memory bandwidth.", mfu=compute_mfu)
    return kernels + (" " + _("The step has {parts}.", parts=shares) if shares else "")


def _cheapest_speedup(problem: Problem, without: Collection[str], mfu: float) -> str:
    for change, changed, first in _fastest_of_each(_changes_of_batch(problem.task.spec), problem.workload, without):
        found: Any = record(changed.task, changed.predictions.row(first))
        if found.get("mfu", 0.0) >= WORTH * mfu:
            return _("Cheapest change: {change}, ~{mfu:.1%}.", change=change, mfu=found["mfu"])
    return ""


def _changes_of_batch(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Yield the description of each change that needs no other hardware, and the changed spec."""
    if spec.space:
        yield _("all knobs in the space"), replace(spec, space={}, baseline=None)
    for doubling in range(1, MAX_BATCH_DOUBLINGS + 1):
        batch = spec.train.global_batch_size << doubling
        yield f"train.global_batch_size = {batch}", replace(spec, work=replace(spec.train, global_batch_size=batch))
