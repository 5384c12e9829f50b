"""The state of a candidate and the reason for it, with figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flagcore.api.common.candidate_parser import as_candidate
from flagcore.api.common.context import Snapshot
from flagcore.api.explaining.neighbors import differing
from flagcore.domain.candidate import Candidate
from flagcore.domain.noise import rivals
from flagcore.domain.search_state import DOES_NOT_FIT
from flagcore.domain.space import Columns
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Role, Trial, TrialState
from flagcore.problem import Problem, fastest
from flagcore.report.candidate_report import differs_text, seconds_text
from flagcore.report.explanation import needs_text
from flagcore.stages.prune import LEARNED, NEEDS_AS_MUCH_MEMORY, needed_share

ILLEGAL, OUTSIDE, REMOVED, RAN, OPEN = "illegal", "not in the space", "removed", "ran", "open"
"""What became of a candidate: a rule of the engine forbids it; the spec does not list it; it was not worth a trial; it
ran; it may be tried."""
LEGAL = {
    True: "it would be legal, and fit",
    False: "it would be legal, but not fit",
    None: "it would be legal; whether it would fit is unknown",
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
    """Return what became of a candidate, why in words, and the rules of this stage behind it."""
    outside = _outside(snapshot, candidate)
    if broken:
        return ILLEGAL, [*map(_broken_text, broken), *outside], []
    if row is None:
        unlisted = ["not in the space: no combination of the values that the spec lists gives it"]
        legal = LEGAL[(predicted or {"memory": {}})["memory"].get("fits")]
        return OUTSIDE, [*(outside or unlisted), legal, *_needs(predicted)], []
    wanted = RUN if snapshot.run is None else snapshot.run.fidelity
    if any(trial.fidelity == wanted and trial.role is not Role.IMPORTED for trial in tried):
        return (
            RAN,
            [*(_ended(snapshot, trial) for trial in tried), *_of_all_runs(snapshot, candidate)],
            _taught(snapshot, row),
        )
    probed = [_ended(snapshot, trial) for trial in tried if trial.fidelity != ESTIMATE]
    taught = _taught(snapshot, row)
    if taught:
        return REMOVED, [*probed, *(_why_removed(snapshot, each, row, predicted) for each in taught)], taught
    return OPEN, [*probed, *_why_open(snapshot, row)], []


def _outside(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    lines = []
    for axis in snapshot.problem.space.axes:
        value = candidate.as_dict()[axis.knob]
        if value not in (*axis.values, axis.neutral, *axis.also):
            few = ", ".join("unset" if each is None else str(each) for each in axis.values[:12])
            more = ", ..." if len(axis.values) > 12 else ""
            lines.append(f"not in the space: {axis.knob} = {value} is none of {few}{more}")
    return lines


def _broken_text(rule: Mapping[str, Any]) -> str:
    """Return a broken rule in words, with the values that it looked at."""
    here = ", ".join(f"{knob} = {value}" for knob, value in rule["values"].items())
    return f"{rule['rule']}: {rule['says']}" + (f"; here {here}" if here else "")


def _ended(snapshot: Snapshot, trial: Trial) -> str:
    """Return how a trial ended: what it measured, beside the best, or why it did not."""
    what = "probe" if trial.fidelity == PROBE else "trial"
    role = "imported" if trial.source else trial.role.value
    line = f"{what} {trial.number} ({role}) {trial.state.value}"
    best, measured = snapshot.search_state.best, trial.measurement
    if measured is None or trial.state.failed:
        return line + (f": {trial.reason}" if trial.reason else "")
    line += f": {seconds_text(snapshot.task.spec.objective, measured.step_time_s)}"
    stopped = f"; it was ended early as {trial.reason}" if trial.state is TrialState.STOPPED and trial.reason else ""
    if trial.role is Role.IMPORTED:
        return f"{line}, on another machine ({trial.source})"
    if measured.broken:
        line += f"; it breaks a limit: {', '.join(measured.broken)}"
    if best is None:
        return line + stopped
    runs = len(snapshot.search_state.runs_of(best.candidate))
    if best.candidate == trial.candidate:
        return line + ("; it is the best" if runs == 1 else "")
    step = 1.0 / snapshot.search_state.speed_of(best.candidate)
    of = seconds_text(snapshot.task.spec.objective, step) + (f", the median of its {runs} runs" if runs > 1 else "")
    more = measured.step_time_s / step - 1.0
    return f"{line}, {more:+.1%} in time against the best (trial {best.number}: {of}){stopped}"


def _of_all_runs(snapshot: Snapshot, candidate: Candidate) -> list[str]:
    """Return the result of several runs of a candidate, and whether it may be as fast as the best.

    The latter only if the best ran more than once.
    """
    runs, best = snapshot.search_state.runs_of(candidate), snapshot.search_state.best
    near = best is not None and len(snapshot.search_state.runs_of(best.candidate)) > 1
    near = near and any(trial.candidate == candidate for trial in rivals(snapshot.search_state))
    open_yet = ["not significantly slower than the best"] if near else []
    if len(runs) < 2:
        return open_yet
    step = 1.0 / snapshot.search_state.speed_of(candidate)
    line = f"the median of its {len(runs)} runs: {seconds_text(snapshot.task.spec.objective, step)}"
    return [f"{line}; it is the best" if best is not None and best.candidate == candidate else line, *open_yet]


def _taught(snapshot: Snapshot, row: int) -> list[Mapping[str, Any]]:
    """Return the rule of the stage `prune` that removed a row, none if none did."""
    code, pruned = int(snapshot.pruned.rule[row]), snapshot.pruned
    if not code:
        return []
    name, behind = pruned.rules[code - 1], int(pruned.trial[row])
    says = {rule.name: rule.message for rule in snapshot.problem.rules} | LEARNED
    return [{"rule": name, "says": says.get(name, ""), "values": {}, "trial": behind if behind >= 0 else None}]


def _why_removed(snapshot: Snapshot, rule: Mapping[str, Any], row: int, predicted: Mapping[str, Any] | None) -> str:
    if rule["rule"] == DOES_NOT_FIT:
        space, predictions = snapshot.problem.space, snapshot.problem.predictions
        search_state = snapshot.search_state
        least = needed_share(space, predictions, (*search_state.trials, *search_state.probes))
        line = "".join(_needs(predicted))
        if least == 1.0:
            return f"does_not_fit: {line}"
        needed = float(predictions.device_used_bytes[row]) * least / 2**30
        return f"does_not_fit: {line}; after what trials used, it is believed to need {needed:.2f} GiB at the least"
    if rule["trial"] is None:
        return f"{rule['rule']}: {rule['says']}"
    trial = next(each for each in all_trials(snapshot) if each.number == rule["trial"])
    here = snapshot.problem.space.candidate(row).as_dict()
    step = trial.measurement.step_time_s if trial.measurement else None
    ran = "ran out of memory" if rule["rule"] == NEEDS_AS_MUCH_MEMORY else f"took {step:.4g} s/step" if step else "ran"
    differs = differs_text(differing(here, trial.candidate.as_dict()), snapshot.problem.knobs)
    return f"{rule['rule']}: {rule['says']}: trial {trial.number} ({differs}) {ran}"


def _why_open(snapshot: Snapshot, row: int) -> list[str]:
    order = fastest(snapshot.problem)
    place = np.flatnonzero(order == row)
    lines = (
        [f"it is number {int(place[0]) + 1:,} of {order.size:,} in the order of predicted times"] if place.size else []
    )
    run = snapshot.run
    if run is None:
        return lines or ["no rule removed it"]
    why = run.stopped_because
    return [f"it was not tried: {f'the search ended because {why}' if why else 'the run has not ended'}", *lines]


def _needs(predicted: Mapping[str, Any] | None) -> list[str]:
    return [] if predicted is None else [needs_text(predicted["memory"])]
