"""Instances of different sizes, as a text such as 4+2+2."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.objective import is_rate
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import prefill_decode
from flagcore.engines.serving.common.hardware import (
    CORES,
    DP,
    INSTANCES,
    PP,
    PREFILL_DECODE,
    SIZES,
    TP,
    Hardware,
    count,
    on_hosts,
)
from flagcore.errors import SpecError

BrokenRows: TypeAlias = "Callable[[Columns], BoolArray]"

MAX_PARTS = 16
"""Maximum number of parts: with more cards, sizes are multiples of the smallest suitable power of two."""
WHOLE = ", or have all devices of several hosts"
_SIZES_PATTERN = re.compile(r"\d{1,6}(\+\d{1,6})+")


def sizes(word: str) -> tuple[int, ...]:
    """Return the devices of each instance, the largest first."""
    return tuple(sorted((int(part) for part in word.split("+")), reverse=True))


def parse_sizes(value: object, key: str) -> str:
    """Return the value of `key` with the largest instance first. Raises SpecError."""
    fix = f"list the devices of each instance, such as 4+2+2; use {INSTANCES} and {TP} for equal instances"
    if not isinstance(value, str) or not _SIZES_PATTERN.fullmatch(value.replace(" ", "")):
        raise SpecError(key=key, value=value, problem="is not a valid value", fix=fix)
    parts = sizes(value.replace(" ", ""))
    if not parts[-1] or len(set(parts)) == 1:
        problem = "has an instance without devices" if not parts[-1] else "has equal instances"
        raise SpecError(key=key, value=value, problem=problem, fix=fix)
    return "+".join(map(str, parts))


def known_sizes(task: Task) -> tuple[str, ...]:
    """Return all values of SIZES for a task in the order of their codes: the values for its cards, then the values of
    the spec.
    """
    spec, hardware = task.spec, Hardware.of(task)
    flags = {flag.lstrip("-").replace("-", "_"): value for flag, value in spec.serve.engine_args.items()}
    sections = {"auto_tuner.space": spec.space, "auto_tuner.baseline": spec.baseline or {}, "serve.engine_args": flags}
    entries = [(values[SIZES], f"{section}.{SIZES}") for section, values in sections.items() if SIZES in values]
    texts = [(each, key) for value, key in entries for each in (value if isinstance(value, tuple) else (value,))]
    spec_sizes = [parse_sizes(each, key) for each, key in texts if each not in (None, "auto")]
    return tuple(dict.fromkeys((*_unequal_splits(hardware.cards), *spec_sizes)))


def auto_sizes(task: Task) -> tuple[KnobValue, ...]:
    """Return the values of `auto`: not set, and for a rate the splits of all cards into unequal powers of two."""
    if not is_rate(task.spec.objective):
        return (None,)
    cards = Hardware.of(task).cards
    words = [word for word in _unequal_splits(cards) if sum(sizes(word)) == cards]
    return (None, *(word for word in words if _are_powers_of_two(sizes(word))))


@lru_cache(maxsize=16)
def _unequal_splits(cards: int) -> tuple[str, ...]:
    """Return the unequal splits of at most `cards` devices: all up to MAX_PARTS, for more those into powers of two."""
    unit = 1
    while cards // unit > MAX_PARTS:
        unit *= 2
    splits: list[tuple[int, ...]] = []

    def add_parts(parts: tuple[int, ...], remaining: int, largest_part: int) -> None:
        if len(parts) > 1 and len(set(parts)) > 1:
            splits.append(parts)
        for part in range(min(remaining, largest_part), 0, -1):
            if unit == 1 or part & (part - 1) == 0:
                add_parts((*parts, part), remaining - part, part)

    add_parts((), cards // unit, cards // unit)
    return tuple("+".join(str(part * unit) for part in parts) for parts in splits)


def _are_powers_of_two(parts: tuple[int, ...]) -> bool:
    return all(part & (part - 1) == 0 for part in parts)


def rules(task: Task, unit_knobs: tuple[str, ...], *, heads: bool, span: bool) -> tuple[Rule, ...]:
    """Return the rules for SIZES. Knobs in `unit_knobs` must be 1. With `heads` TP ranks must have whole heads, with
    `span` an instance may span hosts."""
    hardware, model = Hardware.of(task), task.spec.model
    span = span and not hardware.on_cores
    sizes_by_code = [(), *(sizes(word) for word in known_sizes(task))]
    groups, is_latent = model.num_query_groups, model.multi_latent_attention

    def uneven(size: int) -> bool:
        divides_groups = is_latent or groups % size == 0 or size % groups == 0
        has_whole_heads = model.num_attention_heads % size == 0 and divides_groups
        return heads and not hardware.on_cores and not has_whole_heads

    def misplaced(parts: tuple[int, ...]) -> bool:
        too_large = not span and hardware.hosts > 1 and max(parts, default=0) > hardware.per_host
        return too_large or on_hosts(parts, hardware) is None

    return (
        Rule(
            name="hosts_of_sizes",
            knobs=(SIZES,),
            message=f"each of {SIZES} must fit on a host of {hardware.per_host} devices" + (WHOLE if span else ""),
            broken=_rule_by_code(sizes_by_code, misplaced),
        ),
        Rule(
            name="cards_of_sizes",
            knobs=(SIZES,),
            message=f"the sum of {SIZES} must not exceed the {hardware.cards} devices",
            broken=_rule_by_code(sizes_by_code, lambda parts: sum(parts) > hardware.cards),
        ),
        Rule(
            name="heads_of_sizes",
            knobs=(SIZES,),
            message=f"each of {SIZES} must divide num_attention_heads = {model.num_attention_heads}, and be a multiple "
            f"or a divisor of num_query_groups = {groups}",
            broken=_rule_by_code(sizes_by_code, lambda parts: any(uneven(size) for size in parts)),
        ),
        Rule(
            name="sizes_are_tensor_ranks",
            knobs=(SIZES, *unit_knobs),
            message=f"{' and '.join(unit_knobs)} must be 1 with {SIZES}, whose devices split matrices",
            broken=lambda c: (c[SIZES] > 0) & np.logical_or.reduce([c[knob] > 1 for knob in unit_knobs]),
        ),
    )


def _rule_by_code(splits: list[tuple[int, ...]], is_broken: Callable[[tuple[int, ...]], bool]) -> BrokenRows:
    table = np.array([is_broken(parts) for parts in splits], dtype=np.bool_)
    return lambda columns: table[columns[SIZES]]


def merges(*threads: str) -> tuple[Merge, ...]:
    """Return the merges of knobs that SIZES replaces: INSTANCES, TP and, on cores, `threads`."""

    def set_code(knob: str, code: int) -> Callable[[Columns], Columns]:
        return lambda c: {knob: np.where(c[SIZES] > 0, code, c[knob])}

    def merge(knob: str, code: int) -> Merge:
        return Merge(name=f"{knob}_of_sizes", knobs=(knob, SIZES), canonical=set_code(knob, code))

    return (merge(INSTANCES, 1), merge(TP, 1), *(merge(knob, 0) for knob in threads))


@dataclass(frozen=True, slots=True)
class Placement:
    """One instance of a candidate: its knob values, and its `width` devices from the index `first` on.

    An instance on several `hosts` has all their devices. `kind` is PREFILL or DECODE if it does only one of both.
    """

    values: Mapping[str, KnobValue]
    first: int
    width: int
    hosts: range = range(1)
    kind: str = ""


def placements(task: Task, values: Mapping[str, KnobValue]) -> tuple[Placement, ...]:
    """Return the instances of a candidate, each on consecutive devices; without SIZES, cores are split evenly.

    An instance is on the first host with room for it, or, if it is larger, on whole hosts.
    """
    hardware, word, pair = Hardware.of(task), values.get(SIZES), values.get(PREFILL_DECODE)
    if isinstance(pair, str):
        return _placements_of_kinds(prefill_decode.roles(pair), values, hardware)
    if isinstance(word, str):
        widths = sizes(word)
        instance_values = [
            {**values, SIZES: None, INSTANCES: len(widths), TP: 1 if hardware.on_cores else width} for width in widths
        ]
    else:
        number = count(values, INSTANCES)
        ranks = count(values, TP) * count(values, PP) * count(values, DP)
        share = int(hardware.share(np.array([number]), {})[0])
        widths = (share if hardware.on_cores else ranks,) * number
        instance_values = [dict(values)] * number
    places = on_hosts(widths, hardware)
    assert places is not None, "the candidate is legal"
    return tuple(
        Placement(own, first, width, hosts)
        for own, width, (hosts, first) in zip(instance_values, widths, places, strict=True)
    )


def _placements_of_kinds(
    pair: prefill_decode.Pair, values: Mapping[str, KnobValue], hardware: Hardware
) -> tuple[Placement, ...]:
    """Return the instances that prefill, then those that decode."""
    own = {kind: prefill_decode.of_kind(values, kind) for kind in prefill_decode.KINDS}
    kinds = [kind for kind, role in zip(prefill_decode.KINDS, pair, strict=True) for _ in range(role.count)]
    widths = prefill_decode.widths(pair, hardware)
    places = prefill_decode.places(widths, hardware)
    assert places is not None, "the candidate is legal"
    return tuple(
        Placement(own[kind], first, width, hosts, kind)
        for kind, width, (hosts, first) in zip(kinds, widths, places, strict=True)
    )


@dataclass(frozen=True, slots=True)
class InstanceKinds:
    """Kinds of equal instances, one row of `columns` each.

    A kind has `count` instances of candidate `owner`. Rows are sorted by candidate, the largest kind first. `role` is 1
    for instances that only prefill, 2 for those that only decode, and 0 for others; None: 0 for all.
    """

    owner: IntArray
    count: IntArray
    columns: Columns
    role: IntArray | None = None

    @property
    def size(self) -> int:
        return int(self.owner[-1]) + 1 if self.owner.size else 0

    @property
    def first_rows(self) -> IntArray:
        """The row of each candidate's first and largest kind."""
        return np.searchsorted(self.owner, np.arange(self.size))

    @property
    def lanes(self) -> FloatArray:
        """The instances among which the requests of each kind are divided: all, or those of its role."""
        totals = self.total(np.ones(self.owner.size))[self.owner]
        return totals if self.role is None else np.where(self.role > 0, self.count, totals)

    @property
    def members(self) -> list[range]:
        return [range(*edges) for edges in pairwise([*self.first_rows.tolist(), self.owner.size])]

    def total(self, values: FloatArray | IntArray) -> FloatArray:
        """Return the sum of `values` of one instance over all instances of each candidate."""
        return np.bincount(self.owner, weights=self.count * values, minlength=self.size).astype(np.float64)

    def worst(self, values: FloatArray) -> IntArray:
        """Return the row of each candidate's kind with the largest value."""
        order = np.lexsort((values, self.owner))
        return order[np.searchsorted(self.owner, np.arange(self.size), side="right") - 1]


