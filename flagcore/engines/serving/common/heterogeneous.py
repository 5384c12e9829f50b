"""Instances of several sizes on one set of devices, as a word such as 4+2+2."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.objective import is_rate
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common.hardware import CORES, DP, INSTANCES, PP, SIZES, TP, Hardware, count
from flagcore.errors import SpecError

MAX_PARTS = 16
"""For more cards, sizes are multiples of the smallest power of two that gives at most as many parts."""
WHOLE = ", or have all devices of several hosts"
_WORD = re.compile(r"\d{1,6}(\+\d{1,6})+")


def sizes(word: str) -> tuple[int, ...]:
    """Return the devices of each instance, the largest first."""
    return tuple(sorted((int(part) for part in word.split("+")), reverse=True))


def parse_sizes(value: object, key: str) -> str:
    """Return the value of `key` as a word, the largest instance first. Raises SpecError."""
    fix = f"give the devices of each instance, such as 4+2+2; equal ones are {INSTANCES} and {TP}"
    if not isinstance(value, str) or not _WORD.fullmatch(value.replace(" ", "")):
        raise SpecError(key=key, value=value, problem="is not a valid value", fix=fix)
    parts = sizes(value.replace(" ", ""))
    if not parts[-1] or len(set(parts)) == 1:
        problem = "has an instance without devices" if not parts[-1] else "has equal instances"
        raise SpecError(key=key, value=value, problem=problem, fix=fix)
    return "+".join(map(str, parts))


def words(task: Task) -> tuple[str, ...]:
    """Return every word of a task in the order of the codes: what its cards allow, then what its spec names."""
    spec, hardware = task.spec, Hardware.of(task)
    flags = {flag.lstrip("-").replace("-", "_"): value for flag, value in spec.serve.engine_args.items()}
    named = {"auto_tuner.space": spec.space, "auto_tuner.baseline": spec.baseline or {}, "serve.engine_args": flags}
    found = [(values[SIZES], f"{where}.{SIZES}") for where, values in named.items() if SIZES in values]
    several = [(each, key) for value, key in found for each in (value if isinstance(value, tuple) else (value,))]
    asked = [parse_sizes(each, key) for each, key in several if each not in (None, "auto")]
    return tuple(dict.fromkeys((*_of(hardware.cards), *asked)))


def worth_trying(task: Task) -> tuple[KnobValue, ...]:
    """Return not set, and for a rate all splits of all cards into powers of two."""
    if not is_rate(task.spec.objective):
        return (None,)
    cards = Hardware.of(task).cards
    return (None, *(word for word in _of(cards) if sum(sizes(word)) == cards and _are_powers_of_two(sizes(word))))


@lru_cache(maxsize=16)
def _of(cards: int) -> tuple[str, ...]:
    """Return the unequal splits of at most `cards`: all for up to MAX_PARTS, for more those of large powers of two."""
    unit = 1
    while cards // unit > MAX_PARTS:
        unit *= 2
    found: list[tuple[int, ...]] = []

    def grow(parts: tuple[int, ...], left: int, most: int) -> None:
        if len(parts) > 1 and len(set(parts)) > 1:
            found.append(parts)
        for part in range(min(left, most), 0, -1):
            if unit == 1 or part & (part - 1) == 0:
                grow((*parts, part), left - part, part)

    grow((), cards // unit, cards // unit)
    return tuple("+".join(str(part * unit) for part in parts) for parts in found)


def _are_powers_of_two(parts: tuple[int, ...]) -> bool:
    return all(part & (part - 1) == 0 for part in parts)


def rules(task: Task, others: tuple[str, ...], *, heads: bool, span: bool) -> tuple[Rule, ...]:
    """Return the rules that make a split illegal. `others` are knobs that must be 1; `heads`: TP ranks have whole
    heads; `span`: an instance may span hosts."""
    hardware, model = Hardware.of(task), task.spec.model
    span = span and not hardware.on_cores
    known = [(), *(sizes(word) for word in words(task))]
    groups, latent = model.num_query_groups, model.multi_latent_attention

    def uneven(size: int) -> bool:
        whole = model.num_attention_heads % size == 0 and (latent or groups % size == 0 or size % groups == 0)
        return heads and not hardware.on_cores and not whole

    def misplaced(parts: tuple[int, ...]) -> bool:
        return on_hosts(parts, hardware) is None or (not span and max(parts, default=0) > hardware.per_host)

    return (
        Rule(
            name="hosts_of_sizes",
            knobs=(SIZES,),
            message=f"each of {SIZES} must fit on a host of {hardware.per_host} devices" + (WHOLE if span else ""),
            broken=_by_code(known, misplaced),
        ),
        Rule(
            name="cards_of_sizes",
            knobs=(SIZES,),
            message=f"the instances of {SIZES} must not have more than the {hardware.cards} devices together",
            broken=_by_code(known, lambda parts: sum(parts) > hardware.cards),
        ),
        Rule(
            name="heads_of_sizes",
            knobs=(SIZES,),
            message=f"each of {SIZES} must divide num_attention_heads = {model.num_attention_heads}, and be a multiple "
            f"or a divisor of num_query_groups = {groups}",
            broken=_by_code(known, lambda parts: any(uneven(size) for size in parts)),
        ),
        Rule(
            name="sizes_are_tensor_ranks",
            knobs=(SIZES, *others),
            message=f"{' and '.join(others)} must be 1 with {SIZES}, whose devices split matrices",
            broken=lambda c: (c[SIZES] > 0) & np.logical_or.reduce([c[knob] > 1 for knob in others]),
        ),
    )


def _by_code(known: list[tuple[int, ...]], of: Callable[[tuple[int, ...]], bool]) -> Callable[[Columns], BoolArray]:
    table = np.array([of(parts) for parts in known], dtype=np.bool_)
    return lambda columns: table[columns[SIZES]]


def merges(*threads: str) -> tuple[Merge, ...]:
    """Return the merges of knobs that sizes replace: instances, TP and, on cores, `threads`."""

    def fixed(knob: str, code: int) -> Callable[[Columns], Columns]:
        return lambda c: {knob: np.where(c[SIZES] > 0, code, c[knob])}

    own = ((INSTANCES, 1), (TP, 1), *((knob, 0) for knob in threads))
    return tuple(Merge(name=f"{knob}_of_sizes", knobs=(knob, SIZES), canonical=fixed(knob, code)) for knob, code in own)


@dataclass(frozen=True, slots=True)
class Placement:
    """One instance of a candidate: its knob values, and its devices: on a host, `width` of them from `first` on, or all
    devices of `hosts`.
    """

    values: Mapping[str, KnobValue]
    first: int
    width: int
    hosts: range = range(1)


def placements(task: Task, values: Mapping[str, KnobValue]) -> tuple[Placement, ...]:
    """Return the instances of a candidate, each on consecutive devices; cores are shared evenly unless SIZES is set.

    An instance is on the first host with room for it, or, if it is larger, on whole hosts.
    """
    hardware, word = Hardware.of(task), values.get(SIZES)
    if isinstance(word, str):
        widths = sizes(word)
        each = [
            {**values, SIZES: None, INSTANCES: len(widths), TP: 1 if hardware.on_cores else width} for width in widths
        ]
    else:
        number = count(values, INSTANCES)
        ranks = count(values, TP) * count(values, PP) * count(values, DP)
        share = int(hardware.share(np.array([number]), {})[0])
        widths = (share if hardware.on_cores else ranks,) * number
        each = [dict(values)] * number
    places = on_hosts(widths, hardware)
    assert places is not None, "the candidate is legal"
    return tuple(
        Placement(own, first, width, hosts) for own, width, (hosts, first) in zip(each, widths, places, strict=True)
    )


def on_hosts(widths: Sequence[int], hardware: Hardware) -> list[tuple[range, int]] | None:
    """Return the hosts of each instance and its first device there, None if they do not fit. The largest come first."""
    if hardware.hosts == 1:
        return [(range(1), sum(widths[:place])) for place in range(len(widths))]
    used, found = [0] * hardware.hosts, list[tuple[range, int]]()
    for width in widths:
        span, each = max(1, width // hardware.per_host), min(width, hardware.per_host)
        starts = range(hardware.hosts - span + 1)
        at = next((at for at in starts if max(used[at : at + span]) + each <= hardware.per_host), None)
        if at is None or each * span != width:
            return None
        found.append((range(at, at + span), used[at]))
        used[at : at + span] = [used[at] + each] * span
    return found


@dataclass(frozen=True, slots=True)
class InstanceKinds:
    """Kinds of equal instances, one row of `columns` each: `count` instances of candidate `owner`, ascending.

    The largest kind of a candidate is first.
    """

    owner: IntArray
    count: IntArray
    columns: Columns

    @property
    def size(self) -> int:
        return int(self.owner[-1]) + 1 if self.owner.size else 0

    @property
    def firsts(self) -> IntArray:
        """The row of each candidate's first kind, the largest."""
        return np.searchsorted(self.owner, np.arange(self.size))

    @property
    def members(self) -> list[range]:
        return [range(*edges) for edges in pairwise([*self.firsts.tolist(), self.owner.size])]

    def total(self, values: FloatArray | IntArray) -> FloatArray:
        """Return the sum of `values` of one instance over all instances of each candidate."""
        return np.bincount(self.owner, weights=self.count * values, minlength=self.size).astype(np.float64)

    def worst(self, values: FloatArray) -> IntArray:
        """Return the row of the kind with the largest value of each candidate."""
        order = np.lexsort((values, self.owner))
        return order[np.searchsorted(self.owner, np.arange(self.size), side="right") - 1]


