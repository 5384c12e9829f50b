"""prune: remove candidates before they run. Each removal has a rule, and a learned one its trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flagcore.contracts import PruningRule, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.prediction import Predictions
from flagcore.domain.search_state import DOES_NOT_FIT, Pruned
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Space
from flagcore.domain.trial import Trial, TrialState
from flagcore.errors import FlagError
from flagcore.learning.chances import least_share

CHUNK = 1 << 16
"""Candidates per call of a rule."""

NEEDS_AS_MUCH_MEMORY = "needs_as_much_memory_as_one_that_ran_out"
DOES_AS_MUCH_WORK = "does_the_work_of_a_measured_one_and_more"
LEARNED = {
    DOES_NOT_FIT: "its predicted memory is more than a device has",
    NEEDS_AS_MUCH_MEMORY: "a trial ran out of memory, and this one needs at least as much on every knob",
    DOES_AS_MUCH_WORK: "a trial was measured, and this one does at least the same work",
}
"""Messages of the rules of this stage."""


def prune(
    space: Space,
    predictions: Predictions,
    workload: Workload,
    rules: Sequence[PruningRule],
    trials: Sequence[Trial],
    before: Pruned | None = None,
    probes: Sequence[Trial] = (),
) -> Pruned:
    """Return the rows that are excluded by predictions, by `rules` and by `trials`.

    The memory of trials corrects the predictions of all candidates. Of `probes`, which settle nothing, only
    memory counts: one that ran out rules its own candidate out, too. With `before`, the outcome of an earlier
    call, only trials that are new are applied, unless others fit now than did then.
    """
    least = needed_share(space, predictions, (*trials, *probes))
    exceeds_memory = predictions.share_in_use * least > 1.0
    pruned = before
    if pruned is None or not np.array_equal(pruned.exceeds_memory, exceeds_memory):
        pruned = _by_prediction(space, predictions, rules, exceeds_memory)
    for trial in trials:
        if trial.number not in pruned.applied_trials:
            pruned = replace(
                _by_trial(pruned, space, predictions, workload, trial),
                applied_trials=pruned.applied_trials | {trial.number},
            )
    for trial in probes:
        if trial.number not in pruned.applied_trials and trial.state is TrialState.OUT_OF_MEMORY:
            known = _by_memory(pruned, space, predictions, workload, trial)
            pruned = replace(known, applied_trials=known.applied_trials | {trial.number})
    return pruned


def needed_share(space: Space, predictions: Predictions, trials: Sequence[Trial]) -> float:
    """Return the share of its predicted memory that any candidate is believed to need at least, after `trials`."""
    ratios = []
    for trial in trials:
        row, measured = space.find(trial.candidate), trial.measurement
        if row is not None and trial.state is TrialState.MEASURED and measured and measured.device_used_bytes:
            ratios.append(math.log(measured.device_used_bytes / float(predictions.device_used_bytes[row])))
    return least_share(ratios)


def _by_prediction(
    space: Space, predictions: Predictions, rules: Sequence[PruningRule], exceeds_memory: BoolArray
) -> Pruned:
    size = len(space)
    start = Pruned(
        rule=np.zeros(size, dtype=np.int16), trial=np.full(size, -1, dtype=np.int64), exceeds_memory=exceeds_memory
    )
    pruned = _remove(start, DOES_NOT_FIT, np.arange(size), exceeds_memory)
    for rule in rules:
        rows = pruned.open_rows
        try:
            pieces = [rows[start : start + CHUNK] for start in range(0, rows.size, CHUNK)]
            masks = [_evaluate(rule, space.columns(piece), predictions.take(piece)) for piece in pieces]
            pruned = _remove(pruned, rule.name, rows, np.concatenate([np.zeros(0, dtype=np.bool_), *masks]))
        except Exception as error:  # a plugin's rule costs only itself
            reason = str(error) if isinstance(error, FlagError) else f"{type(error).__name__}: {error}"
            message = f"pruning rule {rule.name} is disabled: {reason}"
            pruned = replace(pruned, broken_rules=(*pruned.broken_rules, message))
    return pruned


def _evaluate(rule: PruningRule, columns: Columns, predictions: Predictions) -> BoolArray:
    """Return which rows a rule removes. Raises TypeError for anything but one boolean per row."""
    mask, shape = np.asarray(rule.prunes(columns, predictions)), predictions.step_time_s.shape
    if mask.dtype != np.bool_ or mask.shape != shape:
        raise TypeError(f"answered {mask.dtype} of shape {mask.shape}, not a truth value a row ({shape[0]})")
    return mask


def _by_trial(pruned: Pruned, space: Space, predictions: Predictions, workload: Workload, trial: Trial) -> Pruned:
    rows = pruned.open_rows
    if not rows.size or trial.state not in (TrialState.OUT_OF_MEMORY, TrialState.MEASURED):
        return pruned
    if trial.state is TrialState.OUT_OF_MEMORY:
        return _by_memory(pruned, space, predictions, workload, trial, itself=False)
    columns, row = space.columns(rows), space.find(trial.candidate)
    other = ~_same(columns, space.axes, trial.candidate)
    mask = (
        workload.takes_at_least(columns, trial.candidate)
        & other
        & _same_unordered_values(columns, space, trial.candidate)
    )
    return _remove(
        pruned, DOES_AS_MUCH_WORK, rows, mask & _predicted_at_least(predictions.step_time_s, rows, row), trial.number
    )


def _by_memory(
    pruned: Pruned, space: Space, predictions: Predictions, workload: Workload, trial: Trial, *, itself: bool = True
) -> Pruned:
    """Return `pruned` without what needs as much memory as a trial that ran out of it."""
    rows = pruned.open_rows
    if not rows.size:
        return pruned
    columns, row = space.columns(rows), space.find(trial.candidate)
    mask = workload.needs_at_least(columns, trial.candidate) & _predicted_at_least(
        predictions.device_used_bytes, rows, row
    )
    mask &= _same_unordered_values(columns, space, trial.candidate)
    if not itself:
        mask &= ~_same(columns, space.axes, trial.candidate)
    return _remove(pruned, NEEDS_AS_MUCH_MEMORY, rows, mask, trial.number)


def _predicted_at_least(predicted: FloatArray, rows: IntArray, row: int | None) -> BoolArray:
    """Return which rows the model, too, gives as much as the row of the trial; all where it has no prediction."""
    if row is None or not np.isfinite(predicted[row]):
        return np.ones(rows.shape, dtype=np.bool_)
    less: BoolArray = predicted[rows] < predicted[row]
    return ~less


def _same_unordered_values(columns: Columns, space: Space, candidate: Candidate) -> BoolArray:
    """Return which rows have the values of `candidate` on each axis whose values have no order."""
    unordered = [axis for axis in space.axes if axis.is_unordered]
    return (
        _same(columns, unordered, candidate)
        if unordered
        else np.ones(next(iter(columns.values())).shape, dtype=np.bool_)
    )


def _same(columns: Columns, axes: Sequence[Axis], candidate: Candidate) -> BoolArray:
    values = candidate.as_dict()
    same = [columns[axis.knob] == axis.encode(values.get(axis.knob, axis.neutral)) for axis in axes]
    equal: BoolArray = np.logical_and.reduce(same)
    return equal


def _remove(pruned: Pruned, name: str, rows: IntArray, mask: BoolArray, trial: int = -1) -> Pruned:
    gone = rows[mask]
    if not gone.size:
        return pruned
    rules = pruned.rules if name in pruned.rules else (*pruned.rules, name)
    rule, behind = pruned.rule.copy(), pruned.trial.copy()
    rule[gone] = rules.index(name) + 1
    behind[gone] = trial
    return replace(pruned, rule=rule, trial=behind, rules=rules)
