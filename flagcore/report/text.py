"""A plan, a funnel and a list of predictions as text that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.plan import Counts, Plan
from flagcore.domain.trial import Trial
from flagcore.report.formats import shown, table

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


def plan_text(plan: Plan) -> str:
    """Return the answer first, then every trial, then where the combinations went."""
    parts = [_answer(plan), trials_table(plan), funnel(plan.counts), f"Ended because {plan.stopped_because}."]
    return "\n\n".join(parts)


def trials_table(plan: Plan) -> str:
    """Return one line a trial: what differs between the candidates, measured and predicted (~) figures."""
    trials = [*plan.trials, *plan.repeats]
    if not trials:
        return "No trial ran."
    differing, common = _split([trial.candidate for trial in trials])
    base = plan.baseline.measurement.step_time_s if plan.baseline and plan.baseline.measurement else None
    headings = ["trial", *(_short(knob) for knob in differing), "state", "step s", "spread", "~step s", "tok/s/dev"]
    headings += ["vs base", "GiB", "~GiB", "note"]
    rows = [[*_mark(plan, trial), *_cells(trial, differing), *_figures(trial, base)] for trial in trials]
    lines = [table(headings, rows)]
    if common:
        lines.append("In all trials: " + ", ".join(f"{_short(knob)} {shown(value)}" for knob, value in common.items()))
    return "\n".join(lines)


def funnel(counts: Counts) -> str:
    """Return where every combination went, a line a rule."""
    rows = [("combinations", counts.combinations)]
    rows += [(f"  illegal: {name}", -number) for name, number in sorted(counts.illegal.items(), key=lambda p: -p[1])]
    rows += [("  the same as another", -counts.merged), ("candidates", counts.candidates)]
    rows += [("  predicted not to fit", -counts.does_not_fit)]
    rows += [(f"  pruned: {name}", -number) for name, number in sorted(counts.pruned.items(), key=lambda p: -p[1])]
    rows += [("  measured", -counts.measured), ("  ended early as surely slower", -counts.stopped)]
    rows += [("  failed", -counts.failed), ("untried", counts.untried)]
    width = max(len(name) for name, _ in rows)
    figures = [f"{number:,}" for _, number in rows]
    longest = max(len(figure) for figure in figures)
    return "\n".join(f"{name:<{width}}  {figure:>{longest}}" for (name, _), figure in zip(rows, figures, strict=True))


def candidate_text(candidate: Candidate) -> str:
    """Return a candidate in one line: what is neutral is left out."""
    items = [(knob, value) for knob, value in candidate.items if value not in (None, False)]
    return ", ".join(_short(knob) if value is True else f"{_short(knob)} {value}" for knob, value in items)


def candidate_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return headings and keys of the knobs of some records; those that say nothing in all of them are left out."""
    knobs = dict.fromkeys(knob for record in records for knob in record["candidate"])
    shown_ones = [
        knob for knob in knobs if any(record["candidate"].get(knob) not in (None, False) for record in records)
    ]
    return {_short(knob): f"candidate.{knob}" for knob in shown_ones}


def _answer(plan: Plan) -> str:
    if plan.best is None or plan.best.measurement is None:
        return "No configuration could be measured."
    best = plan.best.measurement
    lines = [
        f"Best on {plan.devices} x {plan.chip}: {candidate_text(plan.best.candidate)}",
        f"  {best.tokens_per_second_per_device:,.0f} tokens/s/device, step {best.step_time_s:.4g} s "
        f"(spread {best.spread_s:.2g} s over {len(best.step_times_s)} steps)",
    ]
    if plan.gain is not None and plan.baseline:
        lines.append(f"  {plan.gain:+.1%} tokens/s against the baseline: {candidate_text(plan.baseline.candidate)}")
        if len(plan.gains) > 1:
            rounds = ", ".join(f"{each:+.1%}" for each in plan.gains)
            lines.append(f"  (the least of {len(plan.gains)} rounds of both: {rounds})")
    return "\n".join(lines)


def _split(candidates: Sequence[Candidate]) -> tuple[list[str], dict[str, KnobValue]]:
    """Return the knobs in which candidates differ, and the common value of the others."""
    first = candidates[0].as_dict()
    same = {knob: all(c.as_dict().get(knob) == value for c in candidates) for knob, value in first.items()}
    return [k for k in first if not same[k]], {k: v for k, v in first.items() if same[k] and v not in (None, False)}


def _mark(plan: Plan, trial: Trial) -> list[str]:
    best = plan.best is not None and trial.number == plan.best.number
    role = "" if trial.role.value == "search" else f" {trial.role.value}"
    return [f"{trial.number}{role}{' best' if best else ''}"]


def _cells(trial: Trial, knobs: Sequence[str]) -> list[str]:
    values: Mapping[str, Any] = trial.candidate.as_dict()
    return [shown(values.get(knob)) for knob in knobs]


def _figures(trial: Trial, base: float | None) -> list[str]:
    measured, predicted = trial.measurement, trial.predicted
    seconds = _deep(predicted, "step_time_s", "value")
    memory = _deep(predicted, "memory", "device_used_gib")
    guess = [f"~{seconds:.4g}" if seconds else "-"], [f"~{memory:.3g}" if memory else "-", (trial.reason or "")[:70]]
    if measured is None:
        return [trial.state.value, "-", "-", *guess[0], "-", "-", "-", *guess[1]]
    used = measured.device_used_bytes or measured.peak_reserved_bytes
    return [
        trial.state.value,
        f"{measured.step_time_s:.4g}",
        f"{measured.spread_s:.2g}",
        *guess[0],
        f"{measured.tokens_per_second_per_device:,.0f}",
        f"{base / measured.step_time_s - 1:+.1%}" if base else "-",
        f"{used / GIB:.3g}" if used else "-",
        *guess[1],
    ]


def _deep(data: Mapping[str, Any], *keys: str) -> float | None:
    found: Any = data
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, (int, float)) else None


def _short(knob: str) -> str:
    return SHORT.get(knob, knob)
