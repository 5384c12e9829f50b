"""prune: remove candidates because of predictions, rules, or earlier trials."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flagcore.contracts import Problem, PruningRule
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import (
    DOES_AS_MUCH_WORK,
    DOES_NOT_FIT,
    NEEDS_AS_MUCH_MEMORY,
    Axis,
    BoolArray,
    Candidate,
    Columns,
    FloatArray,
    IntArray,
    Pruned,
    Space,
)
from flagcore.domain.trial import TIMED_STATES, Trial, TrialState

CHUNK = 1 << 16
"""The number of candidates per call of a rule."""


def prune(space: Space, predictions: Predictions, rules: Sequence[PruningRule]) -> Pruned:
    """Return which rows of `space` are pruned: those that do not fit in memory, and those that `rules` remove."""
    return _by_prediction(space, predictions, rules, predictions.share_in_use > 1.0)


def prune_by_trials(problem: Problem, trials: Sequence[Trial], probes: Sequence[Trial] = ()) -> Pruned:
    """Return which rows of the problem's space are pruned by its predictions, its rules and `trials`.

    The measured memory of trials corrects the predicted memory of all candidates. Only the memory of `probes` is used;
    a probe that ran out of memory also removes its own candidate. Only new trials are applied to `problem.pruned`,
    unless the corrected memory now excludes other candidates.
    """
    predictions, pruned = problem.predictions, problem.pruned
    exceeds_memory = predictions.share_in_use * needed_share(problem.space, predictions, (*trials, *probes)) > 1.0
    if not np.array_equal(pruned.exceeds_memory, exceeds_memory):
        pruned = _by_prediction(problem.space, predictions, problem.rules, exceeds_memory)
    for trial in (*trials, *(probe for probe in probes if probe.state is TrialState.OUT_OF_MEMORY)):
        if trial.number not in pruned.applied_trials:
            pruned = _by_trial(pruned, problem, trial, itself=trial in probes)
            pruned = replace(pruned, applied_trials=pruned.applied_trials | {trial.number})
    return pruned


def needed_share(space: Space, predictions: Predictions, trials: Sequence[Trial]) -> float:
    """Return the lower bound of a candidate's memory that `trials` teach, as a share of its predicted memory."""
    ratios = []
    for trial in trials:
        row, measured = space.find(trial.candidate), trial.measurement
        if row is not None and trial.state is TrialState.MEASURED and measured and measured.device_used_bytes:
            ratios.append(math.log(measured.device_used_bytes / float(predictions.device_used_bytes[row])))
    if not ratios:
        return 1.0
    from flagcore.tuner.learning import min_memory_share  # importing scipy is slow, and plans have no trials

    return min_memory_share(ratios)


def _by_prediction(
    space: Space, predictions: Predictions, rules: Sequence[PruningRule], exceeds_memory: BoolArray
) -> Pruned:
    """Return which rows are pruned by `exceeds_memory`, a boolean array with one element per row, and by `rules`."""
    size = len(space)
    start = Pruned(
        rule=np.zeros(size, dtype=np.int16), trial=np.full(size, -1, dtype=np.int64), exceeds_memory=exceeds_memory
    )
    pruned = _remove(start, DOES_NOT_FIT, np.arange(size), exceeds_memory)
    for rule in rules:
        rows = pruned.open_rows
        pieces = [rows[start : start + CHUNK] for start in range(0, rows.size, CHUNK)]
        masks = [rule.prunes(space.columns(piece), predictions.take(piece)) for piece in pieces]
        pruned = _remove(pruned, rule.name, rows, np.concatenate([np.zeros(0, dtype=np.bool_), *masks]))
    return pruned


def _by_trial(pruned: Pruned, problem: Problem, trial: Trial, *, itself: bool) -> Pruned:
    """Remove the rows that cannot be better than a trial that was measured, stopped or ran out of memory.

    They do at least as much work, or need at least as much memory. `itself`: whether the candidate of the trial is
    removed, too.
    """
    order, predictions = problem.engine, problem.predictions
    rows, space = pruned.open_rows, problem.space
    if trial.state is TrialState.OUT_OF_MEMORY:
        name, is_at_least, predicted = NEEDS_AS_MUCH_MEMORY, order.needs_at_least, predictions.device_used_bytes
    else:
        name, is_at_least, predicted = DOES_AS_MUCH_WORK, order.takes_at_least, predictions.step_time_s
    if not rows.size or trial.state not in (TrialState.OUT_OF_MEMORY, *TIMED_STATES):
        return pruned
    columns = space.columns(rows)
    mask = is_at_least(columns, trial.candidate)
    mask &= _predicted_at_least(predicted, rows, space.find(trial.candidate))
    mask &= _same(columns, [axis for axis in space.axes if axis.is_unordered], trial.candidate)
    if not itself:
        mask &= ~_same(columns, space.axes, trial.candidate)
    return _remove(pruned, name, rows, mask, trial.number)


def _predicted_at_least(predicted: FloatArray, rows: IntArray, row: int | None) -> BoolArray:
    """Return a mask of the rows whose predicted value is at least that of `row`, or where either is unknown."""
    if row is None or not np.isfinite(predicted[row]):
        return np.ones(rows.shape, dtype=np.bool_)
    less: BoolArray = predicted[rows] < predicted[row]
    return ~less


def _same(columns: Columns, axes: Sequence[Axis], candidate: Candidate) -> BoolArray:
    """Return a mask of the rows that have the values of `candidate` on `axes`. It is True if there are no axes."""
    values = candidate.as_dict()
    same = [columns[axis.knob] == axis.encode(values.get(axis.knob, axis.neutral)) for axis in axes]
    return np.asarray(np.logical_and.reduce(same))


def _remove(pruned: Pruned, name: str, rows: IntArray, mask: BoolArray, trial: int = -1) -> Pruned:
    removed = rows[mask]
    if not removed.size:
        return pruned
    rules = pruned.rules if name in pruned.rules else (*pruned.rules, name)
    rule_of_row, trial_of_row = pruned.rule.copy(), pruned.trial.copy()
    rule_of_row[removed] = rules.index(name) + 1
    trial_of_row[removed] = trial
    return replace(pruned, rule=rule_of_row, trial=trial_of_row, rules=rules)
