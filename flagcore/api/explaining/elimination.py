"""States of combinations and of single candidates, with reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from flagcore.api.candidate_parser import values_of
from flagcore.api.explaining.neighbors import best_of, causes_of, columns_of, differing, expected_s
from flagcore.api.inputs import SpecLike
from flagcore.api.planning.estimate import before_trials, knob_record, plugin_notes
from flagcore.api.runs import RESULT, Run, no_best_error, unreadable_error
from flagcore.api.snapshot import Snapshot, load_snapshot
from flagcore.domain.candidate import Candidate
from flagcore.domain.plan import Counts, count, failed_repeats
from flagcore.domain.search_state import DOES_NOT_FIT, rivals
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Role, Trial, TrialState
from flagcore.errors import NothingFits
from flagcore.i18n import N_, _
from flagcore.report.candidate_report import differs_text, seconds_text
from flagcore.report.explanation import Explanation, needs_text
from flagcore.report.formats import shown as figure_text
from flagcore.report.result import stop_reason
from flagcore.report.text import candidate_text, role_text, scaled_text, state_name
from flagcore.tuner.feasibility import require_candidate
from flagcore.tuner.problem import rows_by_time
from flagcore.tuner.stages.prune import needed_share

ILLEGAL, OUTSIDE, REMOVED = N_("illegal"), N_("not in the space"), N_("removed")
RAN, OPEN = N_("ran"), N_("open")
"""States of a candidate: a rule of the engine forbids it; the spec does not list it; a rule removed it; it ran; it may
be tried."""
LEGAL = {
    True: N_("it would be legal, and would fit"),
    False: N_("it would be legal, but would not fit"),
    None: N_("it would be legal; whether it would fit is unknown"),
}
"""Text for a candidate outside the space, by whether it is predicted to fit."""


def all_trials(snapshot: Snapshot) -> Sequence[Trial]:
    """Return all trials of a run in order, including repeats, probes and imported trials; empty for a spec."""
    run = snapshot.run
    run_trials = () if run is None else (*run.imported, *run.probes, *run.trials, *run.repeats)
    by_number = {trial.number: trial for trial in run_trials}
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
            lines.append(f"{rule['rule']}: {rule['message']}" + (f" ({values})" if values else ""))
        return ILLEGAL, [*lines, *_reasons_outside_space(snapshot, candidate)], []
    if row is None:
        not_listed = [_("not in the space: no combination of the values of the spec gives it")]
        legal = _(LEGAL[(predicted or {"memory": {}})["memory"].get("fits")])
        return (
            OUTSIDE,
            [*(_reasons_outside_space(snapshot, candidate) or not_listed), legal, *_memory_text(predicted)],
            [],
        )
    pruned_by = _pruning_rule(snapshot, row)
    fidelity = RUN if snapshot.run is None else snapshot.run.fidelity
    if any(trial.fidelity == fidelity and trial.role is not Role.IMPORTED for trial in tried):
        return (
            RAN,
            [
                *(_termination_reason(snapshot, trial) for trial in tried),
                *_runs_text(snapshot, candidate),
                *_best_reasons(snapshot, candidate),
            ],
            pruned_by,
        )
    probe_reasons = [_termination_reason(snapshot, trial) for trial in tried if trial.fidelity != ESTIMATE]
    if pruned_by:
        return (
            REMOVED,
            [*probe_reasons, *(_removal_reason(snapshot, each, row, predicted) for each in pruned_by)],
            pruned_by,
        )
    return OPEN, [*probe_reasons, *_open_reasons(snapshot, row)], []


def _reasons_outside_space(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    values = candidate.as_dict()
    return [
        _("not in the space: {knob} = {value}; {values}", knob=axis.knob, value=value, values=values_of(axis))
        for axis in snapshot.problem.space.axes
        if (value := values[axis.knob]) not in (*axis.values, axis.neutral, *axis.extra_values)
    ]


def _termination_reason(snapshot: Snapshot, trial: Trial) -> str:
    """Return a sentence about the end of a trial: its measurement compared with the best, or the reason of its
    failure.
    """
    trial_kind = _("probe") if trial.fidelity == PROBE else _("trial")
    role = "imported" if trial.source else trial.role.value
    line = f"{trial_kind} {trial.number} ({role_text(role)}) {state_name(trial.state.value)}"
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
    was_stopped = trial.state is TrialState.STOPPED
    return line + "; " + (_("stopped early: {reason}", reason=trial.reason) if was_stopped else trial.reason)


def _best_step(snapshot: Snapshot, best: Trial) -> tuple[float, str]:
    """Return the step time of the best in seconds (the median of its runs), and its text."""
    runs = len(snapshot.search_state.runs_of(best.candidate))
    step = 1.0 / snapshot.search_state.speed_of(best.candidate)
    text = seconds_text(snapshot.task.spec.objective, step)
    return step, text if runs == 1 else text + ", " + _("median of {count} runs", count=runs)


def _runs_text(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    """Return a text with the median of a candidate's runs and, if the best has repeats, whether it may be as fast."""
    search_state = snapshot.search_state
    runs, best, lines = search_state.runs_of(candidate), search_state.best, []
    if len(runs) > 1:
        seconds = seconds_text(snapshot.task.spec.objective, 1.0 / search_state.speed_of(candidate))
        line = _("the median of its {count} runs: {value}", count=len(runs), value=seconds)
        is_best = best is not None and best.candidate == candidate
        lines.append(line + ("; " + _("it is the best") if is_best else ""))
    has_repeats = best is not None and len(search_state.runs_of(best.candidate)) > 1
    if has_repeats and any(trial.candidate == candidate for trial in rivals(search_state)):
        lines.append(_("not significantly slower than the best"))
    return lines


