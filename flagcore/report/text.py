"""A plan, a funnel and a list of predictions as text that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.domain.candidate import Candidate
from flagcore.domain.objective import TOKENS_PER_SECOND_PER_DEVICE
from flagcore.domain.objective import told as figure_of
from flagcore.domain.plan import Counts, Plan, failed_repeats, measured_over
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Trial, TrialState
from flagcore.i18n.width import columns, left
from flagcore.report import serving_text
from flagcore.report.formats import finished, in_words, lookup, table

GIB = 2**30
SHORT = {
    "data_parallel_size": "DP",
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "micro_batch_size": "MBS",
    "sequence_parallel": "SP",
    "use_distributed_optimizer": "dist-opt",
    "num_layers_per_virtual_pipeline_stage": "layers/virtual stage",
    "use_recompute": "recompute",
    "recompute_granularity": "granularity",
    "recompute_method": "method",
    "recompute_num_layers": "layers",
}
"""What the field calls the knobs, for tables."""
USUALLY_ON = {"enable_prefix_caching": "prefix caching", "enable_chunked_prefill": "chunked prefill"}
"""Flags that engines set by themselves: told where they are off."""
DEVICES = (
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "instances",
)
"""Knobs that count devices, or groups of them: 1 goes without saying."""
MOST_RIVALS = 5
"""Of the candidates that are not told apart from the best as many are named."""
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def plan_text(plan: Plan) -> str:
    """Return the answer first, then every trial, then where the combinations went."""
    parts = [
        _answer(plan),
        trials_table(plan),
        serving_text.front_table(plan),
        learned_table(plan),
        slow_text(plan),
        "\n".join([funnel(plan.counts, plan.fidelity), *repeats_text(failed_repeats(plan.repeats))]),
    ]
    told = [f"Note: {note}." for note in serving_text.notes(plan)] if serving_text.serves(plan) else []
    return "\n\n".join([*(part for part in parts if part), *told, f"It ended because {plan.stopped_because}."])


def slow_text(plan: Plan) -> str:
    """Return which devices stood out, with the trials that showed it; nothing where none did."""
    lines = []
    for each in (*plan.trials, *plan.repeats):
        lines += [f"trial {each.number}: {line}" for line in (each.measurement.slow if each.measurement else ())]
    told = "A device that holds the others up (they wait for it in every step):"
    return "\n".join([told, *lines]) if lines else ""


def learned_table(plan: Plan) -> str:
    """Return how predictions got better by what trials taught, a line a trial; nothing where nothing was believed."""
    if plan.prediction_error is None:
        return ""
    error = plan.prediction_error
    over = f"{error.trials} trial{'s' if error.trials > 1 else ''}"
    line = f"Over {over} predictions were off by {far(error.before)}, after learning by {far(error.after)}"
    what = serving_text.heading(plan.objective) if serving_text.serves(plan) else "step s"
    headings = ["trial", f"~{what}", "believed", what, "off by", "after learning"]
    rows = []
    for trial in plan.trials:
        ratios = [measured_over(trial, told) for told in ("predicted", "believed")]
        if None in ratios or trial.measurement is None:
            continue
        step = trial.measurement.step_time_s
        seconds = [_told(plan, step / ratio) for ratio in ratios if ratio]
        shares = [f"{ratio - 1:+.1%}" for ratio in ratios if ratio]
        rows.append([str(trial.number), *seconds, _told(plan, step), *shares])
    return f"{line} (medians).\n{table(headings, rows)}"


def _told(plan: Plan, seconds: float) -> str:
    """Return the seconds of a step, or what they mean for the objective of servers."""
    return f"{figure_of(plan.objective, seconds) if serving_text.serves(plan) else seconds:.4g}"


def far(share: float) -> str:
    """Return how far one of two figures is above the other."""
    return f"{share:.1%}" if share < 1.0 else f"a factor of {1.0 + share:.3g}"


def trials_table(plan: Plan) -> str:
    """Return one line a trial: its configuration, measured and predicted (~) figures, and why it failed if it did."""
    trials = [*plan.probes, *plan.trials, *plan.repeats]
    if not trials:
        return "No trial ran."
    base = _step(plan.baseline) if plan.baseline else None
    headings = ["trial", "configuration", "state", "step s", "spread", "~step s", "tok/s/dev", "vs base", "GiB", "~GiB"]
    if serving_text.serves(plan):
        headings = ["trial", "configuration", "state", *serving_text.headings(plan.objective)]
    rows = []
    for trial in trials:
        reference = base if trial.fidelity == plan.fidelity else None
        figures = (
            [state_text(trial), *serving_text.cells(trial, plan.objective, reference)]
            if serving_text.serves(plan)
            else _figures(trial, reference)
        )
        rows.append([_name(plan, trial), candidate_text(trial.candidate), *figures])
    reasons = [f"trial {trial.number}: {trial.reason}" for trial in trials if trial.reason and trial.state.failed]
    return "\n".join([table(headings, rows), *reasons])


def funnel(counts: Counts, fidelity: str = RUN) -> str:
    """Return where every combination went, a line a rule; nothing of trials before the first."""
    rows = [("combinations", counts.combinations)]
    rows += [(f"  illegal: {name}", -number) for name, number in sorted(counts.illegal.items(), key=lambda p: -p[1])]
    rows += [("  the same as another", -counts.merged), ("candidates", counts.candidates)]
    rows += [("  predicted not to fit", -counts.does_not_fit)]
    rows += [(f"  pruned: {name}", -number) for name, number in sorted(counts.pruned.items(), key=lambda p: -p[1])]
    measured = "probed" if fidelity == PROBE else "measured"
    ran = [(measured, counts.measured), ("ended early as surely slower", counts.stopped), ("failed", counts.failed)]
    if any(number for _, number in ran):
        rows += [(f"  {name}", -number) for name, number in ran]
    rows += [("untried", counts.untried)]
    names, figures = in_words([name for name, _ in rows]), [f"{number:,}" for _, number in rows]
    width, longest = max(map(columns, names)), max(map(len, figures))
    lines = [f"{left(name, width)}  {figure:>{longest}}" for name, figure in zip(names, figures, strict=True)]
    return "\n".join(finished(lines))


def repeats_text(lost: Mapping[int, str]) -> list[str]:
    """Return what the books do not tell, for they count candidates: repeats without a measurement."""
    each = ", ".join(f"trial {number} {state}" for number, state in lost.items())
    told = f"Candidates are counted, not their repeats, of which {len(lost)} gave no measurement: {each}."
    return [told] if lost else []


def state_text(trial: Trial) -> str:
    """Return how a trial ended in a word or two."""
    if trial.fidelity == PROBE and trial.state is TrialState.MEASURED:
        return "probed"
    return trial.state.value


def candidate_text(candidate: Candidate) -> str:
    """Return a candidate in one line: sizes of 1 that count devices, flags that are off, and knobs that are not in use
    or left to the engine are left out."""
    return values_text(candidate.as_dict())


def values_text(values: Mapping[str, Any]) -> str:
    """Return knobs and their values in one line, see `candidate_text`."""
    parts: list[str] = []
    for knob, value in values.items():
        if knob == "use_recompute" and value:
            how = [str(values[each]) for each in RECOMPUTE if values.get(each) is not None]
            parts.append(" ".join(["recompute", *how]))
        elif knob in USUALLY_ON:
            parts += [] if value else [f"no {USUALLY_ON[knob]}"]
        elif value is True:
            parts.append(SHORT.get(knob, knob))
        elif value not in (None, False, -1) and knob not in RECOMPUTE and not (value == 1 and knob in DEVICES):
            parts.append(f"{SHORT.get(knob, knob)} {value}")
    return ", ".join(parts) or "the engine's own values"


def candidate_line(name: str, record: Mapping[str, Any]) -> str:
    """Return a candidate with its predicted time and memory in one line."""
    time, memory = lookup(record, "step_time_s.value"), lookup(record, "memory.device_used_gib")
    served_at = lookup(record, "output_tokens_per_s")
    seconds = "time unknown" if time is None else f"~{time:.4g} s a step"
    seconds = f"~{served_at:,.4g} output tokens/s" if served_at is not None else seconds
    fits = ", does not fit" if lookup(record, "memory.fits") is False else ""
    return f"{name}: {values_text(record['candidate'])}: {seconds}, ~{memory:.4g} GiB{fits}"


def candidate_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return headings and keys of the knobs of some records; those that say nothing in all of them are left out."""
    knobs = dict.fromkeys(knob for record in records for knob in record["candidate"])
    values = {knob: [record["candidate"].get(knob) for record in records] for knob in knobs}
    telling = [
        knob for knob, of in values.items() if any(_tells(knob, one) for one in of) or len(set(map(str, of))) > 1
    ]
    return {SHORT.get(knob, knob): f"candidate.{knob}" for knob in telling}


