"""Plans without trials, and explanations of why no candidate fits or has a predicted time.

They are: whether candidates fit and meet the limits, why times are unknown, the time of a search, and a dry run.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from flagcore.contracts import CollectiveCosts, Costs, Problem
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.metrics import HIGHEST_LOAD, gain
from flagcore.domain.plan import Plan, SearchTime, Speedup
from flagcore.domain.prediction import MEMORY_ERROR
from flagcore.domain.space import DOES_NOT_FIT, FloatArray, IntArray
from flagcore.domain.spec import AUTO, PRECISIONS, Task
from flagcore.domain.steps import SLACK, UNKNOWN_SECONDS
from flagcore.domain.trial import ESTIMATE, RUN, Role, Trial, TrialState
from flagcore.errors import NoDevice, NothingFits
from flagcore.i18n import N_, _
from flagcore.tuner.experience import Experience
from flagcore.tuner.problem import recommended, rows_by_time
from flagcore.tuner.search_state import MAX_RIVALS, SearchState, summarize
from flagcore.tuner.stages.predict import with_figures


def require_feasible(problem: Problem) -> None:
    """Raise NothingFits or NoDevice if the search has no candidate to try.

    A run tries a baseline that may fit, although it is predicted not to. Estimates need predicted times, and so do
    probes, because they do not run communication.
    """
    is_run = problem.task.spec.control.fidelity == RUN
    if not is_run or not may_fit(problem):
        require_candidate(problem)
    if not is_run and not np.isfinite(problem.predictions.step_time_s[problem.pruned.open_rows]).any():
        raise NoDevice(_("no time can be predicted: {why}", why=no_time(problem.task, problem.costs)))


def require_candidate(problem: Problem) -> None:
    """Raise NothingFits if no candidate is left, with each rule's count and the nearest to fitting."""
    if not problem.pruned.open_rows.size:
        raise NothingFits(nothing_fits_text(problem))


def nothing_fits_text(problem: Problem, cheapest_change: Callable[[], str] | None = None) -> str:
    """Return one line that explains why no candidate is left.

    The line reports how many candidates each rule removed, which one came closest to fitting, and a change with which
    one fits. `cheapest_change` returns this change; by default, the line advises other hardware.
    """
    space, predictions, pruned = problem.space, problem.predictions, problem.pruned
    counts = ", ".join(f"{name} {int((pruned.rule == place + 1).sum()):,}" for place, name in enumerate(pruned.rules))
    if not (why := unmet_text(problem)):
        rows, why, fix = np.flatnonzero(predictions.fits), "", cheapest_change() if cheapest_change else ""
        if rows.size:
            name = pruned.rules[int(np.bincount(pruned.rule[rows]).argmax()) - 1]
            text = N_("{count:,} candidates fit into memory, but rules remove them, most by {rule}: {message}")
            why = _(text, count=rows.size, rule=name, message=_(problem.messages.get(name, "")))
        else:
            why, fix = _smallest_text(problem, np.arange(len(space))), fix or _other_hardware(problem.task)
            if may_fit(problem):
                text = N_(
                    "`flag tune` tries the baseline, because predicted memory is often wrong by {error:.0%}; {fix}"
                )
                fix = _(text, error=MEMORY_ERROR, fix=fix)
        why += f"; {fix}" if fix else ""
    return _("none of {count:,} candidates is left: {counts}; {why}", count=len(space), counts=counts, why=why)


def only_baseline_text(problem: Problem) -> str:
    """Return a line about the smallest other candidate if only the baseline fits, or an empty string."""
    rows = np.flatnonzero(~problem.predictions.fits)
    if not rows.size or problem.pruned.open_rows.tolist() != [problem.space.find(problem.baseline)]:
        return ""
    text = N_("only the baseline fits in memory, and none of the {count:,} other candidates: {smallest}")
    return _(text, count=rows.size, smallest=_smallest_text(problem, rows))


def may_fit(problem: Problem) -> bool:
    """Return whether the baseline was removed because it exceeds the memory by less than the error of predictions."""
    row = problem.row_of(problem.baseline)
    share = problem.predictions.share_in_use[row]
    return problem.pruned.reason(row) == DOES_NOT_FIT and bool(share <= 1.0 + MEMORY_ERROR)


