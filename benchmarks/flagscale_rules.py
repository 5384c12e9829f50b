"""FlagScale's training tuner as it behaves: its grid's order, 31 history rules, copied results, memory pruning.

Written from what `flagscale/runner/auto_tuner` of FlagOpen/FlagScale does (`search/searcher.py`, `search/algorithm.py`,
`prune/history.py`, `prune/memory.py`, `utils.py`, `tuner.py`; 2025). One rule is a set of axes: a candidate that needs
no less memory on each of them, all else equal, than one that ran out of memory is not run. Three rules also give a
candidate that they skip the result of another one. Two rules have drifted from their pattern; they are kept so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Strategy: TypeAlias = "Mapping[str, Any]"
"""Knob values by name, as FlagScale writes them: flags are True or False, what does not apply is None."""

DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
MBS, SP, DIST_OPT = "micro_batch_size", "sequence_parallel", "use_distributed_optimizer"
VIRTUAL, RECOMPUTE = "num_layers_per_virtual_pipeline_stage", "use_recompute"
METHOD, GRANULARITY, LAYERS = "recompute_method", "recompute_granularity", "recompute_num_layers"
NESTING = (DP, TP, PP, CP, EP, DIST_OPT, SP, MBS, VIRTUAL, RECOMPUTE, METHOD, GRANULARITY, LAYERS)
"""The loops of the grid, outermost first; these thirteen are also what two candidates are compared by."""

LISTED: Mapping[str, tuple[Any, ...]] = {
    DIST_OPT: (True, False),
    SP: (True, False),
    RECOMPUTE: (True, False),
    METHOD: ("uniform", "block"),
    GRANULARITY: ("full", "selective"),
}
"""The order in which the values of a knob on auto are listed; numbers ascend."""

UPWARDS_FOR_MEMORY = (DP, GRANULARITY, MBS)
DOWNWARDS_FOR_MEMORY = (DIST_OPT, TP, PP, EP, METHOD, LAYERS, CP, RECOMPUTE)
"""How a list is sorted if `algo.priority` is memory; the other way round if it is performance."""


def grid_order(strategies: Sequence[Strategy], priority: str | None = None) -> list[int]:
    """Return the places of `strategies` in the order in which the grid comes to them.

    `priority` is FlagScale's `algo.priority`: None (its default), memory or performance.
    """
    ranks = {knob: _ranks(knob, {each[knob] for each in strategies}, priority) for knob in NESTING}
    return sorted(range(len(strategies)), key=lambda at: [ranks[knob][strategies[at][knob]] for knob in NESTING])


def _ranks(knob: str, values: set[Any], priority: str | None) -> dict[Any, int]:
    """Return the place of each value in its list. Selective recompute, without a method, comes with the first one."""
    given = values - {None}
    if priority and knob == SP:
        order = sorted(given, reverse=True)
    elif priority and knob in (*UPWARDS_FOR_MEMORY, *DOWNWARDS_FOR_MEMORY):
        order = sorted(given, reverse=(knob in DOWNWARDS_FOR_MEMORY) == (priority == "memory"))
    else:
        order = sorted(given, key=LISTED[knob].index) if knob in LISTED else sorted(given)
    return {None: 0 if knob == METHOD else -1, **{value: rank for rank, value in enumerate(order)}}


@dataclass(slots=True)
class Entry:
    """A line of the tuner's history: what it thinks of a candidate, run or not."""

    strategy: Strategy
    performance: float | None = None
    out_of_memory: bool = False
    pruned_by: str | None = None


def more_micro_batch(new: Strategy, old: Strategy) -> bool:
    """Return whether the new micro batch is larger."""
    return bool(old[MBS] < new[MBS])


def less_recompute(new: Strategy, old: Strategy) -> bool:
    """Return whether the new one recomputes less: not at all, or no more layers by block; or neither recomputes."""
    if bool(new[RECOMPUTE]) != bool(old[RECOMPUTE]):
        return not new[RECOMPUTE]
    if not new[RECOMPUTE]:
        return all(new[knob] == old[knob] for knob in (METHOD, GRANULARITY, LAYERS))
    if new[METHOD] == old[METHOD] == "block":
        return bool(new[LAYERS] <= old[LAYERS])
    both_uniform = new[METHOD] == old[METHOD] == "uniform"
    return both_uniform and (new[GRANULARITY], old[GRANULARITY]) == ("selective", "full")


def no_sequence_parallel(new: Strategy, old: Strategy) -> bool:
    """Return whether the new one lacks sequence parallelism that the old one has."""
    return not new[SP] and bool(old[SP])


def less_tensor_parallel(new: Strategy, old: Strategy) -> bool:
    """Return whether the new one moves tensor to pipeline parallelism, their product the same."""
    return new[TP] * new[PP] == old[TP] * old[PP] and bool(new[TP] < old[TP])


def no_distributed_optimizer(new: Strategy, old: Strategy) -> bool:
    """Return whether the new one lacks the distributed optimizer that the old one has."""
    return not new[DIST_OPT] and bool(old[DIST_OPT])


@dataclass(frozen=True, slots=True)
class Axis:
    """Knobs that one rule looks at together, and when a candidate needs no less memory on them."""

    name: str
    knobs: tuple[str, ...]
    needs_more: Callable[[Strategy, Strategy], bool]


