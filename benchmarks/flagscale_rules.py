"""Reproduces FlagScale's training tuner with its memory pruning and priorities.

Order and history rules are those of the strategy `grid`, `flagcore/engines/flagscale/grid.py`. The source
of the rest is `flagscale/runner/auto_tuner` of FlagOpen/FlagScale (`prune/memory.py`, `search/searcher.py`, `tuner.py`;
2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flagcore.engines.flagscale.grid import (
    CP,
    DIST_OPT,
    DP,
    EP,
    GRANULARITY,
    LAYERS,
    MBS,
    METHOD,
    NESTING,
    PP,
    RECOMPUTE,
    SP,
    TP,
    Entry,
    History,
    Values,
    ranks,
    sort_values,
)

UPWARDS_FOR_MEMORY = (DP, GRANULARITY, MBS)
DOWNWARDS_FOR_MEMORY = (DIST_OPT, TP, PP, EP, METHOD, LAYERS, CP, RECOMPUTE)
"""The order of a list if `algo.priority` is memory; it is reversed for performance."""


def grid_order(strategies: Sequence[Values], priority: str | None = None) -> list[int]:
    """Return the indices of `strategies` in the order of the grid.

    `priority` is FlagScale's `algo.priority`: None (its default), memory or performance.
    """
    places = {knob: ranks(knob, _listed(knob, {each[knob] for each in strategies}, priority)) for knob in NESTING}
    return sorted(range(len(strategies)), key=lambda at: [places[knob][strategies[at][knob]] for knob in NESTING])


def _listed(knob: str, values: set[Any], priority: str | None) -> list[Any]:
    arguments = values - {None}
    if priority and knob == SP:
        return sorted(arguments, reverse=True)
    if priority and knob in (*UPWARDS_FOR_MEMORY, *DOWNWARDS_FOR_MEMORY):
        return sorted(arguments, reverse=(knob in DOWNWARDS_FOR_MEMORY) == (priority == "memory"))
    return sort_values(knob, values)


@dataclass(slots=True)
class FlagScale:
    """The tuner: it returns candidates in its order, skips those that its rules prune, and records both.

    `memory` are the estimates of its memory model in bytes, one per strategy, if the model is on. Candidates are then
    sorted by descending estimate, and those outside of 0.2 to 0.8 of `device_bytes` never run.
    """

    strategies: Sequence[Values]
    priority: str | None = None
    memory: Sequence[float] | None = None
    device_bytes: float = float("inf")
    _known: History = field(default_factory=History)
    _order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = grid_order(self.strategies, self.priority)
        if self.memory is not None:
            estimates = self.memory
            self._order.sort(key=lambda at: estimates[at], reverse=True)

    def next(self) -> int | None:
        """Return the index of the next strategy to run, None at the end of the grid."""
        while self._order:
            place = self._order.pop(0)
            entry = Entry(self.strategies[place])
            entry.pruned_by = self._memory_rule(place, entry) or self._known.rule(entry)
            self._known.add(entry)
            if entry.pruned_by is None:
                return place
        return None

    @property
    def history(self) -> list[Entry]:
        """The strategies that were returned or skipped, in order."""
        return self._known.entries

    def tell(self, performance: float | None) -> None:
        """Record the step time of the last strategy of `next` in seconds, None if it ran out of memory."""
        self.history[-1].performance, self.history[-1].out_of_memory = performance, performance is None

    def _memory_rule(self, index: int, entry: Entry) -> str | None:
        if self.memory is None:
            return None
        share = self.memory[index] / self.device_bytes
        entry.out_of_memory = share > 1.0
        return "memory_model" if share > 1.0 else "memory_utilization" if not 0.2 <= share <= 0.8 else None