def crowded_baseline_text(problem: Problem) -> str:
    """If the baseline is predicted not to fit in memory, return a line that says why it is tried. Otherwise, empty."""
    predicted = problem.predictions.row(problem.space.find(problem.baseline) or 0)
    if predicted.fits is not False or predicted.capacity_bytes is None:
        text = N_("no usual candidate is predicted to fit; the baseline is the nearest one that is: {candidate}")
        return "" if problem.usual_baseline else _(text, candidate=problem.set_knobs(problem.baseline))
    return _(
        "the baseline is predicted to need ~{need:.4g} of {have:.4g} GiB per device; it is tried nevertheless, because "
        "it is the reference, and predicted memory is often wrong by {error:.0%}",
        need=predicted.device_used_bytes / 2**30,
        have=predicted.capacity_bytes / 2**30,
        error=MEMORY_ERROR,
    )


def _smallest_text(problem: Problem, rows: IntArray) -> str:
    """Return a line about the candidate in `rows` that needs the smallest share of a device's memory."""
    predictions = problem.predictions
    capacity = 1.0 if predictions.capacity_bytes is None else predictions.capacity_bytes
    row = int(rows[np.argmin(np.nan_to_num(predictions.device_used_bytes / capacity, nan=np.inf)[rows])])
    short = problem.engine.plans.shortage({name: float(each[row]) for name, each in predictions.figures.items()})
    need, have = predictions.device_used_bytes[row] / 2**30, (predictions.row(row).capacity_bytes or 0) / 2**30
    text = N_(
        "the candidate with the lowest memory use needs ~{need:.4g} of {have:.4g} GiB per device ({budget}): "
        "{candidate}"
    )
    if short and need <= 1.001 * have:
        text = N_("the candidate with the lowest memory use does not start: {candidate}")
    text = _(
        text,
        need=need,
        have=have,
        budget=_budget_from(problem.task),
        candidate=str(problem.set_knobs(problem.space.candidate(row))) or _("engine defaults"),
    )
    return f"{text}; {short}" if short else text


def caveat_text(problem: Problem) -> str:
    """Return a line if every candidate exceeds a limit, or if only the baseline fits, or does not. Otherwise, empty."""
    return unmet_text(problem) or only_baseline_text(problem) or crowded_baseline_text(problem)


def unmet_text(problem: Problem) -> str:
    """Return a line about the candidate nearest to the limits; empty if one meets them, or none fits."""
    task, predictions = problem.task, problem.predictions
    limits = {name: limit for name, limit in task.spec.work.slo.items() if name in predictions.figures}
    rows = np.flatnonzero(predictions.fits)
    if not limits or not rows.size or predictions.keeps_limits(limits)[rows].any():
        return ""
    excess = np.max([predictions.figures[name][rows] / limit for name, limit in limits.items()], axis=0)
    row = int(rows[np.argmin(np.nan_to_num(excess, nan=np.inf))])
    figures = {name: float(predictions.figures[name][row]) for name in limits}
    fix = N_("use other hardware, or allow more time")
    if HIGHEST_LOAD not in predictions.figures:
        fix = N_("lower the load (request_rate: auto finds the highest one), use other hardware, or allow more time")
    text = N_("{name} ~{value:.3g} s of {limit:g} s")
    return _(
        "no candidate is predicted to meet the latency limits; the closest has {figures}: {candidate}; {fix}",
        figures=", ".join(_(text, name=name, value=value, limit=limits[name]) for name, value in figures.items()),
        candidate=str(problem.set_knobs(problem.space.candidate(row))) or _("engine defaults"),
        fix=_(fix),
    )


def _budget_from(task: Task) -> str:
    """Return a phrase that names the source of a device's memory budget."""
    group = task.cluster.groups[0]
    if len(task.cluster.groups) > 1:
        return task.cluster.chips
    if task.spec.cluster.memory_bytes_per_device:
        return "cluster.memory_per_device"
    local_memory = _(
        "this machine's memory for each of {count} {chip}", count=group.devices_per_node, chip=group.chip.name
    )
    return local_memory if group.memory_bytes is not None else _("memory of {chip}", chip=group.chip.name)


