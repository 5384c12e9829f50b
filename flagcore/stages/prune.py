"""prune: rule candidates out before they cost anything. Each removal has a rule, and a learned one its trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flagcore.contracts import PruningRule, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.knowledge import DOES_NOT_FIT, Pruned
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Columns, IntArray, Space
from flagcore.domain.trial import Trial, TrialState
from flagcore.errors import FlagError

CHUNK = 1 << 16
"""Candidates of which a rule is asked at once."""

AS_MUCH_MEMORY = "needs_as_much_memory_as_one_that_ran_out"
AS_MUCH_WORK = "does_the_work_of_a_measured_one_and_more"
PREDICTED_SLOWER = "predicted_slower_than_a_measured_one"
LEARNED = {
    DOES_NOT_FIT: "its predicted memory is more than a device has",
    AS_MUCH_MEMORY: "a trial ran out of memory, and this one needs at least as much on every knob",
    AS_MUCH_WORK: "a trial was measured, and this one does the same work and recomputes more",
    PREDICTED_SLOWER: "its predicted interval lies above that of a candidate that was measured",
}
"""What the rules of this stage say, by name."""


def prune(
    space: Space,
    predictions: Predictions,
    workload: Workload,
    rules: Sequence[PruningRule],
    trials: Sequence[Trial],
    before: Pruned | None = None,
) -> Pruned:
    """Return what is ruled out by prediction, by `rules` and by what `trials` proved.

    With `before`, the outcome of an earlier call, only trials that are new are applied.
    """
    pruned = before or _by_prediction(space, predictions, rules)
    for trial in trials:
        if trial.number not in pruned.seen:
            pruned = replace(_by_trial(pruned, space, predictions, workload, trial), seen=pruned.seen | {trial.number})
    return pruned


def _by_prediction(space: Space, predictions: Predictions, rules: Sequence[PruningRule]) -> Pruned:
    size = len(space)
    start = Pruned(rule=np.zeros(size, dtype=np.int16), trial=np.full(size, -1, dtype=np.int64))
    pruned = _remove(start, DOES_NOT_FIT, np.arange(size), ~predictions.fits)
    for rule in rules:
        rows = pruned.open_rows
        try:
            pieces = [rows[start : start + CHUNK] for start in range(0, rows.size, CHUNK)]
            masks = [_asked(rule, space.columns(piece), predictions.take(piece)) for piece in pieces]
            pruned = _remove(pruned, rule.name, rows, np.concatenate([np.zeros(0, dtype=np.bool_), *masks]))
        except Exception as error:  # a plugin's rule costs only itself
            said = str(error) if isinstance(error, FlagError) else f"{type(error).__name__}: {error}"
            told = f"pruning rule {rule.name} is left out: {said}"
            pruned = replace(pruned, broken_rules=(*pruned.broken_rules, told))
    return pruned


def _asked(rule: PruningRule, columns: Columns, predictions: Predictions) -> BoolArray:
    """Return what a rule says of some rows. Raises TypeError for anything but a truth value a row."""
    mask, shape = np.asarray(rule.prunes(columns, predictions)), predictions.step_time_s.shape
    if mask.dtype != np.bool_ or mask.shape != shape:
        raise TypeError(f"answered {mask.dtype} of shape {mask.shape}, not a truth value a row ({shape[0]})")
    return mask


def _by_trial(pruned: Pruned, space: Space, predictions: Predictions, workload: Workload, trial: Trial) -> Pruned:
    rows = pruned.open_rows
    if not rows.size or trial.state not in (TrialState.OUT_OF_MEMORY, TrialState.MEASURED):
        return pruned
    columns = space.columns(rows)
    if trial.state is TrialState.OUT_OF_MEMORY:
        mask = workload.needs_at_least(columns, trial.candidate) & ~_is(columns, space, trial.candidate)
        return _remove(pruned, AS_MUCH_MEMORY, rows, mask, trial.number)
    mask = workload.takes_at_least(columns, trial.candidate) & ~_is(columns, space, trial.candidate)
    pruned = _remove(pruned, AS_MUCH_WORK, rows, mask, trial.number)
    row = space.find(trial.candidate)
    if row is None or not np.isfinite(predictions.high_s[row]):
        return pruned
    rows = pruned.open_rows
    return _remove(pruned, PREDICTED_SLOWER, rows, predictions.low_s[rows] > predictions.high_s[row], trial.number)


def _is(columns: Columns, space: Space, candidate: Candidate) -> BoolArray:
    values = candidate.as_dict()
    same = [columns[axis.knob] == axis.encode(values.get(axis.knob, axis.neutral)) for axis in space.axes]
    equal: BoolArray = np.logical_and.reduce(same)
    return equal


def _remove(pruned: Pruned, name: str, rows: IntArray, mask: BoolArray, trial: int = -1) -> Pruned:
    """Return `pruned` without those of `rows` where `mask` is True."""
    gone = rows[mask]
    if not gone.size:
        return pruned
    rules = pruned.rules if name in pruned.rules else (*pruned.rules, name)
    rule, behind = pruned.rule.copy(), pruned.trial.copy()
    rule[gone] = rules.index(name) + 1
    behind[gone] = trial
    return replace(pruned, rule=rule, trial=behind, rules=rules)
