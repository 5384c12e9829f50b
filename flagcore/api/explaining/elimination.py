"""States of combinations and of single candidates, with reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flagcore.api.common.candidate_parser import as_candidate, values_of
from flagcore.api.common.context import Snapshot, load_snapshot
from flagcore.api.common.inputs import SpecLike
from flagcore.api.common.runs import RESULT, Run, unreadable_error
from flagcore.api.explaining.neighbors import differing
from flagcore.api.planning.estimate import before_trials, knob_record, plugin_notes
from flagcore.domain.candidate import Candidate
from flagcore.domain.plan import Counts, count, failed_repeats
from flagcore.domain.search_state import DOES_NOT_FIT, rivals
from flagcore.domain.space import Columns
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Role, Trial, TrialState
from flagcore.errors import NothingFits
from flagcore.feasibility import require_candidate
from flagcore.i18n import N_, _
from flagcore.problem import Problem, rows_by_time
from flagcore.report.candidate_report import differs_text, seconds_text
from flagcore.report.explanation import needs_text
from flagcore.report.formats import Notebook
from flagcore.report.formats import shown as figure_text
from flagcore.report.text import funnel, repeats_text, role_text, scaled_text, state_name, stop_reason
from flagcore.stages.prune import needed_share

ILLEGAL, OUTSIDE, REMOVED = N_("illegal"), N_("not in the space"), N_("removed")
RAN, OPEN = N_("ran"), N_("open")
"""States of a candidate: a rule of the engine forbids it; the spec does not list it; a rule removed it; it ran; it may
be tried."""
LEGAL = {
    True: N_("it would be legal, and fit"),
    False: N_("it would be legal, but not fit"),
    None: N_("it would be legal; whether it would fit is unknown"),
}
"""Text for a candidate outside the space, by whether it is predicted to fit."""


def broken_rules_of(problem: Problem, columns: Columns) -> list[Mapping[str, Any]]:
    """Return the rules that one candidate breaks as plain data, each with the values that it looked at."""
    values = as_candidate(problem.space.axes, columns).as_dict()
    return [
        {"rule": rule.name, "says": rule.message, "values": {knob: values.get(knob) for knob in rule.knobs}}
        for rule in problem.legality.rules
        if bool(rule.broken(columns).any())
    ]


def all_trials(snapshot: Snapshot) -> Sequence[Trial]:
    """Return every trial of a run, repeats, probes and imported ones too, in order; none of a spec."""
    run = snapshot.run
    several = () if run is None else (*run.imported, *run.probes, *run.trials, *run.repeats)
    by_number = {trial.number: trial for trial in several}
    return [by_number[number] for number in sorted(by_number)]


def state_of(
    snapshot: Snapshot,
    candidate: Candidate,
    row: int | None,
    tried: Sequence[Trial],
    broken: Sequence[Mapping[str, Any]],
    predicted: Mapping[str, Any] | None,
) -> tuple[str, list[str], list[Mapping[str, Any]]]:
    """Return the state of a candidate, the reasons, and the pruning rules behind it."""
    if broken:
        lines = []
        for rule in broken:
            values = ", ".join(f"{knob} = {value}" for knob, value in rule["values"].items())
            lines.append(f"{rule['rule']}: {rule['says']}" + (f" ({values})" if values else ""))
        return ILLEGAL, [*lines, *_outside(snapshot, candidate)], []
    if row is None:
        unlisted = [_("not in the space: no combination of the values of the spec gives it")]
        legal = _(LEGAL[(predicted or {"memory": {}})["memory"].get("fits")])
        return OUTSIDE, [*(_outside(snapshot, candidate) or unlisted), legal, *_needs(predicted)], []
    pruned_by = _pruning_rule(snapshot, row)
    wanted = RUN if snapshot.run is None else snapshot.run.fidelity
    if any(trial.fidelity == wanted and trial.role is not Role.IMPORTED for trial in tried):
        return (
            RAN,
            [
                *(_termination_reason(snapshot, trial) for trial in tried),
                *_of_all_runs(snapshot, candidate),
                *_why_best(snapshot, candidate),
            ],
            pruned_by,
        )
    probed = [_termination_reason(snapshot, trial) for trial in tried if trial.fidelity != ESTIMATE]
    if pruned_by:
        return REMOVED, [*probed, *(_reason_removed(snapshot, each, row, predicted) for each in pruned_by)], pruned_by
    return OPEN, [*probed, *_reasons_open(snapshot, row)], []


def _outside(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    values = candidate.as_dict()
    return [
        _("not in the space: {knob} = {value}; {values}", knob=axis.knob, value=value, values=values_of(axis))
        for axis in snapshot.problem.space.axes
        if (value := values[axis.knob]) not in (*axis.values, axis.neutral, *axis.extra_values)
    ]


def _termination_reason(snapshot: Snapshot, trial: Trial) -> str:
    """Return how a trial ended: its measurement compared with the best, or why there is none."""
    what = _("probe") if trial.fidelity == PROBE else _("trial")
    role = "imported" if trial.source else trial.role.value
    line = f"{what} {trial.number} ({role_text(role)}) {state_name(trial.state.value)}"
    best, measured = snapshot.search_state.best, trial.measurement
    if measured is None or trial.state.failed:
        return line + (f": {trial.reason}" if trial.reason else "")
    line += f": {seconds_text(snapshot.task.spec.objective, measured.step_time_s)}"
    if measured.scaled_from is not None and trial.shortened:
        bounds = {"low": figure_text(measured.low_s), "high": figure_text(measured.high_s)}
        line += f", {scaled_text(measured.scaled_from, trial.shortened.nodes, trial.shortened.of_nodes)} " + _(
            "({part} of {whole} samples; 80%: {low} to {high} s)",
            part=trial.shortened.global_batch_size,
            whole=trial.shortened.whole,
            **bounds,
        )
    if trial.role is Role.IMPORTED:
        return line + ", " + _("on another machine ({source})", source=trial.source)
    if measured.broken:
        line += "; " + _("over a limit: {limits}", limits=", ".join(measured.broken))
    if best is not None and best.candidate != trial.candidate:
        step, value = _best_step(snapshot, best)
        share, shown = measured.step_time_s / step - 1.0, f"{_('trial')} {best.number}: {value}"
        line += ", " + _("{share:+.1%} in time vs the best ({trial})", share=share, trial=shown)
    elif best is not None and len(snapshot.search_state.runs_of(best.candidate)) == 1:
        line += "; " + _("it is the best")
    if not trial.reason:
        return line
    stopped = trial.state is TrialState.STOPPED
    return line + "; " + (_("stopped early: {reason}", reason=trial.reason) if stopped else trial.reason)


def _best_step(snapshot: Snapshot, best: Trial) -> tuple[float, str]:
    """Return the seconds of a step of the best, and their text: the median if it ran more than once."""
    runs = len(snapshot.search_state.runs_of(best.candidate))
    step = 1.0 / snapshot.search_state.speed_of(best.candidate)
    text = seconds_text(snapshot.task.spec.objective, step)
    return step, text if runs == 1 else text + ", " + _("median of {count} runs", count=runs)


def _of_all_runs(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    """Return the median of several runs of a candidate and, if the best ran again too, whether it may be as fast."""
    state = snapshot.search_state
    runs, best, lines = state.runs_of(candidate), state.best, []
    if len(runs) > 1:
        seconds = seconds_text(snapshot.task.spec.objective, 1.0 / state.speed_of(candidate))
        line = _("the median of its {count} runs: {value}", count=len(runs), value=seconds)
        is_best = best is not None and best.candidate == candidate
        lines.append(line + ("; " + _("it is the best") if is_best else ""))
    repeated = best is not None and len(state.runs_of(best.candidate)) > 1
    if repeated and any(trial.candidate == candidate for trial in rivals(state)):
        lines.append(_("not significantly slower than the best"))
    return lines


def _why_best(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    """Return how the best compares to the second of those that keep the limits, and to the baseline."""
    state = snapshot.search_state
    measured = [trial for trial in state.trials if trial.state is TrialState.MEASURED and not trial.source]
    others = [each for each in measured if each.candidate != candidate and state.keeps_limits(each.candidate)]
    if state.best is None or state.best.candidate != candidate or not others:
        return []

    def share(other: Trial) -> float:
        return state.speed_of(other.candidate) / state.speed_of(candidate) - 1.0

    second, compared = max(others, key=share), []
    if second != state.baseline:
        text = N_("{share:+.1%} in time vs the second (trial {number})")
        compared.append(_(text, share=share(second), number=second.number))
    if state.baseline in others:
        text = N_("{share:+.1%} in time vs the baseline (trial {number})")
        compared.append(_(text, share=share(state.baseline), number=state.baseline.number))
    text = N_("the fastest of {count} measured candidates")
    if snapshot.task.spec.limits:
        text = N_("the fastest of {count} measured candidates within the limits")
    return [f"{_(text, count=len(others) + 1)}: {', '.join(compared)}"]


def _pruning_rule(snapshot: Snapshot, row: int) -> list[Mapping[str, Any]]:
    """Return the rule of the stage `prune` that removed a row, none if none did."""
    code, pruned = int(snapshot.pruned.rule[row]), snapshot.pruned
    if not code:
        return []
    name, behind = pruned.rules[code - 1], int(pruned.trial[row])
    says = snapshot.problem.messages.get(name, "")
    return [{"rule": name, "says": says, "values": {}, "trial": behind if behind >= 0 else None}]


def _reason_removed(snapshot: Snapshot, rule: Mapping[str, Any], row: int, predicted: Mapping[str, Any] | None) -> str:
    state, predictions = snapshot.search_state, snapshot.problem.predictions
    if rule["rule"] == DOES_NOT_FIT:
        least = needed_share(snapshot.problem.space, predictions, (*state.trials, *state.probes))
        line = f"{DOES_NOT_FIT}: {''.join(_needs(predicted))}"
        needed = float(predictions.device_used_bytes[row]) * least / 2**30
        return line if least == 1.0 else line + "; " + _("after trials at least {gib:.2f} GiB", gib=needed)
    line = f"{rule['rule']}: {rule['says']}"
    if rule["trial"] is None:
        return line
    trial = next(each for each in all_trials(snapshot) if each.number == rule["trial"])
    here = snapshot.problem.space.candidate(row).as_dict()
    differs = differs_text(differing(here, trial.candidate.as_dict()), snapshot.problem.knobs)
    return f"{line}: {_('trial')} {trial.number} ({differs}) {state_name(trial.state.value)}"


def _reasons_open(snapshot: Snapshot, row: int) -> list[str]:
    order, run = rows_by_time(snapshot.problem), snapshot.run
    places = (np.flatnonzero(order == row) + 1).tolist()
    lines = [_("number {place:,} of {count:,} by predicted time", place=place, count=order.size) for place in places]
    if run is None:
        return lines or [_("no rule removed it")]
    if run.stopped_because:
        return [_("untried: the search stopped: {reason}", reason=stop_reason(run.data)), *lines]
    return [_("untried: the run has not ended"), *lines]


def _needs(predicted: Mapping[str, Any] | None) -> list[str]:
    return [] if predicted is None else [needs_text(predicted["memory"])]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Notebook):
    """Counts of all combinations by outcome, the message of each rule, and why the run stopped.

    `nothing_fits` reports, if no candidate is left before any trial, how close the closest came. `knobs` are those that
    plugins bring to the engine here, named by the spec or not, and `notes` what they say of engine and chip.
    `lost_repeats` are a run's repeats that gave no measurement, and how they ended: `counts` are numbers of candidates.
    `fidelity` is that of a run's trials.
    """

    counts: Counts
    says: Mapping[str, str]
    ended_because: str | None = None
    nothing_fits: str | None = None
    knobs: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    lost_repeats: Mapping[int, str] = field(default_factory=dict)
    fidelity: str = RUN

    def __repr__(self) -> str:
        return f"<Explanation of {self.counts.combinations:,} combinations, {self.counts.candidates:,} candidates>"

    def __str__(self) -> str:
        return "\n".join([funnel(self.counts, self.fidelity), *repeats_text(self.lost_repeats)])


def explain(where: SpecLike, *, chip: str | None = None, without: Collection[str] = ()) -> Explanation:
    """Report the outcome of every combination of a spec file, or of a run with its trials.

    Raises the errors of `flagcore.errors`.
    """
    found = load_snapshot(where, chip, without)
    problem, task = found.problem, found.task
    counts, because, lost = before_trials(problem), None, dict[int, str]()
    if found.run is not None:
        lost = failed_repeats(found.run.repeats)
        counts, because = (
            _saved_counts(found.run) or count(problem.space, found.pruned, found.search_state),
            found.run.stopped_because and stop_reason(found.run.data),
        )
    nothing_fits = None
    try:
        require_candidate(problem, found.workload)
    except NothingFits as error:
        nothing_fits = str(error)
    return Explanation(
        counts=counts,
        says=problem.messages,
        ended_because=because,
        nothing_fits=nothing_fits,
        knobs=tuple(knob_record(task, knob) for knob in problem.platform.knobs),
        notes=plugin_notes(problem.platform),
        lost_repeats=lost,
        fidelity=RUN if found.run is None else found.run.fidelity,
    )


def _saved_counts(run: Run) -> Counts | None:
    """Return the counts that a run saved when it ended, None for one in progress. Raises RunError."""
    if run.in_progress:
        return None
    try:
        counts = Counts(**run.data["counts"])
        if not counts.balanced:
            raise ValueError("its counts do not add up")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable_error(run.folder / RESULT, error) from None
    return counts