def _other_hardware(task: Task) -> str:
    """Return advice on other hardware. It names the detected chip if the spec leaves the choice to this machine."""
    if task.spec.cluster.groups or task.spec.cluster.chip != AUTO:
        return _("use more devices or nodes, or a chip with more memory")
    return _(
        "cluster.chip: auto found {chip} here; `flag estimate --chip NAME` plans for other hardware",
        chip=task.cluster.chips,
    )


USUAL_START = 0.1
"""The usual time of a trial's start, relative to its limit: 30 s for training, 120 s for servers. Chosen by hand, for
chips on which no run has stored its starts. After the first trial, the remaining time is estimated from the time that
trials took."""


def search_time(problem: Problem) -> SearchTime:
    """Return the estimated time of a search that tries the candidates with the fastest predictions."""
    task, control, predictions = problem.task, problem.task.spec.control, problem.predictions
    start_seconds, rows = task.spec.work.start_seconds, problem.pruned.open_rows
    rows = np.unique(np.append(rows, problem.row_of(problem.baseline)), True)[0]  # np.union1d imports numpy.ma
    if rows.size > control.max_trials:
        step = np.nan_to_num(predictions.step_time_s[rows], nan=np.inf)
        rows = rows[np.argpartition(step, control.max_trials)[: control.max_trials]]
    max_step = control.max_step_time or math.inf
    # if steps are shortened, the best candidates run again with whole steps
    is_shortened = bool((predictions.step_time_s[rows] > max_step).any())
    rounds = control.repeats if rows.size > 1 else 0
    repeats = max(rounds, int(is_shortened)) * min(2 + MAX_RIVALS, int(rows.size))

    def seconds_of_all(seconds: FloatArray) -> float:
        trial_seconds = float(np.minimum(seconds, steps * max_step).sum())  # longer steps are shortened
        return trial_seconds + repeats * float(np.max(seconds, initial=0.0))

    has_steps, steps = task.spec.work.has_steps, control.train_iters
    expected = steps * predictions.step_time_s if has_steps else problem.engine.plans.load_seconds(task, predictions)
    predicted, high = (seconds_of_all(column[rows]) for column in (expected, steps * predictions.high_s))
    is_unknown = has_steps and not math.isfinite(high)
    steps_limit = SLACK * high if has_steps and not is_unknown and control.max_time_per_task is None else 0.0
    trial_limit = control.max_time_per_task or (UNKNOWN_SECONDS if is_unknown else start_seconds)
    usual_s = Experience.of_user().start_s(task.cluster.groups[0].chip, problem.engine.name)
    at_most = (rows.size + repeats) * trial_limit + steps_limit
    return SearchTime(
        trials=int(rows.size),
        repeats=repeats,
        measuring_s=predicted if math.isfinite(predicted) else None,
        starting_s=(rows.size + repeats) * (USUAL_START * start_seconds if usual_s is None else usual_s),
        starts_guessed=usual_s is None,
        at_most_s=min(at_most, control.max_time or math.inf),
    )


def dry_run(problem: Problem) -> Plan:
    """Return a plan without trials: predictions of the baseline and the `max_trials` fastest; best: recommended."""
    task, row = problem.task, problem.space.find(problem.baseline)
    assert row is not None, "the baseline is in the space"
    order = [int(each) for each in rows_by_time(problem)]
    plan_row = order[recommended(problem, np.array(order))]
    rows = dict.fromkeys([row, *order[: task.spec.control.max_trials], plan_row])
    trials = [
        Trial(
            number=number,
            candidate=problem.space.candidate(each),
            role=Role.SEARCH if number else Role.BASELINE,
            state=TrialState.PREDICTED,
            predicted=with_figures(task, problem.predictions.row(each)),
            fidelity=ESTIMATE,
        )
        for number, each in enumerate(rows)
    ]
    planned = planned_gain(problem, plan_row)
    speedup = None if planned is None else Speedup.of(planned, (planned,), is_significant=False)
    stopped_because = N_("fidelity = estimate runs no trials")
    plan = summarize(task, problem.space, problem.pruned, SearchState(), stopped_because, problem.knobs)
    return replace(
        plan, trials=tuple(trials), baseline=trials[0], best=trials[list(rows).index(plan_row)], speedup=speedup
    )


