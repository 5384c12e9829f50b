"""A plan, a funnel and a list of predictions as text that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.domain.candidate import Candidate
from flagcore.domain.plan import Counts, Plan
from flagcore.domain.trial import Trial, TrialState
from flagcore.report.formats import lookup, table

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
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def plan_text(plan: Plan) -> str:
    """Return the answer first, then every trial, then where the combinations went."""
    parts = [_answer(plan), trials_table(plan), funnel(plan.counts), f"It ended because {plan.stopped_because}."]
    return "\n\n".join(parts)


def trials_table(plan: Plan) -> str:
    """Return one line a trial: its configuration, measured and predicted (~) figures, and why it failed if it did."""
    trials = [*plan.trials, *plan.repeats]
    if not trials:
        return "No trial ran."
    base = plan.baseline.measurement.step_time_s if plan.baseline and plan.baseline.measurement else None
    headings = ["trial", "configuration", "state", "step s", "spread", "~step s", "tok/s/dev", "vs base", "GiB", "~GiB"]
    rows = [[_name(plan, trial), candidate_text(trial.candidate), *_figures(trial, base)] for trial in trials]
    reasons = [f"trial {trial.number}: {trial.reason}" for trial in trials if trial.reason and trial.state.failed]
    return "\n".join([table(headings, rows), *reasons])


def funnel(counts: Counts) -> str:
    """Return where every combination went, a line a rule; nothing of trials before the first."""
    rows = [("combinations", counts.combinations)]
    rows += [(f"  illegal: {name}", -number) for name, number in sorted(counts.illegal.items(), key=lambda p: -p[1])]
    rows += [("  the same as another", -counts.merged), ("candidates", counts.candidates)]
    rows += [("  predicted not to fit", -counts.does_not_fit)]
    rows += [(f"  pruned: {name}", -number) for name, number in sorted(counts.pruned.items(), key=lambda p: -p[1])]
    ran = [("measured", counts.measured), ("ended early as surely slower", counts.stopped), ("failed", counts.failed)]
    if any(number for _, number in ran):
        rows += [(f"  {name}", -number) for name, number in ran]
    rows += [("untried", counts.untried)]
    width = max(len(name) for name, _ in rows)
    figures = [f"{number:,}" for _, number in rows]
    longest = max(len(figure) for figure in figures)
    return "\n".join(f"{name:<{width}}  {figure:>{longest}}" for (name, _), figure in zip(rows, figures, strict=True))


def candidate_text(candidate: Candidate) -> str:
    """Return a candidate in one line: parallel sizes of 1, flags that are off and knobs not in use are left out."""
    return values_text(candidate.as_dict())


def values_text(values: Mapping[str, Any]) -> str:
    """Return knobs and their values in one line, see `candidate_text`."""
    parts: list[str] = []
    for knob, value in values.items():
        if knob == "use_recompute" and value:
            how = [str(values[each]) for each in RECOMPUTE if values.get(each) is not None]
            parts.append(" ".join(["recompute", *how]))
        elif value is True:
            parts.append(SHORT.get(knob, knob))
        elif value not in (None, False) and knob not in RECOMPUTE and not (value == 1 and "parallel" in knob):
            parts.append(f"{SHORT.get(knob, knob)} {value}")
    return ", ".join(parts)


def candidate_line(name: str, record: Mapping[str, Any]) -> str:
    """Return a candidate with its predicted time and memory in one line."""
    time, memory = lookup(record, "step_time_s.value"), lookup(record, "memory.device_used_gib")
    seconds = "time unknown" if time is None else f"~{time:.4g} s a step"
    fits = ", does not fit" if lookup(record, "memory.fits") is False else ""
    return f"{name}: {values_text(record['candidate'])}: {seconds}, ~{memory:.4g} GiB{fits}"


def candidate_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return headings and keys of the knobs of some records; those that say nothing in all of them are left out."""
    knobs = dict.fromkeys(knob for record in records for knob in record["candidate"])
    telling = [knob for knob in knobs if any(record["candidate"].get(knob) not in (None, False) for record in records)]
    return {SHORT.get(knob, knob): f"candidate.{knob}" for knob in telling}


def _answer(plan: Plan) -> str:
    if plan.best is None or plan.best.measurement is None:
        return "No configuration could be measured."
    best = plan.best.measurement
    lines = [
        f"Best on {plan.devices} x {plan.chip}: {candidate_text(plan.best.candidate)}",
        f"  {best.tokens_per_second_per_device:,.0f} tokens/s/device, step {best.step_time_s:.4g} s "
        f"(spread {best.spread_s:.2g} s over {len(best.step_times_s)} steps)",
    ]
    if plan.baseline is None:
        return "\n".join(lines)
    baseline = candidate_text(plan.baseline.candidate)
    if plan.gain is None:
        lines.append(f"  no gain can be told: the baseline ({baseline}) is {plan.baseline.state.value}")
    elif plan.best.candidate == plan.baseline.candidate:
        lines.append("  it is the baseline: nothing that was tried is faster")
    else:
        lines.append(f"  {plan.gain:+.1%} tokens/s against the baseline: {baseline}")
    if len(plan.gains) > 1:
        rounds = ", ".join(f"{each:+.1%}" for each in plan.gains)
        proof = "" if min(plan.gains) > 0 else "; the machine was not quiet, and no gain is proved"
        lines.append(f"  (both ran {len(plan.gains)} times: {rounds}; the least is told{proof})")
    return "\n".join(lines)


def _name(plan: Plan, trial: Trial) -> str:
    best = " best" if plan.best is not None and trial.number == plan.best.number else ""
    role = "" if trial.role.value == "search" else f" {trial.role.value}"
    return f"{trial.number}{role}{best}"


def _figures(trial: Trial, base: float | None) -> list[str]:
    predicted = [lookup(trial.predicted, key) for key in ("step_time_s.value", "memory.device_used_gib")]
    guesses = [f"~{figure:.3g}" if isinstance(figure, float) else "-" for figure in predicted]
    measured = trial.measurement
    if measured is None:
        return [trial.state.value, "-", "-", guesses[0], "-", "-", "-", guesses[1]]
    used = measured.device_used_bytes or measured.peak_reserved_bytes
    compared = trial.state in (TrialState.MEASURED, TrialState.STOPPED)
    return [
        trial.state.value,
        f"{measured.step_time_s:.4g}",
        f"{measured.spread_s:.2g}",
        guesses[0],
        f"{measured.tokens_per_second_per_device:,.0f}",
        f"{base / measured.step_time_s - 1:+.1%}" if base and compared else "-",
        f"{used / GIB:.3g}" if used else "-",
        guesses[1],
    ]
