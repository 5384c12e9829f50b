"""Reproduces FlagScale's training tuner: the order of its grid, its 31 history rules, memory pruning and priorities.

Source: `flagscale/runner/auto_tuner` of FlagOpen/FlagScale (`search/searcher.py`, `search/algorithm.py`, `tuner.py`,
`prune/history.py`, `prune/memory.py`, `utils.py`; 2025). A history rule is a set of axes. It skips a candidate if
another one ran out of memory that needs at most as much memory on each axis and is equal otherwise. Three rules also
copy the result of the other candidate. Two rules deviate from the pattern, as in FlagScale.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Values: TypeAlias = Mapping[str, Any]
"""Knob values by name in FlagScale's format: switches are True or False, knobs without effect are None."""

DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
MBS, SP, DIST_OPT = "micro_batch_size", "sequence_parallel", "use_distributed_optimizer"
VIRTUAL, RECOMPUTE = "num_layers_per_virtual_pipeline_stage", "use_recompute"
METHOD, GRANULARITY, LAYERS = "recompute_method", "recompute_granularity", "recompute_num_layers"
NESTING = (DP, TP, PP, CP, EP, DIST_OPT, SP, MBS, VIRTUAL, RECOMPUTE, METHOD, GRANULARITY, LAYERS)
"""The loops of the grid, outermost first. Rules compare candidates by these thirteen knobs."""

SIZES, FLAGS = (DP, TP, PP, CP, EP, MBS), (DIST_OPT, SP, RECOMPUTE)

VALUE_ORDER: Mapping[str, tuple[Any, ...]] = {
    DIST_OPT: (True, False),
    SP: (True, False),
    RECOMPUTE: (True, False),
    METHOD: ("uniform", "block"),
    GRANULARITY: ("full", "selective"),
}
"""The order of values of a knob with `auto`; numbers ascend."""


def sort_values(knob: str, values: set[Any]) -> list[Any]:
    """Return the values of a knob in the order of the grid, without None."""
    known = values - {None}
    return sorted(known, key=VALUE_ORDER[knob].index) if knob in VALUE_ORDER else sorted(known)


def ranks(knob: str, order: Sequence[Any]) -> dict[Any, int]:
    """Return the index of each value in its list. Selective recompute has no method and counts as the first method."""
    return {None: 0 if knob == METHOD else -1, **{value: rank for rank, value in enumerate(order)}}


@dataclass(slots=True)
class Entry:
    """One candidate in the tuner's history, run or skipped, with its measured or copied result."""

    values: Values
    performance: float | None = None
    out_of_memory: bool = False
    pruned_by: str | None = None


def _more_micro_batch(new: Values, old: Values) -> bool:
    return bool(old[MBS] < new[MBS])


def _less_recompute(new: Values, old: Values) -> bool:
    """Return whether `new` recomputes at most as much as `old`: nothing, or at most as many layers by block."""
    if bool(new[RECOMPUTE]) != bool(old[RECOMPUTE]):
        return not new[RECOMPUTE]
    if not new[RECOMPUTE]:
        return all(new[knob] == old[knob] for knob in (METHOD, GRANULARITY, LAYERS))
    if new[METHOD] == old[METHOD] == "block":
        return bool(new[LAYERS] <= old[LAYERS])
    both_uniform = new[METHOD] == old[METHOD] == "uniform"
    return both_uniform and (new[GRANULARITY], old[GRANULARITY]) == ("selective", "full")


def _no_sequence_parallel(new: Values, old: Values) -> bool:
    return not new[SP] and bool(old[SP])


def _less_tensor_parallel(new: Values, old: Values) -> bool:
    """Return whether `new` has less tensor and more pipeline parallelism with the same product."""
    return new[TP] * new[PP] == old[TP] * old[PP] and bool(new[TP] < old[TP])


def _no_distributed_optimizer(new: Values, old: Values) -> bool:
    return not new[DIST_OPT] and bool(old[DIST_OPT])


AXES: Mapping[str, tuple[tuple[str, ...], Callable[[Values, Values], bool]]] = {
    "mbs": ((MBS,), _more_micro_batch),
    "recompute": ((RECOMPUTE, METHOD, GRANULARITY, LAYERS), _less_recompute),
    "sp": ((SP,), _no_sequence_parallel),
    "tp_pp": ((TP, PP), _less_tensor_parallel),
    "distopt": ((DIST_OPT,), _no_distributed_optimizer),
}
"""The knobs of each axis, and a function that returns whether a candidate needs at least as much memory on them."""


