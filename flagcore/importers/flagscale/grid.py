"""The strategy `grid`: FlagScale's order of candidates with its 31 pruning rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.space import IntArray
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.importers.flagscale.pruning_history import (
    FLAGS,
    NESTING,
    SIZES,
    Entry,
    History,
    Values,
    ranks,
    sort_values,
)

RAN_STATES = (TrialState.MEASURED, TrialState.STOPPED)
DEFAULTS: Values = {**dict.fromkeys(NESTING), **dict.fromkeys(SIZES, 1), **dict.fromkeys(FLAGS, False)}
"""Values of knobs that are missing in a space."""


class Grid:
    """Enumerates the grid without candidates that a rule prunes. Each call rebuilds its state from the trials."""

    name = "grid"

    def next(self, context: SearchContext) -> Choice:
        """Return the next open row that no rule prunes, None at the end of the grid.

        `because` has the number of rows that each rule skipped since the last trial.
        """
        finished = {
            context.space.find(trial.candidate): trial for trial in context.trials if trial.state in _FINISHED_STATES
        }
        histories, skip_counts = defaultdict[tuple[KnobValue, ...], History](History), dict[str, int]()
        for trial in finished.values():
            if trial.role is Role.BASELINE:  # it runs first, independent of its position in the grid
                histories[_other_knobs(context, trial.candidate)].add(_entry(context, trial))
        for row in _enumerate(
            context,
            np.union1d(context.open_rows, np.array([row for row in finished if row is not None], dtype=np.int64)),
        ):
            if (previous := finished.get(row)) is not None:
                if previous.role is not Role.BASELINE:
                    histories[_other_knobs(context, previous.candidate)].add(_entry(context, previous))
                    skip_counts = {}
                continue
            candidate = context.space.candidate(row)
            entry, history = (
                Entry({**DEFAULTS, **candidate.as_dict()}),
                histories[_other_knobs(context, candidate)],
            )
            rule = entry.pruned_by = history.rule(entry)
            if rule is None:
                return Choice(row=row, because=f"next in the grid{_skip_text(skip_counts)}")
            history.add(entry)
            skip_counts[rule] = skip_counts.get(rule, 0) + 1
        return Choice(row=None, because=f"end of the grid{_skip_text(skip_counts)}")


def _other_knobs(context: SearchContext, candidate: Candidate) -> tuple[KnobValue, ...]:
    """Return the values of knobs that rules ignore; rules only compare candidates with the same values of them."""
    values = candidate.as_dict()
    return tuple(values.get(axis.knob, axis.neutral) for axis in context.space.axes if axis.is_unordered)


_FINISHED_STATES = frozenset(TrialState) - {TrialState.RUNNING, TrialState.INTERRUPTED}


def _enumerate(context: SearchContext, rows: IntArray) -> Iterator[int]:
    columns, axes = context.space.columns(rows), {axis.knob: axis for axis in context.space.axes}
    positions = []
    for knob in [*(each for each in NESTING if each in axes), *(each for each in axes if each not in NESTING)]:
        codes = np.unique(columns[knob])
        values = [axes[knob].decode(int(code)) for code in codes]
        rank = ranks(knob, sort_values(knob, set(values)))
        positions.append(np.array([rank[value] for value in values])[np.searchsorted(codes, columns[knob])])
    yield from rows[np.lexsort(positions[::-1])].tolist()


def _entry(context: SearchContext, trial: Trial) -> Entry:
    seconds = trial.measurement.step_time_s if trial.measurement and trial.state in RAN_STATES else None
    values = {**DEFAULTS, **trial.candidate.as_dict()}
    return Entry(values, seconds, trial.state is TrialState.OUT_OF_MEMORY)


def _skip_text(skip_counts: dict[str, int]) -> str:
    rules = ", ".join(f"{name} {count}" for name, count in skip_counts.items())
    return f"; skipped by history rule: {rules}" if rules else ""


STRATEGY: Strategy = Grid()
