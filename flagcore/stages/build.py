"""build: cross the knobs into a space of legal, distinct candidates.

Knobs are crossed one at a time. A rule is applied as soon as its knobs have values, so illegal rows are removed
early; each removed row is counted with all combinations that it represents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flagcore.domain.space import Axis, BoolArray, Columns, IntArray, Merge, Rule, Space, decode
from flagcore.errors import SpecError

CHUNK = 1 << 15
MOST_ROWS = 20_000_000

_OfRows: TypeAlias = "Callable[[IntArray], NDArray[Any]]"
"""A function from row numbers to one value per row."""


def build(axes: Sequence[Axis], rules: Sequence[Rule], merges: Sequence[Merge]) -> Space:
    """Return the space of `axes` under `rules` and `merges`, with the counts of illegal and merged combinations.

    Raises SpecError when the space is too large to hold.
    """
    crossing = _Crossing(tuple(axes))
    for place, axis in enumerate(axes):
        known = {axis.knob for axis in axes[: place + 1]}
        ready = [rule for rule in rules if axis.knob in rule.knobs and known.issuperset(rule.knobs)]
        equal = [merge for merge in merges if axis.knob in merge.knobs and known.issuperset(merge.knobs)]
        crossing.cross(ready, equal)
    return crossing.space()


def check(columns: Columns, rules: Sequence[Rule], merges: Sequence[Merge]) -> tuple[dict[str, IntArray], list[Rule]]:
    """Return the canonical form of one candidate (columns of one row) and the rules that it breaks as given."""
    broken = [rule for rule in rules if bool(rule.broken(columns).any())]
    return canonical(columns, merges), broken


def canonical(columns: Columns, merges: Sequence[Merge]) -> dict[str, IntArray]:
    """Return the canonical form of every row."""
    result = dict(columns)
    for merge in merges:
        result |= merge.canonical(result)
    return result


@dataclass(slots=True)
class _Crossing:
    """The rows over the first `done` axes, and the counts."""

    axes: tuple[Axis, ...]
    done: int = 0
    rows: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    codes: list[IntArray] = field(default_factory=list)
    illegal: dict[str, int] = field(default_factory=dict)
    merged: int = 0

    def cross(self, rules: Sequence[Rule], merges: Sequence[Merge]) -> None:
        """Cross the next axis, merge equal rows and drop illegal ones."""
        axis = self.axes[self.done]
        stride = prod(int(codes.size) for codes in self.codes)
        self.codes.append(_codes(axis))
        self.done += 1
        if stride * self.codes[-1].size >= 2**62:
            raise SpecError(
                key="auto_tuner.space", problem="has too many combinations to count", fix="give shorter lists"
            )
        count = self.rows.size * len(axis.values)
        shifts = [self._lookup(merge.knobs, partial(self._shift, merge), count) for merge in merges]
        tests = [(rule.name, self._lookup(rule.knobs, partial(self._broken, rule), count)) for rule in rules]
        parts: list[IntArray] = []
        kept = 0
        size = max(1, CHUNK // len(axis.values))
        for start in range(0, self.rows.size, size):
            parents = self.rows[start : start + size]
            new = (np.arange(len(axis.values), dtype=np.int64) * stride)[:, None] + parents[None, :]
            part = self._legal(self._distinct(new.ravel(), shifts), tests)
            kept += part.size
            if kept > MOST_ROWS:
                raise SpecError(
                    key=f"auto_tuner.space.{axis.knob}",
                    problem=f"makes more than {MOST_ROWS:,} candidates",
                    fix="give shorter lists instead of auto",
                )
            parts.append(part)
        rows = np.concatenate(parts) if parts else self.rows
        if merges and len(parts) > 1:
            distinct = _distinct(rows)
            self.merged += (rows.size - distinct.size) * self._remaining
            rows = distinct
        self.rows = rows

    def space(self) -> Space:
        """Return the finished space. Rows are sorted for lookups."""
        return Space(
            axes=self.axes,
            codes=tuple(self.codes),
            rows=np.sort(self.rows),
            combinations=prod(len(axis.values) for axis in self.axes),
            illegal=dict(self.illegal),
            merged=self.merged,
        )

    @property
    def _remaining(self) -> int:
        """The number of combinations that one row represents."""
        return prod(len(axis.values) for axis in self.axes[self.done :])

    def _lookup(self, knobs: Collection[str], answer: _OfRows, rows: int) -> _OfRows:
        """Return `answer`, which depends only on `knobs`, tabulated if they have fewer combinations than `rows`."""
        grid, stride = np.zeros(1, dtype=np.int64), 1
        places: dict[str, IntArray] = {}
        for axis, codes in zip(self.axes, self.codes, strict=False):
            digits = np.arange(codes.size, dtype=np.int64)
            if axis.knob in knobs:
                places[axis.knob] = digits * grid.size
                if grid.size * codes.size > rows:
                    return answer
                grid = ((digits * stride)[:, None] + grid[None, :]).ravel()
            stride *= codes.size
        known = answer(grid)
        counted = [places.get(axis.knob, codes) for axis, codes in zip(self.axes, self.codes, strict=False)]
        names = [axis.knob for axis in self.axes[: self.done]]
        return lambda rows: known.take(sum(decode(rows, counted, names, places).values(), np.int64(0)))

    def _broken(self, rule: Rule, rows: IntArray) -> BoolArray:
        return rule.broken(self._columns(rows, rule.knobs))

    def _columns(self, rows: IntArray, knobs: Collection[str]) -> dict[str, IntArray]:
        return decode(rows, self.codes, [axis.knob for axis in self.axes[: self.done]], knobs)

    def _shift(self, merge: Merge, rows: IntArray) -> IntArray:
        """Return the offset that `merge` adds to row numbers: 0 for a value that the axis lacks."""
        columns = merge.canonical(self._columns(rows, merge.knobs))
        if not set(merge.knobs).issuperset(columns):
            raise ValueError(f"merge {merge.name} gives {', '.join(columns)}, not only {', '.join(merge.knobs)}")
        result, listed = np.zeros_like(rows), np.ones(rows.shape, dtype=np.bool_)
        stride = 1
        for axis, codes in zip(self.axes, self.codes, strict=False):
            if axis.knob in columns:
                order = np.argsort(codes, kind="stable")
                spot = np.minimum(np.searchsorted(codes, columns[axis.knob], sorter=order), codes.size - 1)
                place = order[spot]
                listed &= codes[place] == columns[axis.knob]
                result += (place - rows // stride % codes.size) * stride
            stride *= codes.size
        return np.where(listed, result, 0)

    def _distinct(self, rows: IntArray, shifts: Sequence[_OfRows]) -> IntArray:
        if not shifts:
            return rows
        for shift in shifts:
            rows = rows + shift(rows)
        distinct = _distinct(rows)
        self.merged += (rows.size - distinct.size) * self._remaining
        return distinct

    def _legal(self, rows: IntArray, rules: Sequence[tuple[str, _OfRows]]) -> IntArray:
        alive = np.ones(rows.shape, dtype=np.bool_)
        for name, broken_of in rules:
            broken = broken_of(rows) & alive
            count = int(np.count_nonzero(broken)) * self._remaining
            if count:
                self.illegal[name] = self.illegal.get(name, 0) + count
            alive &= ~broken
        return rows[alive] if rules else rows


def _codes(axis: Axis) -> IntArray:
    """Return the codes of an axis: the crossed ones, then the others that a row may have."""
    known = (*axis.values, axis.neutral, *axis.extra_values)
    return np.array(list(dict.fromkeys(axis.encode(value) for value in known)), dtype=np.int64)


def _distinct(rows: IntArray) -> IntArray:
    """Return `np.unique(rows)` by sorting, in a tenth of the time of numpy's hash table."""
    ordered = np.sort(rows)
    first = np.ones(ordered.shape, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
