"""build: cross the axes into a space of legal, distinct candidates.

The axes are crossed one after the other. A rule is applied as soon as its knobs have values, so that illegal rows are
removed early. Each removed row is counted with all combinations that it represents.
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
MAX_ROWS = 20_000_000

_RowFunction: TypeAlias = "Callable[[IntArray], NDArray[Any]]"
"""A function from row numbers to one value per row."""


def build(axes: Sequence[Axis], rules: Sequence[Rule], merges: Sequence[Merge]) -> Space:
    """Return the space of `axes` under `rules` and `merges`, with the counts of illegal and merged combinations.

    Raises SpecError if the space is too large.
    """
    crossing = _Crossing(tuple(axes))
    for index, axis in enumerate(axes):
        crossed = {axis.knob for axis in axes[: index + 1]}
        new_rules = [rule for rule in rules if axis.knob in rule.knobs and crossed.issuperset(rule.knobs)]
        new_merges = [merge for merge in merges if axis.knob in merge.knobs and crossed.issuperset(merge.knobs)]
        crossing.cross(new_rules, new_merges)
    return crossing.space()


def check(columns: Columns, rules: Sequence[Rule], merges: Sequence[Merge]) -> tuple[dict[str, IntArray], list[Rule]]:
    """Return the canonical form of one candidate (columns of one row), and the rules that the given form breaks."""
    broken = [rule for rule in rules if bool(rule.broken(columns).any())]
    return canonical(columns, merges), broken


def canonical(columns: Columns, merges: Sequence[Merge]) -> dict[str, IntArray]:
    """Return the canonical form of each row."""
    result = dict(columns)
    for merge in merges:
        result |= merge.canonical(result)
    return result


@dataclass(slots=True)
class _Crossing:
    """The rows of the first `crossed` axes, and the counts of illegal and merged combinations."""

    axes: tuple[Axis, ...]
    crossed: int = 0
    rows: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    codes: list[IntArray] = field(default_factory=list)
    illegal: dict[str, int] = field(default_factory=dict)
    merged: int = 0

    def cross(self, rules: Sequence[Rule], merges: Sequence[Merge]) -> None:
        """Cross the next axis, merge equal rows and drop illegal ones."""
        axis = self.axes[self.crossed]
        stride = prod(int(codes.size) for codes in self.codes)
        self.codes.append(_codes(axis))
        self.crossed += 1
        if stride * self.codes[-1].size >= 2**62:
            raise SpecError(
                key="auto_tuner.space", problem="has too many combinations to count", fix="give shorter lists"
            )
        count = self.rows.size * len(axis.values)
        shifts = [self._tabulate(merge.knobs, partial(self._shift, merge), count) for merge in merges]
        tests = [(rule.name, self._tabulate(rule.knobs, partial(self._broken, rule), count)) for rule in rules]
        parts: list[IntArray] = []
        total = 0
        size = max(1, CHUNK // len(axis.values))
        for start in range(0, self.rows.size, size):
            parents = self.rows[start : start + size]
            new = (np.arange(len(axis.values), dtype=np.int64) * stride)[:, None] + parents[None, :]
            part = self._legal(self._distinct(new.ravel(), shifts), tests)
            total += part.size
            if total > MAX_ROWS:
                raise SpecError(
                    key=f"auto_tuner.space.{axis.knob}",
                    problem=f"leads to more than {MAX_ROWS:,} candidates",
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
        """Return the finished space with sorted rows."""
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
        return prod(len(axis.values) for axis in self.axes[self.crossed :])

    def _tabulate(self, knobs: Collection[str], function: _RowFunction, rows: int) -> _RowFunction:
        """Return a table lookup for `function`, which depends only on `knobs`.

        If the knobs have more combinations than `rows`, return `function`.
        """
        grid, stride = np.zeros(1, dtype=np.int64), 1
        offsets: dict[str, IntArray] = {}
        for axis, codes in zip(self.axes, self.codes, strict=False):
            digits = np.arange(codes.size, dtype=np.int64)
            if axis.knob in knobs:
                offsets[axis.knob] = digits * grid.size
                if grid.size * codes.size > rows:
                    return function
                grid = ((digits * stride)[:, None] + grid[None, :]).ravel()
            stride *= codes.size
        table = function(grid)
        values = [offsets.get(axis.knob, codes) for axis, codes in zip(self.axes, self.codes, strict=False)]
        names = [axis.knob for axis in self.axes[: self.crossed]]
        return lambda rows: table.take(sum(decode(rows, values, names, offsets).values(), np.int64(0)))

    def _broken(self, rule: Rule, rows: IntArray) -> BoolArray:
        return rule.broken(self._columns(rows, rule.knobs))

    def _columns(self, rows: IntArray, knobs: Collection[str]) -> dict[str, IntArray]:
        return decode(rows, self.codes, [axis.knob for axis in self.axes[: self.crossed]], knobs)

    def _shift(self, merge: Merge, rows: IntArray) -> IntArray:
        """Return the offset from each row number to that of the canonical row, 0 if an axis does not have its value."""
        columns = merge.canonical(self._columns(rows, merge.knobs))
        if not set(merge.knobs).issuperset(columns):
            raise ValueError(f"merge {merge.name} returns {', '.join(columns)}, not only {', '.join(merge.knobs)}")
        result, is_known = np.zeros_like(rows), np.ones(rows.shape, dtype=np.bool_)
        stride = 1
        for axis, codes in zip(self.axes, self.codes, strict=False):
            if axis.knob in columns:
                order = np.argsort(codes, kind="stable")
                position = np.minimum(np.searchsorted(codes, columns[axis.knob], sorter=order), codes.size - 1)
                digit = order[position]
                is_known &= codes[digit] == columns[axis.knob]
                result += (digit - rows // stride % codes.size) * stride
            stride *= codes.size
        return np.where(is_known, result, 0)

    def _distinct(self, rows: IntArray, shifts: Sequence[_RowFunction]) -> IntArray:
        if not shifts:
            return rows
        for shift in shifts:
            rows = rows + shift(rows)
        distinct = _distinct(rows)
        self.merged += (rows.size - distinct.size) * self._remaining
        return distinct

    def _legal(self, rows: IntArray, rules: Sequence[tuple[str, _RowFunction]]) -> IntArray:
        is_legal = np.ones(rows.shape, dtype=np.bool_)
        for name, broken_of in rules:
            broken = broken_of(rows) & is_legal
            count = int(np.count_nonzero(broken)) * self._remaining
            if count:
                self.illegal[name] = self.illegal.get(name, 0) + count
            is_legal &= ~broken
        return rows[is_legal] if rules else rows


def _codes(axis: Axis) -> IntArray:
    """Return the codes of an axis: those of the crossed values first, then those of other valid values."""
    values = (*axis.values, axis.neutral, *axis.extra_values)
    return np.array(list(dict.fromkeys(axis.encode(value) for value in values)), dtype=np.int64)


def _distinct(rows: IntArray) -> IntArray:
    """Return the same as `np.unique(rows)`, ten times as fast as NumPy's hash table."""
    ordered = np.sort(rows)
    first = np.ones(ordered.shape, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