def uniform(instances: IntArray) -> InstanceKinds:
    """Return the kinds of candidates with equal instances."""
    return InstanceKinds(np.arange(instances.size, dtype=np.int64), np.maximum(instances, 1), {})


def instance_kinds(task: Task, columns: Columns) -> InstanceKinds:
    """Return the kinds of instances of each row: one, or one for each size of SIZES. INSTANCES counts all of them."""
    codes = columns.get(SIZES)
    rows = np.arange(next(iter(columns.values())).size, dtype=np.int64)
    if codes is None or not codes.any():
        return InstanceKinds(rows, np.maximum(columns.get(INSTANCES, np.ones_like(rows)), 1), columns)
    known, on_cores = [(), *(sizes(word) for word in words(task))], Hardware.of(task).on_cores
    kinds = [
        (row, size, known[code].count(size))
        for row, code in enumerate(codes.tolist())
        for size in dict.fromkeys(known[code]) or (0,)
    ]
    owner, size, count = np.array(kinds, dtype=np.int64).T
    made, split = {knob: column[owner] for knob, column in columns.items()}, size > 0
    count = np.where(split, count, np.maximum(made[INSTANCES], 1))
    several = np.bincount(owner, weights=count).astype(np.int64)[owner]
    made[INSTANCES] = np.where(split, several, made[INSTANCES])
    made[CORES if on_cores else TP] = np.where(split, size, 0 if on_cores else made[TP])
    made[SIZES] = np.zeros_like(owner)
    return InstanceKinds(owner, count, made)