def planned_gain(problem: Problem, row: int) -> float | None:
    """Return the predicted gain of the one in `row` over the baseline. None if unknown or if that does not fit."""
    best, base = (problem.predictions.row(each) for each in (row, problem.row_of(problem.baseline)))
    best_s, base_s = best.step_time_s, base.step_time_s
    if not best_s or not base_s or base.fits is False:
        return None
    return gain(problem.task.spec.objective, base_s, best_s, base.figures, best.figures)


CALIBRATE = "`flag calibrate` measures it on such a device"


def no_time(task: Task, costs: Costs) -> str:
    """Return why no time can be predicted for a task: which rates are unknown, and how to provide them."""
    precision, unlisted, by_fix = task.spec.work.precision, list[str](), dict[str, list[str]]()
    for group, group_costs in zip(task.cluster.groups, costs.groups, strict=False):
        size, gemm_seconds = np.array([1024.0]), group_costs.kernels.gemm_seconds
        known_precisions = [each for each in PRECISIONS if not np.isnan(gemm_seconds(size, size, size, each)).any()]
        if known_precisions and precision not in known_precisions:
            unlisted.append(_other_precision(group, known_precisions, precision))
        for rate, fix in _unknown_rates(group, group_costs, bool(known_precisions), precision):
            by_fix.setdefault(fix, []).append(rate)
    if costs.between is not None and _is_unknown(costs.between, "send", 2, 1):
        fix = "give nic_bytes_per_second in each of cluster.groups"
        by_fix.setdefault(fix, []).append("the network between node groups")
    if not by_fix and not unlisted:
        of_host = ("trials measure it", "the host's speed for layers that are not on a device")
        fix, rate = (CALIBRATE, "a rate of the device") if task.spec.work.has_steps else of_host
        by_fix[fix] = [rate]
    rates_text = ", ".join(f"{' and '.join(rates)} ({fix})" for fix, rates in by_fix.items())
    chips = {group.chip.name: group for group in task.cluster.groups}
    unlimited = [
        f"the memory of {name} is unknown, so all candidates are assumed to fit (give cluster.memory_per_device)"
        for name, group in chips.items()
        if group.memory_bytes is None and group.chip.memory_bytes is None
    ]
    return "; ".join([*dict.fromkeys(unlisted), *([f"unknown: {rates_text}"] if rates_text else []), *unlimited])


def _other_precision(group: NodeGroup, precisions: list[str], precision: str) -> str:
    """Return a message that names the precisions of a chip for which times can be predicted."""
    *others, last = [each for each in precisions if each in group.chip.dense_flops_per_second] or precisions
    usable = f"{', '.join(others)} or {last}" if others else last
    return f"{group.chip.name} lists no rate in {precision} (use train.precision {usable})"


def _unknown_rates(group: NodeGroup, costs: Costs, has_peak: bool, precision: str) -> Iterator[tuple[str, str]]:
    """Yield a group's unknown rates, and how to give each. `has_peak`: a peak of any precision is known."""
    chip = group.chip.name
    if not has_peak:
        yield f"the peak rate of {chip} in {precision}", CALIBRATE
    if np.isnan(costs.kernels.memory_seconds(np.array([1024.0]))).any():
        yield f"the memory bandwidth of {chip}", CALIBRATE
    if _is_unknown(costs.collectives, "all_reduce", group.devices_per_node, 1):
        yield f"the link between the {group.devices_per_node} devices of a node of {chip}", CALIBRATE
    if _is_unknown(costs.collectives, "all_reduce", group.nodes, group.devices_per_node):
        yield f"the network between nodes of {chip}", "give cluster.nic_bytes_per_second"


def _is_unknown(costs: CollectiveCosts, kind: str, ranks: int, stride: int) -> bool:
    seconds = costs.seconds(kind, np.array([2.0**20]), np.array([ranks]), np.array([stride]))
    return ranks > 1 and bool(np.isnan(seconds).any())