def _best_reasons(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    """Return a comparison of the best with the second candidate within the limits, and with the baseline."""
    search_state = snapshot.search_state
    measured_trials = [
        trial for trial in search_state.trials if trial.state is TrialState.MEASURED and not trial.source
    ]
    rivals = [
        each for each in measured_trials if each.candidate != candidate and search_state.keeps_limits(each.candidate)
    ]
    if search_state.best is None or search_state.best.candidate != candidate or not rivals:
        return []

    def share(other: Trial) -> float:
        return search_state.speed_of(other.candidate) / search_state.speed_of(candidate) - 1.0

    second, compared = max(rivals, key=share), []
    if second != search_state.baseline:
        text = N_("{share:+.1%} in time vs the second (trial {number})")
        compared.append(_(text, share=share(second), number=second.number))
    if search_state.baseline in rivals:
        text = N_("{share:+.1%} in time vs the baseline (trial {number})")
        compared.append(_(text, share=share(search_state.baseline), number=search_state.baseline.number))
    text = N_("the fastest of {count} measured candidates")
    if snapshot.task.spec.limits:
        text = N_("the fastest of {count} measured candidates within the limits")
    return [f"{_(text, count=len(rivals) + 1)}: {', '.join(compared)}"]


def _pruning_rule(snapshot: Snapshot, row: int) -> list[Mapping[str, Any]]:
    """Return the rule of the stage `prune` that removed a row; empty if no rule removed it."""
    code, pruned = int(snapshot.pruned.rule[row]), snapshot.pruned
    if not code:
        return []
    name, behind = pruned.rules[code - 1], int(pruned.trial[row])
    rule_text = snapshot.problem.messages.get(name, "")
    return [{"rule": name, "message": rule_text, "values": {}, "trial": behind if behind >= 0 else None}]


def _removal_reason(snapshot: Snapshot, rule: Mapping[str, Any], row: int, predicted: Mapping[str, Any] | None) -> str:
    state, predictions = snapshot.search_state, snapshot.problem.predictions
    if rule["rule"] == DOES_NOT_FIT:
        least_share = needed_share(snapshot.problem.space, predictions, (*state.trials, *state.probes))
        line = f"{DOES_NOT_FIT}: {''.join(_memory_text(predicted))}"
        needed_gib = float(predictions.device_used_bytes[row]) * least_share / 2**30
        return line if least_share == 1.0 else line + "; " + _("after trials at least {gib:.2f} GiB", gib=needed_gib)
    line = f"{rule['rule']}: {rule['message']}"
    if rule["trial"] is None:
        return line
    trial = next(each for each in all_trials(snapshot) if each.number == rule["trial"])
    values = snapshot.problem.space.candidate(row).as_dict()
    differences = differs_text(differing(values, trial.candidate.as_dict()), snapshot.problem.knobs)
    return f"{line}: {_('trial')} {trial.number} ({differences}) {state_name(trial.state.value)}"


def _open_reasons(snapshot: Snapshot, row: int) -> list[str]:
    order, run = rows_by_time(snapshot.problem), snapshot.run
    places = (np.flatnonzero(order == row) + 1).tolist()
    lines = [_("number {place:,} of {count:,} by predicted time", place=place, count=order.size) for place in places]
    if run is None:
        return lines or [_("no rule removed it")]
    if run.stopped_because:
        return [_("untried: the search stopped: {reason}", reason=stop_reason(run.data)), *lines]
    return [_("untried: the run has not ended"), *lines]


def _memory_text(predicted: Mapping[str, Any] | None) -> list[str]:
    return [] if predicted is None else [needs_text(predicted["memory"])]


def explain(where: SpecLike, *, chip: str | None = None, without: Collection[str] = ()) -> Explanation:
    """Report the outcome of every combination of a spec file, or of a run with its trials.

    Raises the errors of `flagcore.errors`.
    """
    snapshot = load_snapshot(where, chip, without)
    problem, task = snapshot.problem, snapshot.task
    counts, because, lost_repeats = before_trials(problem), None, dict[int, str]()
    if snapshot.run is not None:
        lost_repeats = failed_repeats(snapshot.run.repeats)
        counts, because = (
            _saved_counts(snapshot.run) or count(problem.space, snapshot.pruned, snapshot.search_state),
            snapshot.run.stopped_because and stop_reason(snapshot.run.data),
        )
    nothing_fits = None
    try:
        require_candidate(problem)
    except NothingFits as error:
        nothing_fits = str(error)
    return Explanation(
        counts=counts,
        messages=problem.messages,
        ended_because=because,
        nothing_fits=nothing_fits,
        knobs=tuple(knob_record(task, knob) for knob in problem.platform.knobs),
        notes=plugin_notes(problem.platform),
        lost_repeats=lost_repeats,
        fidelity=RUN if snapshot.run is None else snapshot.run.fidelity,
        causes=_causes_of_best(snapshot),
        no_best=str(no_best_error(snapshot.run)) if snapshot.run and not snapshot.run.best else None,
    )


def _causes_of_best(snapshot: Snapshot) -> str:
    """Return why the best is faster than the baseline; empty without a best."""
    best = best_of(snapshot)
    row = None if best is None else snapshot.problem.space.find(best)
    if best is None or row is None:
        return ""
    text = causes_of(snapshot, best, snapshot.record(columns_of(snapshot, best)), expected_s(snapshot, row))
    name = candidate_text(best, snapshot.problem.knobs)
    return f"{_('Best')}: {name}. {text}" if text else ""


def _saved_counts(run: Run) -> Counts | None:
    """Return the counts that a run saved at its end; None while it is in progress. Raises RunError."""
    if run.in_progress:
        return None
    try:
        counts = Counts(**run.data["counts"])
        if not counts.balanced:
            raise ValueError("its counts do not add up")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable_error(run.folder / RESULT, error) from None
    return counts
