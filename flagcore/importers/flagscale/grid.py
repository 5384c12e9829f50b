"""FlagScale's order of candidates and its 31 history rules, for those who want its search."""

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
"""Knobs that a space does not have."""


class Grid:
    """Walks the grid, passing over what a rule settles. Its state is made anew of the trials each time."""

    name = "grid"

    def next(self, context: SearchContext) -> Choice:
        """Return the next open row of the grid that no rule settles, or none; `because` names the rules that settled
        some on the way from the last trial."""
        ran = {context.space.find(trial.candidate): trial for trial in context.trials if trial.state in _KNOWN}
        histories, passed = defaultdict[tuple[KnobValue, ...], History](History), dict[str, int]()
        for trial in ran.values():
            if trial.role is Role.BASELINE:  # it runs first, wherever the grid has it
                histories[_apart(context, trial.candidate)].add(_entry(context, trial))
        for row in _walk(
            context, np.union1d(context.open_rows, np.array([row for row in ran if row is not None], dtype=np.int64))
        ):
            if (known := ran.get(row)) is not None:
                if known.role is not Role.BASELINE:
                    histories[_apart(context, known.candidate)].add(_entry(context, known))
                    passed = {}
                continue
            candidate = context.space.candidate(row)
            entry, history = Entry({**ABSENT, **candidate.as_dict()}), histories[_apart(context, candidate)]
            rule = entry.pruned_by = history.rule(entry)
            if rule is None:
                return Choice(row=row, because=f"the next of the grid{_told(passed)}")
            history.add(entry)
            passed[rule] = passed.get(rule, 0) + 1
        return Choice(row=None, because=f"the grid is at its end{_told(passed)}")


def _apart(context: SearchContext, candidate: Candidate) -> tuple[KnobValue, ...]:
    """Return the values of knobs that no rule of the history knows: those with other values prove nothing."""
    values = candidate.as_dict()
    return tuple(values.get(axis.knob, axis.neutral) for axis in context.space.axes if axis.apart)


_KNOWN = frozenset(TrialState) - {TrialState.RUNNING, TrialState.INTERRUPTED}


def _walk(context: SearchContext, rows: IntArray) -> Iterator[int]:
    """Yield rows in the order in which the grid comes to them."""
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


def _told(passed: dict[str, int]) -> str:
    rules = ", ".join(f"{name} {count}" for name, count in passed.items())
    return f"; passed over by history rule: {rules}" if rules else ""


STRATEGY: Strategy = Grid()