def uniform_kinds(instances: IntArray) -> InstanceKinds:
    """Return the kinds of instances of candidates whose instances are all equal."""
    return InstanceKinds(np.arange(instances.size, dtype=np.int64), np.maximum(instances, 1), {})


def instance_kinds(task: Task, columns: Columns) -> InstanceKinds:
    """Return the kinds of instances of each row: one for each size in SIZES, else one. INSTANCES is their total."""
    rows, zeros = np.arange(next(iter(columns.values())).size, dtype=np.int64), np.zeros(1, dtype=np.int64)
    size_codes, pair_codes = columns.get(SIZES, zeros), columns.get(PREFILL_DECODE, zeros)
    if not size_codes.any() and not pair_codes.any():
        return InstanceKinds(rows, np.maximum(columns.get(INSTANCES, np.ones_like(rows)), 1), columns)
    sizes_by_code, on_cores = [(), *(sizes(word) for word in known_sizes(task))], Hardware.of(task).on_cores
    pairs_by_code = [None, *(prefill_decode.roles(word) for word in prefill_decode.known_roles(task))]
    kinds = list[tuple[int, int, int, int]]()
    for row, code, pair_code in zip(rows.tolist(), *np.broadcast_arrays(size_codes, pair_codes), strict=True):
        parts = sizes_by_code[code]
        if pair := pairs_by_code[pair_code]:
            kinds += [(row, 0, each.count, number) for number, each in enumerate(pair, 1)]
        else:
            kinds += [(row, size, parts.count(size), 0) for size in dict.fromkeys(parts) or (0,)]
    owner, size, count, role = np.array(kinds, dtype=np.int64).T
    kind_columns, has_sizes = {knob: column[owner] for knob, column in columns.items()}, size > 0
    count = np.where(has_sizes | (role > 0), count, np.maximum(kind_columns[INSTANCES], 1))
    totals = np.bincount(owner, weights=count).astype(np.int64)[owner]
    kind_columns[INSTANCES] = np.where(has_sizes, totals, kind_columns[INSTANCES])
    if has_sizes.any():
        kind_columns[CORES if on_cores else TP] = np.where(has_sizes, size, 0 if on_cores else kind_columns[TP])
        kind_columns[SIZES] = np.zeros_like(owner)
    for number, kind in enumerate(prefill_decode.KINDS, 1):
        if (of_role := np.flatnonzero(role == number)).size:
            pairs = [pairs_by_code[code] for code in pair_codes[owner[of_role]].tolist()]
            own = {knob: column[of_role] for knob, column in kind_columns.items()}
            for knob, column in prefill_decode.columns_of_kind(own, kind, pairs).items():
                kind_columns[knob] = kind_columns[knob].copy()
                kind_columns[knob][of_role] = column
    return InstanceKinds(owner, count, kind_columns, role if role.any() else None)