def _tells(knob: str, value: object) -> bool:
    """Return whether a value is more than what an engine does by itself."""
    return value is False if knob in USUALLY_ON else value not in (None, False, -1)


def _answer(plan: Plan) -> str:
    if plan.best is None and plan.fastest is not None:
        return f"No configuration kept {serving_text.limits_text(plan.limits)}."
    if plan.best is None:
        return f"No configuration could be {'probed' if plan.fidelity == PROBE else 'measured'}."
    how = {ESTIMATE: ", as predicted (nothing ran)", PROBE: ", as probed on one device (it never ran)", RUN: ""}
    heading = f"Best on {plan.devices} x {plan.chip}{how[plan.fidelity]}: {candidate_text(plan.best.candidate)}"
    speed = _served_speed(plan) if serving_text.serves(plan) else _speed(plan.best)
    lines, mark = [heading, f"  {speed}", *serving_text.limit_lines(plan)], "" if plan.fidelity == RUN else "~"
    if plan.baseline is None:
        return "\n".join([*lines, *_noise(plan)])
    baseline = candidate_text(plan.baseline.candidate)
    if plan.gain is None:
        fits = lookup(plan.baseline.predicted, "memory.fits") is not False
        state = plan.baseline.state.value if plan.fidelity != ESTIMATE or fits else "predicted not to fit"
        lines.append(f"  no gain can be told: the baseline ({baseline}) is {state}")
    elif plan.best.candidate == plan.baseline.candidate:
        others = (
            "nothing is predicted to be faster" if plan.fidelity == ESTIMATE else "nothing that was tried is faster"
        )
        lines.append(f"  it is the baseline: {others}")
    else:
        gain = (
            serving_text.gain_text(plan.objective, plan.gain)
            if serving_text.serves(plan)
            else f"{plan.gain:+.1%} tokens/s"
        )
        lines.append(f"  {mark}{gain} against the baseline: {baseline}")
    if len(plan.gains) > 1:
        rounds = ", ".join(_share(plan, each) for each in plan.gains)
        proof = "" if min(plan.gains) > 0 else "; the machine was not quiet, and no gain is proved"
        lines.append(f"  (both ran {len(plan.gains)} times: {rounds}; the least is told{proof})")
    return "\n".join([*lines, *_noise(plan)])


