"""build: cross the knobs into a space of legal, distinct candidates.

Knobs are crossed one at a time. A rule is applied as soon as its knobs have values, so what is illegal is
gone before it multiplies; each row that goes is counted with all the combinations that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from flagcore.domain.engine import EngineSupport, Refused
from flagcore.domain.space import Axis, Columns, IntArray, Merge, Rule, Space, decode
from flagcore.errors import NoDevice, SpecError

CHUNK = 1 << 18
MOST_ROWS = 20_000_000


def build(axes: Sequence[Axis], rules: Sequence[Rule], merges: Sequence[Merge]) -> Space:
    """Return the space of `axes` under `rules` and `merges`, with the books of what went where.

    Raises SpecError when the space is too large to hold.
    """
    crossing = _Crossing(tuple(axes))
    for place, axis in enumerate(axes):
        known = {axis.knob for axis in axes[: place + 1]}
        ready = [rule for rule in rules if axis.knob in rule.knobs and known.issuperset(rule.knobs)]
        equal = [merge for merge in merges if axis.knob in merge.knobs and known.issuperset(merge.knobs)]
        crossing.cross(ready, equal)
    return crossing.space()


def refusals(axes: Sequence[Axis], support: EngineSupport) -> tuple[Rule, ...]:
    """Return a rule for each set of knob values that a plugin says do not work on its chip."""

    def rule(axis: Axis, refused: Refused) -> Rule:
        try:
            codes = np.array([axis.encode(value) for value in refused.values], dtype=np.int64)
        except ValueError:
            problem = f"a plugin refuses {axis.knob} = {refused.values}, which is no value of that knob"
            raise NoDevice(f"{problem} (rule {refused.name})") from None
        return Rule(
            name=refused.name,
            knobs=(axis.knob,),
            says=f"{axis.knob} = {' or '.join(map(str, refused.values))}: {refused.reason}",
            broken=lambda c: np.isin(c[axis.knob], codes),
        )

    by_knob = {axis.knob: axis for axis in axes}
    for refused in support.refused:
        if refused.knob not in by_knob:
            problem = f"a plugin refuses values of {refused.knob}, which is no knob (rule {refused.name})"
            raise NoDevice(f"{problem}; knobs: {', '.join(by_knob)}")
    return tuple(rule(by_knob[refused.knob], refused) for refused in support.refused)


def check(columns: Columns, rules: Sequence[Rule], merges: Sequence[Merge]) -> tuple[dict[str, IntArray], list[Rule]]:
    """Return the canonical form of one candidate (columns of one row) and the rules that it breaks as it stands."""
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
    """The rows so far, over the first `done` axes, and the books."""

    axes: tuple[Axis, ...]
    done: int = 0
    rows: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    codes: list[IntArray] = field(default_factory=list)
    illegal: dict[str, int] = field(default_factory=dict)
    merged: int = 0

    def cross(self, rules: Sequence[Rule], merges: Sequence[Merge]) -> None:
        """Give the next axis its values, then merge what is equal and drop what is illegal."""
        axis = self.axes[self.done]
        stride = prod(int(codes.size) for codes in self.codes)
        self.codes.append(_codes(axis))
        self.done += 1
        if stride * self.codes[-1].size >= 2**62:
            raise SpecError(
                key="auto_tuner.space", problem="has too many combinations to count", fix="give shorter lists"
            )
        parts: list[IntArray] = []
        kept = 0
        for parents in _pieces(self.rows, max(1, CHUNK // len(axis.values))):
            new = (np.arange(len(axis.values), dtype=np.int64) * stride)[:, None] + parents[None, :]
            part = self._legal(self._distinct(new.ravel(), merges), rules)
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
            distinct = np.unique(rows)
            self.merged += (rows.size - distinct.size) * self._remaining
            rows = distinct
        self.rows = rows

    def space(self) -> Space:
        """Return the finished space. Rows are sorted, so that a candidate can be found in them."""
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
        """How many combinations one row stands for."""
        return prod(len(axis.values) for axis in self.axes[self.done :])

    def _columns(self, rows: IntArray, wanted: Sequence[Rule | Merge]) -> dict[str, IntArray]:
        """Decode the knobs that some rules or merges look at, and no others."""
        knobs = {knob for each in wanted for knob in each.knobs}
        return decode(rows, self.codes, [axis.knob for axis in self.axes[: self.done]], knobs)

    def _distinct(self, rows: IntArray, merges: Sequence[Merge]) -> IntArray:
        if not merges:
            return rows
        for merge in merges:
            rows = self._canonical(rows, merge.canonical(self._columns(rows, (merge,))))
        distinct = np.unique(rows)
        self.merged += (rows.size - distinct.size) * self._remaining
        return distinct

    def _canonical(self, rows: IntArray, columns: Mapping[str, IntArray]) -> IntArray:
        """Return `rows` with other values in some columns; a value that the axis lacks leaves its row as it is."""
        result, listed = rows.copy(), np.ones(rows.shape, dtype=np.bool_)
        stride = 1
        for axis, codes in zip(self.axes, self.codes, strict=False):
            if axis.knob in columns:
                order = np.argsort(codes, kind="stable")
                spot = np.minimum(np.searchsorted(codes, columns[axis.knob], sorter=order), codes.size - 1)
                place = order[spot]
                listed &= codes[place] == columns[axis.knob]
                result += (place - rows // stride % codes.size) * stride
            stride *= codes.size
        return np.where(listed, result, rows)

    def _legal(self, rows: IntArray, rules: Sequence[Rule]) -> IntArray:
        if not rules:
            return rows
        columns = self._columns(rows, rules)
        alive = np.ones(rows.shape, dtype=np.bool_)
        for rule in rules:
            broken = rule.broken(columns) & alive
            count = int(np.count_nonzero(broken)) * self._remaining
            if count:
                self.illegal[rule.name] = self.illegal.get(rule.name, 0) + count
            alive &= ~broken
        return rows[alive]


def _codes(axis: Axis) -> IntArray:
    """Return the codes of an axis: those that are crossed, then the others that a row may have."""
    known = (*axis.values, axis.neutral, *axis.also)
    return np.array(list(dict.fromkeys(axis.encode(value) for value in known)), dtype=np.int64)


def _pieces(rows: IntArray, size: int) -> Iterable[IntArray]:
    return (rows[start : start + size] for start in range(0, rows.size, size))
