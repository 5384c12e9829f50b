"""FlagScale's training tuner as it behaves: the order of its grid and its 31 history rules.

Follows `flagscale/runner/auto_tuner` of FlagOpen/FlagScale (`search/searcher.py`, `search/algorithm.py`,
`prune/history.py`, `utils.py`; 2025). A rule is a set of axes: a candidate is skipped if another one ran out of memory
that needs no more memory on each axis and is equal otherwise. Three rules also copy the result of the other candidate.
Two rules deviate from the pattern, as in FlagScale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Values: TypeAlias = "Mapping[str, Any]"
"""Knob values by name, as FlagScale writes them: flags are True or False, what does not apply is None."""

DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
MBS, SP, DIST_OPT = "micro_batch_size", "sequence_parallel", "use_distributed_optimizer"
VIRTUAL, RECOMPUTE = "num_layers_per_virtual_pipeline_stage", "use_recompute"
METHOD, GRANULARITY, LAYERS = "recompute_method", "recompute_granularity", "recompute_num_layers"
NESTING = (DP, TP, PP, CP, EP, DIST_OPT, SP, MBS, VIRTUAL, RECOMPUTE, METHOD, GRANULARITY, LAYERS)
"""The loops of the grid, outermost first. Candidates are compared by these thirteen knobs."""

SIZES, FLAGS = (DP, TP, PP, CP, EP, MBS), (DIST_OPT, SP, RECOMPUTE)

LISTED: Mapping[str, tuple[Any, ...]] = {
    DIST_OPT: (True, False),
    SP: (True, False),
    RECOMPUTE: (True, False),
    METHOD: ("uniform", "block"),
    GRANULARITY: ("full", "selective"),
}
"""The order of values of a knob on auto; numbers ascend."""


def in_order(knob: str, values: set[Any]) -> list[Any]:
    """Return the values of a knob in the order of the grid, without None."""
    given = values - {None}
    return sorted(given, key=LISTED[knob].index) if knob in LISTED else sorted(given)


def ranks(knob: str, order: Sequence[Any]) -> dict[Any, int]:
    """Return the place of each value in its list. Selective recompute, which has no method, counts as the first one."""
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
    """Return whether the new one recomputes less: not at all, or no more layers by block; or neither recomputes."""
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
    """Return whether the new one moves tensor to pipeline parallelism, their product the same."""
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
"""The knobs of each axis, and whether a candidate needs at least as much memory on them."""


@dataclass(frozen=True, slots=True)
class HistoryRule:
    """A set of axes. Two candidates may differ in the knobs `compared`; `also` is a condition on the older one."""

    axes: tuple[str, ...]
    compared: frozenset[str] = field(default=frozenset())
    also: Callable[[Values], bool] = lambda old: True

    @property
    def name(self) -> str:
        return "_".join(self.axes)

    def key(self, values: Values) -> tuple[Any, ...]:
        """Return the values that two candidates must share to be compared."""
        return tuple(value for knob, value in values.items() if knob not in self.compared)

    def prunes(self, new: Entry, old: Entry) -> bool:
        """Return whether `old` prunes `new`, and write into `new` the result that FlagScale then copies."""
        if self.axes in _WITH_RESULTS:
            verdict = _WITH_RESULTS[self.axes](new.values, old)
        else:
            more = all(AXES[name][1](new.values, old.values) for name in self.axes)
            verdict = "memory" if more and old.out_of_memory and self.also(old.values) else None
        if verdict == "memory":
            new.out_of_memory, new.performance = True, None
        elif verdict == "performance":
            new.out_of_memory, new.performance = old.out_of_memory, old.performance
        return verdict is not None


def _by_micro_batch(new: Values, old: Entry) -> str | None:
    """A smaller micro batch than one that ran gets its result; a larger one than one out of memory is pruned."""
    if old.values[MBS] > new[MBS] and old.performance:
        return "performance"
    return "memory" if _more_micro_batch(new, old.values) and old.out_of_memory else None


def _by_recompute(new: Values, old: Entry) -> str | None:
    """More recompute than one that ran gets its result; less (uniform: more layers) than an OOM is pruned."""
    then, both = old.values, new[RECOMPUTE] and old.values[RECOMPUTE]
    if new[RECOMPUTE] and not then[RECOMPUTE] and old.performance:
        return "performance"
    same_method = both and new[METHOD] == then[METHOD] and new[METHOD] is not None
    if same_method and old.performance and new[LAYERS] > then[LAYERS]:
        return "performance"
    if not new[RECOMPUTE] and then[RECOMPUTE] and old.out_of_memory:
        return "memory"
    if not same_method:  # what does not recompute has no number of layers
        return None
    worse = new[LAYERS] > then[LAYERS] if new[METHOD] == "uniform" else new[LAYERS] < then[LAYERS]
    return "memory" if worse and old.out_of_memory else None


def _by_sequence_parallel(new: Values, old: Entry) -> str | None:
    """Without sequence parallelism a candidate gets the result that it has with it, out of memory included."""
    if not _no_sequence_parallel(new, old.values):
        return None
    return "performance" if old.performance else "memory" if old.out_of_memory else None


_WITH_RESULTS: Mapping[tuple[str, ...], Callable[[Values, Entry], str | None]] = {
    ("mbs",): _by_micro_batch,
    ("recompute",): _by_recompute,
    ("sp",): _by_sequence_parallel,
}

_NAMES = """mbs; recompute; sp; mbs recompute; mbs sp; recompute sp; mbs recompute sp; tp_pp; tp_pp sp; tp_pp mbs;
tp_pp recompute; tp_pp mbs sp; tp_pp mbs recompute; tp_pp recompute sp; tp_pp mbs recompute sp; distopt; distopt mbs;
distopt recompute; distopt sp; distopt tp_pp; distopt mbs recompute; distopt mbs sp; distopt mbs tp_pp;
distopt recompute sp; distopt recompute tp_pp; distopt sp tp_pp; distopt mbs recompute sp; distopt mbs recompute tp_pp;
distopt mbs sp tp_pp; distopt recompute sp tp_pp; distopt mbs recompute sp tp_pp"""
"""The rules in the order in which they are asked: every set of the five axes but the empty one."""


def _rule(axes: tuple[str, ...]) -> HistoryRule:
    compared = frozenset(knob for name in axes for knob in AXES[name][0])
    if axes == ("tp_pp", "mbs"):  # also requires that the older candidate has sequence parallelism
        return HistoryRule(axes, compared, lambda old: bool(old[SP]))
    if axes == ("distopt", "mbs", "recompute", "sp"):  # requires equal and different sequence parallelism: never true
        return HistoryRule(axes, compared - {SP})
    return HistoryRule(axes, compared)


RULES = tuple(_rule(tuple(names.split())) for names in _NAMES.split(";"))


class History:
    """The candidates so far, run or skipped, and the rules over them."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._by_key = defaultdict[tuple[int, tuple[Any, ...]], list[Entry]](list)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        for place, rule in enumerate(RULES):
            self._by_key[place, rule.key(entry.values)].append(entry)

    def rule(self, new: Entry) -> str | None:
        """Return the first rule that prunes `new`, and write the copied result into `new`; None if no rule does."""
        for place, rule in enumerate(RULES):
            if any(rule.prunes(new, old) for old in self._by_key[place, rule.key(new.values)]):
                return rule.name
        return None
