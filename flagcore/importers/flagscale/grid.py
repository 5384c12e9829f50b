"""The strategy grid: FlagScale's order of candidates and its 31 pruning rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.space import IntArray
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.importers.flagscale.pruning_history import FLAGS, NESTING, SIZES, Entry, History, Values, in_order, ranks

RAN = (TrialState.MEASURED, TrialState.STOPPED)
ABSENT: Values = {**dict.fromkeys(NESTING), **dict.fromkeys(SIZES, 1), **dict.fromkeys(FLAGS, False)}
"""Values of knobs that a space does not have."""


class Grid:
    """Walks the grid and skips candidates that a rule prunes. Its state is rebuilt from the trials each time."""

    name = "grid"

    def next(self, context: SearchContext) -> Choice:
        """Return the next open row that no rule prunes, or none. `because` counts the rows that each rule skipped since
        the last trial.
        """
        ran = {context.space.find(trial.candidate): trial for trial in context.trials if trial.state in _FINISHED}
        histories, skipped = defaultdict[tuple[KnobValue, ...], History](History), dict[str, int]()
        for trial in ran.values():
            if trial.role is Role.BASELINE:  # it runs first, at any place of the grid
                histories[_other_knobs(context, trial.candidate)].add(_entry(context, trial))
        for row in _walk(
            context, np.union1d(context.open_rows, np.array([row for row in ran if row is not None], dtype=np.int64))
        ):
            if (previous := ran.get(row)) is not None:
                if previous.role is not Role.BASELINE:
                    histories[_other_knobs(context, previous.candidate)].add(_entry(context, previous))
                    skipped = {}
                continue
            candidate = context.space.candidate(row)
            entry, history = Entry({**ABSENT, **candidate.as_dict()}), histories[_other_knobs(context, candidate)]
            rule = entry.pruned_by = history.rule(entry)
            if rule is None:
                return Choice(row=row, because=f"next in the grid{_skip_text(skipped)}")
            history.add(entry)
            skipped[rule] = skipped.get(rule, 0) + 1
        return Choice(row=None, because=f"end of the grid{_skip_text(skipped)}")


def _other_knobs(context: SearchContext, candidate: Candidate) -> tuple[KnobValue, ...]:
    """Return the values of knobs that no rule compares: candidates that differ in them are not compared."""
    values = candidate.as_dict()
    return tuple(values.get(axis.knob, axis.neutral) for axis in context.space.axes if axis.is_unordered)


_FINISHED = frozenset(TrialState) - {TrialState.RUNNING, TrialState.INTERRUPTED}


def _walk(context: SearchContext, rows: IntArray) -> Iterator[int]:
    columns, axes = context.space.columns(rows), {axis.knob: axis for axis in context.space.axes}
    places = []
    for knob in [*(each for each in NESTING if each in axes), *(each for each in axes if each not in NESTING)]:
        codes = np.unique(columns[knob])
        values = [axes[knob].decode(int(code)) for code in codes]
        rank = ranks(knob, in_order(knob, set(values)))
        places.append(np.array([rank[value] for value in values])[np.searchsorted(codes, columns[knob])])
    yield from rows[np.lexsort(places[::-1])].tolist()


def _entry(context: SearchContext, trial: Trial) -> Entry:
    seconds = trial.measurement.step_time_s if trial.measurement and trial.state in RAN else None
    values = {**ABSENT, **trial.candidate.as_dict()}
    return Entry(values, seconds, trial.state is TrialState.OUT_OF_MEMORY)


def _skip_text(skipped: dict[str, int]) -> str:
    rules = ", ".join(f"{name} {count}" for name, count in skipped.items())
    return f"; skipped by history rule: {rules}" if rules else ""


STRATEGY: Strategy = Grid()