@dataclass(frozen=True, slots=True)
class HistoryRule:
    """A set of axes. Two candidates may differ in the knobs `compared`; `condition` must hold for the older one."""

    axes: tuple[str, ...]
    compared: frozenset[str] = field(default=frozenset())
    condition: Callable[[Values], bool] = lambda old: True

    @property
    def name(self) -> str:
        return "_".join(self.axes)

    def key(self, values: Values) -> tuple[Any, ...]:
        """Return the values that two candidates must share to be compared."""
        return tuple(value for knob, value in values.items() if knob not in self.compared)

    def prunes(self, new: Entry, old: Entry) -> bool:
        """Return whether `old` prunes `new`, and set the result of `new` that FlagScale copies."""
        if self.axes in _COPYING_RULES:
            verdict = _COPYING_RULES[self.axes](new.values, old)
        else:
            needs_more = all(AXES[name][1](new.values, old.values) for name in self.axes)
            verdict = "memory" if needs_more and old.out_of_memory and self.condition(old.values) else None
        if verdict == "memory":
            new.out_of_memory, new.performance = True, None
        elif verdict == "performance":
            new.out_of_memory, new.performance = old.out_of_memory, old.performance
        return verdict is not None


def _by_micro_batch(new: Values, old: Entry) -> str | None:
    """Copy the result of a larger micro-batch; prune if a smaller one ran out of memory."""
    if old.values[MBS] > new[MBS] and old.performance:
        return "performance"
    return "memory" if _more_micro_batch(new, old.values) and old.out_of_memory else None


def _by_recompute(new: Values, old: Entry) -> str | None:
    """Copy the result of a candidate with less recompute; prune if one with more recompute ran out of memory."""
    previous, both_recompute = old.values, new[RECOMPUTE] and old.values[RECOMPUTE]
    if new[RECOMPUTE] and not previous[RECOMPUTE] and old.performance:
        return "performance"
    same_method = both_recompute and new[METHOD] == previous[METHOD] and new[METHOD] is not None
    if same_method and old.performance and new[LAYERS] > previous[LAYERS]:
        return "performance"
    if not new[RECOMPUTE] and previous[RECOMPUTE] and old.out_of_memory:
        return "memory"
    if not same_method:  # what does not recompute has no number of layers
        return None
    needs_more = new[LAYERS] > previous[LAYERS] if new[METHOD] == "uniform" else new[LAYERS] < previous[LAYERS]
    return "memory" if needs_more and old.out_of_memory else None


def _by_sequence_parallel(new: Values, old: Entry) -> str | None:
    """Copy the result of the same candidate with sequence parallelism, also if it ran out of memory."""
    if not _no_sequence_parallel(new, old.values):
        return None
    return "performance" if old.performance else "memory" if old.out_of_memory else None


_COPYING_RULES: Mapping[tuple[str, ...], Callable[[Values, Entry], str | None]] = {
    ("mbs",): _by_micro_batch,
    ("recompute",): _by_recompute,
    ("sp",): _by_sequence_parallel,
}

_NAMES = """mbs; recompute; sp; mbs recompute; mbs sp; recompute sp; mbs recompute sp; tp_pp; tp_pp sp; tp_pp mbs;
tp_pp recompute; tp_pp mbs sp; tp_pp mbs recompute; tp_pp recompute sp; tp_pp mbs recompute sp; distopt; distopt mbs;
distopt recompute; distopt sp; distopt tp_pp; distopt mbs recompute; distopt mbs sp; distopt mbs tp_pp;
distopt recompute sp; distopt recompute tp_pp; distopt sp tp_pp; distopt mbs recompute sp; distopt mbs recompute tp_pp;
distopt mbs sp tp_pp; distopt recompute sp tp_pp; distopt mbs recompute sp tp_pp"""
"""The rules in their order: all non-empty sets of the five axes."""


def _rule(axes: tuple[str, ...]) -> HistoryRule:
    compared = frozenset(knob for name in axes for knob in AXES[name][0])
    if axes == ("tp_pp", "mbs"):  # also requires that the older candidate has sequence parallelism
        return HistoryRule(axes, compared, lambda old: bool(old[SP]))
    # requires equal and different sequence parallelism, so it never applies
    if axes == ("distopt", "mbs", "recompute", "sp"):
        return HistoryRule(axes, compared - {SP})
    return HistoryRule(axes, compared)


RULES = tuple(_rule(tuple(names.split())) for names in _NAMES.split(";"))


class History:
    """The candidates so far, run or skipped, and the rules for new ones."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._by_key = defaultdict[tuple[int, tuple[Any, ...]], list[Entry]](list)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        for index, rule in enumerate(RULES):
            self._by_key[index, rule.key(entry.values)].append(entry)

    def rule(self, new: Entry) -> str | None:
        """Return the first rule that prunes `new` and copy its result into `new`; None if no rule does."""
        for index, rule in enumerate(RULES):
            if any(rule.prunes(new, old) for old in self._by_key[index, rule.key(new.values)]):
                return rule.name
        return None


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