def _speed(best: Trial) -> str:
    """Return the figures of the best in one line; `~` marks what is predicted, in whole or in part."""
    measured = best.measurement
    if measured is None:
        keys = ("tokens_per_second_per_device.value", "step_time_s.value", "step_time_s.low", "step_time_s.high")
        speed, step, low, high = (lookup(best.predicted, key) for key in keys)
        used = lookup(best.predicted, "memory.device_used_gib")
        return f"~{speed:,.0f} tokens/s/device, step ~{step:.4g} s (80%: {low:.4g} to {high:.4g} s), ~{used:.3g} GiB"
    speed, step = measured.tokens_per_second_per_device, measured.step_time_s
    if measured.modelled_s is None:
        spread = f"(spread {measured.spread_s:.2g} s over {len(measured.step_times_s)} steps)"
        return f"{speed:,.0f} tokens/s/device, step {step:.4g} s {spread}"
    within = f" (80%: {measured.low_s:.4g} to {measured.high_s:.4g} s)" if measured.low_s and measured.high_s else ""
    parts = f"{step - measured.modelled_s:.4g} s of it measured, ~{measured.modelled_s:.4g} s modelled communication"
    return f"~{speed:,.0f} tokens/s/device, step ~{step:.4g} s{within}: {parts} and waiting"


def _share(plan: Plan, gain: float) -> str:
    return serving_text.gain_text(plan.objective, gain).split()[0] if serving_text.serves(plan) else f"{gain:+.1%}"


