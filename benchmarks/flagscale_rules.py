"""FlagScale's training tuner as it behaves, its memory pruning and priorities included.

Order and history rules are those of the strategy `grid`, `flagcore/importers/flagscale/pruning_history.py`; the rest
is written from `flagscale/runner/auto_tuner` of FlagOpen/FlagScale (`prune/memory.py`,
`search/searcher.py`, `tuner.py`; 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flagcore.importers.flagscale.pruning_history import (
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
    in_order,
    ranks,
)

UPWARDS_FOR_MEMORY = (DP, GRANULARITY, MBS)
DOWNWARDS_FOR_MEMORY = (DIST_OPT, TP, PP, EP, METHOD, LAYERS, CP, RECOMPUTE)
"""How a list is sorted if `algo.priority` is memory; the other way round if it is performance."""


def grid_order(strategies: Sequence[Values], priority: str | None = None) -> list[int]:
    """Return the places of `strategies` in the order in which the grid comes to them.

    `priority` is FlagScale's `algo.priority`: None (its default), memory or performance.
    """
    places = {knob: ranks(knob, _listed(knob, {each[knob] for each in strategies}, priority)) for knob in NESTING}
    return sorted(range(len(strategies)), key=lambda at: [places[knob][strategies[at][knob]] for knob in NESTING])


def _listed(knob: str, values: set[Any], priority: str | None) -> list[Any]:
    given = values - {None}
    if priority and knob == SP:
        return sorted(given, reverse=True)
    if priority and knob in (*UPWARDS_FOR_MEMORY, *DOWNWARDS_FOR_MEMORY):
        return sorted(given, reverse=(knob in DOWNWARDS_FOR_MEMORY) == (priority == "memory"))
    return in_order(knob, values)


@dataclass(slots=True)
class FlagScale:
    """The tuner: hands out candidates in its order, skips what its rules settle, and remembers both.

    `memory` are the estimates of its memory model in bytes, one a strategy, if it is on: candidates then go from the
    largest estimate down, and those outside 0.2 to 0.8 of `device_bytes` are never run.
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
        """Return the place of the next strategy to run, None when the grid is at its end."""
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
        """What was handed out or skipped, in order."""
        return self._known.entries

    def tell(self, performance: float | None) -> None:
        """Keep the seconds of a step of what `next` returned last, None if it ran out of memory."""
        self.history[-1].performance, self.history[-1].out_of_memory = performance, performance is None

    def _memory_rule(self, place: int, entry: Entry) -> str | None:
        if self.memory is None:
            return None
        share = self.memory[place] / self.device_bytes
        entry.out_of_memory = share > 1.0
        return "memory_model" if share > 1.0 else "memory_utilization" if not 0.2 <= share <= 0.8 else None