AXES = {
    axis.name: axis
    for axis in (
        Axis("mbs", (MBS,), more_micro_batch),
        Axis("recompute", (RECOMPUTE, METHOD, GRANULARITY, LAYERS), less_recompute),
        Axis("sp", (SP,), no_sequence_parallel),
        Axis("tp_pp", (TP, PP), less_tensor_parallel),
        Axis("distopt", (DIST_OPT,), no_distributed_optimizer),
    )
}


@dataclass(frozen=True, slots=True)
class HistoryRule:
    """One of the 31: a set of axes. `compared` are the knobs in which the two candidates may differ."""

    axes: tuple[str, ...]
    compared: frozenset[str] = field(default=frozenset())
    also: Callable[[Strategy], bool] = lambda old: True

    @property
    def name(self) -> str:
        """The axes' names together."""
        return "_".join(self.axes)

    def judge(self, new: Entry, old: Entry) -> bool:
        """Return whether `old` settles `new`, and if so write into `new` what FlagScale then believes of it."""
        if self.axes in _WITH_RESULTS:
            verdict = _WITH_RESULTS[self.axes](new.strategy, old)
        else:
            more = all(AXES[name].needs_more(new.strategy, old.strategy) for name in self.axes)
            verdict = "memory" if more and old.out_of_memory and self.also(old.strategy) else None
        if verdict == "memory":
            new.out_of_memory, new.performance = True, None
        elif verdict == "performance":
            new.out_of_memory, new.performance = old.out_of_memory, old.performance
        return verdict is not None


def _by_micro_batch(new: Strategy, old: Entry) -> str | None:
    """A smaller micro batch than one that ran gets its result; a larger one than one out of memory is out too."""
    if old.strategy[MBS] > new[MBS] and old.performance:
        return "performance"
    return "memory" if more_micro_batch(new, old.strategy) and old.out_of_memory else None


def _by_recompute(new: Strategy, old: Entry) -> str | None:
    """More recompute than one that ran gets its result; less (or, uniform, more layers) than one out is out too."""
    then, both = old.strategy, new[RECOMPUTE] and old.strategy[RECOMPUTE]
    if new[RECOMPUTE] and not then[RECOMPUTE] and old.performance:
        return "performance"
    same_method = both and new[METHOD] == then[METHOD] and new[METHOD] is not None
    if same_method and old.performance and new[LAYERS] > then[LAYERS]:
        return "performance"
    if not new[RECOMPUTE] and then[RECOMPUTE] and old.out_of_memory:
        return "memory"
    worse = new[LAYERS] > then[LAYERS] if new[METHOD] == "uniform" else bool(same_method) and new[LAYERS] < then[LAYERS]
    return "memory" if same_method and worse and old.out_of_memory else None


def _by_sequence_parallel(new: Strategy, old: Entry) -> str | None:
    """Without sequence parallelism a candidate gets the result that it has with it, out of memory included."""
    if not no_sequence_parallel(new, old.strategy):
        return None
    return "performance" if old.performance else "memory" if old.out_of_memory else None


_WITH_RESULTS: Mapping[tuple[str, ...], Callable[[Strategy, Entry], str | None]] = {
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
    compared = frozenset(knob for name in axes for knob in AXES[name].knobs)
    if axes == ("tp_pp", "mbs"):  # it also asks that the one that ran out has sequence parallelism
        return HistoryRule(axes, compared, lambda old: bool(old[SP]))
    if axes == ("distopt", "mbs", "recompute", "sp"):  # it wants the same and other sequence parallelism: never fires
        return HistoryRule(axes, compared - {SP})
    return HistoryRule(axes, compared)


RULES = tuple(_rule(tuple(names.split())) for names in _NAMES.split(";"))


@dataclass(slots=True)
class FlagScale:
    """The tuner: hands out candidates in its order, skips what its rules settle, and remembers both.

    `memory` are the estimates of its memory model in bytes, one a strategy, if it is on: candidates then go from the
    largest estimate down, and those outside 0.2 to 0.8 of `device_bytes` are never run.
    """

    strategies: Sequence[Strategy]
    priority: str | None = None
    memory: Sequence[float] | None = None
    device_bytes: float = float("inf")
    history: list[Entry] = field(default_factory=list)
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
            entry.pruned_by = self._memory_rule(place, entry) or self._history_rule(entry)
            self.history.append(entry)
            if entry.pruned_by is None:
                return place
        return None

    def tell(self, performance: float | None) -> None:
        """Keep the seconds of a step of what `next` returned last, None if it ran out of memory."""
        self.history[-1].performance, self.history[-1].out_of_memory = performance, performance is None

    def _memory_rule(self, place: int, entry: Entry) -> str | None:
        if self.memory is None:
            return None
        share = self.memory[place] / self.device_bytes
        entry.out_of_memory = share > 1.0
        return "memory_model" if share > 1.0 else "memory_utilization" if not 0.2 <= share <= 0.8 else None

    def _history_rule(self, entry: Entry) -> str | None:
        for rule in RULES:
            for old in self.history:
                if _beside(rule.compared, entry.strategy, old.strategy) and rule.judge(entry, old):
                    return rule.name
        return None


def _beside(compared: frozenset[str], new: Strategy, old: Strategy) -> bool:
    """Return whether two candidates are the same but for the knobs in `compared`."""
    return all(new[knob] == old[knob] for knob in NESTING if knob not in compared)