def _served_speed(plan: Plan) -> str:
    assert plan.best is not None
    if plan.best.measurement is not None:
        return serving_text.figures_line(plan.best.measurement, plan.objective)
    figure = lookup(plan.best.predicted, "objective")
    low, high = (serving_text.objective_text(plan.objective, figure[each]) for each in ("low", "high"))
    return f"~{serving_text.objective_text(plan.objective, figure['value'])} (80%: {low} to {high})"


def _step(trial: Trial) -> float | None:
    """Return the step time of a trial, as predicted if none was wanted, None if it has none."""
    if trial.state is TrialState.PREDICTED:
        step = lookup(trial.predicted, "step_time_s.value")
        return step if isinstance(step, float) else None
    return trial.measurement.step_time_s if trial.measurement else None


def drift_text(plan: Plan) -> str | None:
    """Return what is to be said of a machine that changed while it was measured, None if it did not."""
    if plan.drift is None or not plan.drifted:
        return None
    how = "faster" if plan.drift > 0 else "slower"
    return (
        f"the machine changed: the baseline's last run was {abs(plan.drift):.1%} {how} than its first, so figures of "
        "trials that ran far apart may differ by as much"
    )


def _noise(plan: Plan) -> list[str]:
    """Return what the repeats showed of the best, its rivals and the machine."""
    assert plan.best is not None
    lines, changed = [], drift_text(plan)
    if (middle := plan.medians.get(plan.best.number)) is not None:
        lines.append(f"  median of its runs: {_middle(plan, middle)}")
    if plan.rivals and plan.best.number in plan.medians:
        told = [f"trial {trial.number} ({candidate_text(trial.candidate)})" for trial in plan.rivals]
        more = [f"and {len(told) - MOST_RIVALS} more"] if len(told) > MOST_RIVALS else []
        lines.append(f"  its runs do not tell it apart from {'; '.join([*told[:MOST_RIVALS], *more])}")
    return [*lines, *([f"  {changed}"] if changed else [])]


def _middle(plan: Plan, seconds: float) -> str:
    """Return the best's objective for the median seconds of its runs."""
    if serving_text.serves(plan):
        return serving_text.objective_text(plan.objective, figure_of(plan.objective, seconds))
    assert plan.best is not None
    return f"{figure_of(TOKENS_PER_SECOND_PER_DEVICE, seconds, plan.best.measurement):,.0f} tokens/s/device"


def _name(plan: Plan, trial: Trial) -> str:
    best = " best" if plan.best is not None and trial.number == plan.best.number else ""
    role = "" if trial.role.value == "search" else f" {trial.role.value}"
    if trial.fidelity != plan.fidelity:
        role = f" {trial.fidelity}"
    return f"{trial.number}{role}{' imported' if trial.source else ''}{best}"


def _figures(trial: Trial, base: float | None) -> list[str]:
    predicted = [lookup(trial.predicted, key) for key in ("step_time_s.value", "memory.device_used_gib")]
    guesses = [f"~{figure:.3g}" if isinstance(figure, float) else "-" for figure in predicted]
    measured = trial.measurement
    if measured is None:
        step, speed = _step(trial), lookup(trial.predicted, "tokens_per_second_per_device.value")
        told = trial.state is TrialState.PREDICTED
        gain = f"~{base / step - 1:+.1%}" if told and base and step else "-"
        tokens = f"~{speed:,.0f}" if told and isinstance(speed, float) else "-"
        return [state_text(trial), "-", "-", guesses[0], tokens, gain, "-", guesses[1]]
    mark = "" if measured.modelled_s is None else "~"
    used = measured.device_used_bytes or measured.peak_reserved_bytes
    compared = trial.state in (TrialState.MEASURED, TrialState.STOPPED)
    return [
        state_text(trial),
        f"{mark}{measured.step_time_s:.4g}",
        f"{measured.spread_s:.2g}",
        guesses[0],
        f"{mark}{measured.tokens_per_second_per_device:,.0f}",
        f"{mark}{base / measured.step_time_s - 1:+.1%}" if base and compared else "-",
        f"{used / GIB:.3g}" if used else "-",
        guesses[1],
    ]
