"""Where a candidate spends more or less time than the best: by part of the predicted time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.api.common.context import Snapshot
from flagcore.api.explaining.neighbors import columns_of, stopped_at
from flagcore.domain.candidate import Candidate
from flagcore.i18n import _
from flagcore.problem import rows_by_time
from flagcore.report.causes import causes_text
from flagcore.report.formats import lookup
from flagcore.strategies.learned import believed


def causes_of(
    snapshot: Snapshot, candidate: Candidate, predicted: Mapping[str, Any] | None, seconds: float | None
) -> str:
    """Return a paragraph that compares a candidate with the best, or the best with the baseline; empty if unknown.

    `seconds` is the step time of the candidate as measured, believed or predicted.
    """
    best, baseline = best_of(snapshot), snapshot.problem.baseline
    other, name = (best, _("the best")) if candidate != best else (baseline, _("the baseline"))
    row = None if other is None or other == candidate else snapshot.problem.space.find(other)
    if other is None or row is None or predicted is None or seconds is None:
        return ""
    other_s, other_predicted = expected_s(snapshot, row), snapshot.record(columns_of(snapshot, other))
    if other_s is None:
        return ""
    times = [each.get("time") or {} for each in (other_predicted, predicted)]
    parts = {part: (float(times[0].get(part) or 0.0), float(times[1].get(part) or 0.0)) for part in times[0] | times[1]}
    are_measured = all(snapshot.search_state.speed_of(each) for each in (candidate, other))
    source = _("measured") if are_measured else _("expected after trials") if snapshot.run else _("predicted")
    steps = (lookup(other_predicted, "step_time_s.value"), lookup(predicted, "step_time_s.value"))
    has_rounds = candidate == best and are_measured
    return causes_text(
        snapshot.task.spec.objective, name, (other_s, seconds), steps, parts, source, has_rounds=has_rounds
    )


def best_of(snapshot: Snapshot) -> Candidate | None:
    """Return the best of a run, or the fastest predicted candidate of a spec."""
    if snapshot.run is not None:
        return snapshot.run.best.candidate if snapshot.run.best else None
    order = rows_by_time(snapshot.problem)
    return snapshot.problem.space.candidate(int(order[0])) if order.size else None


def believed_of_row(snapshot: Snapshot, row: int | None) -> Mapping[str, Any] | None:
    """Return the prediction as corrected by trials of this and earlier runs; None for a spec, or without trials."""
    has_trials = snapshot.search_state.trials or snapshot.search_state.probes or len(snapshot.context.past.time)
    if snapshot.run is None or row is None or not has_trials:
        return None
    return believed(snapshot.context, row)


def expected_s(snapshot: Snapshot, row: int) -> float | None:
    """Return the seconds of a step as measured, else as corrected by trials, else as predicted.

    The time of a stopped trial is a lower bound.
    """
    candidate = snapshot.problem.space.candidate(row)
    speed = snapshot.search_state.speed_of(candidate)
    if speed:
        return 1.0 / speed
    trusted, least = believed_of_row(snapshot, row), stopped_at(snapshot, candidate)
    step = trusted["step_time_s"]["value"] if trusted else snapshot.problem.predictions.row(row).step_time_s
    return max((float(each) for each in (step, least) if each is not None), default=None)
