"""The space of candidates as columns: eight bytes per row, for any number of knobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flagcore.domain.candidate import Candidate, KnobValue

IntArray: TypeAlias = "NDArray[np.int64]"
FloatArray: TypeAlias = "NDArray[np.float64]"
BoolArray: TypeAlias = "NDArray[np.bool_]"
Columns: TypeAlias = "Mapping[str, IntArray]"
"""One integer array per knob, all of one length. None and False are 0, True is 1, a word is its place in
`Axis.words`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One knob and the values it may take.

    `words` spells the codes of a knob whose values are words: `words[code]`, with None for code 0.
    `is_flag`: codes 0 and 1 mean False and True. `neutral` is the value of a knob that does not
    apply, `also` are further values that a row may have; both may be missing from `values`, and are then not
    crossed with the other knobs. `apart`: no value is known to take more than another: what a trial proves
    holds for its own value alone.
    """

    knob: str
    values: tuple[KnobValue, ...]
    neutral: KnobValue = None
    words: tuple[str | None, ...] = ()
    is_flag: bool = False
    also: tuple[KnobValue, ...] = ()
    apart: bool = False

    def encode(self, value: KnobValue) -> int:
        """Return the code of `value`. Raises ValueError for a word that the knob does not know."""
        if value is None:
            return 0
        if isinstance(value, str):
            return self.words.index(value)
        return int(value)

    def decode(self, code: int) -> KnobValue:
        """Return the value that `code` stands for."""
        if self.words:
            return self.words[code]
        if self.is_flag:
            return bool(code)
        return int(code) if code or self.neutral is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A legality rule: `broken(columns)` is True where it is violated.

    It is applied as soon as all of `knobs` have values. `message` states the rule in one line, with the names
    of the knobs, for messages and `flag explain`.
    """

    name: str
    knobs: tuple[str, ...]
    message: str
    broken: Callable[[Columns], BoolArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Candidates that mean the same: `canonical(columns)` gives, of `knobs`, what the engine would really use.

    It is applied as soon as all of `knobs` have values; rows that become equal are counted as merged.
    """

    name: str
    knobs: tuple[str, ...]
    canonical: Callable[[Columns], Columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Legality:
    """The knobs of a task, what makes a candidate illegal, and what makes two candidates the same."""

    axes: tuple[Axis, ...]
    rules: tuple[Rule, ...]
    merges: tuple[Merge, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """All legal, distinct candidates. A row is a number that the axes decode, so a space of millions stays small."""

    axes: tuple[Axis, ...]
    codes: tuple[IntArray, ...]
    rows: IntArray
    combinations: int
    illegal: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0

    def __len__(self) -> int:
        return int(self.rows.size)

    def columns(self, rows: IntArray | slice = slice(None)) -> dict[str, IntArray]:
        """Return the columns of some rows (positions, or a slice)."""
        return decode(self.rows[rows], self.codes, [axis.knob for axis in self.axes])

    def chunks(self, size: int) -> Iterator[slice]:
        """Yield slices that cover the space in pieces of at most `size` rows."""
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def candidate(self, row: int) -> Candidate:
        """Return the candidate at position `row`."""
        columns = self.columns(np.array([row]))
        return Candidate(tuple((axis.knob, axis.decode(int(columns[axis.knob][0]))) for axis in self.axes))

    @property
    def choices(self) -> dict[str, tuple[KnobValue, ...]]:
        """Every value that each knob can have."""
        return {
            axis.knob: tuple(axis.decode(int(code)) for code in sorted(codes.tolist()))
            for axis, codes in zip(self.axes, self.codes, strict=True)
        }

    def find(self, candidate: Candidate) -> int | None:
        """Return the position of `candidate`, or None if it is not in the space."""
        key = self._key(candidate)
        position = len(self) if key is None else int(np.searchsorted(self.rows, key))
        return position if position < len(self) and self.rows[position] == key else None

    def with_candidate(self, candidate: Candidate) -> Space:
        """Return the space with one more combination, `candidate`, unless it is in it already.

        Raises ValueError if an axis does not know its value.
        """
        key = self._key(candidate)
        if key is None:
            raise ValueError(f"{candidate} has a value that its axis does not know")
        if self.find(candidate) is not None:
            return self
        rows = np.insert(self.rows, int(np.searchsorted(self.rows, key)), key)
        return replace(self, rows=rows, combinations=self.combinations + 1)

    def _key(self, candidate: Candidate) -> int | None:
        values, key, stride = candidate.as_dict(), 0, 1
        for axis, codes in zip(self.axes, self.codes, strict=True):
            place = np.flatnonzero(codes == axis.encode(values.get(axis.knob, axis.neutral)))
            if not place.size:
                return None
            key += int(place[0]) * stride
            stride *= codes.size
        return key


def decode(
    rows: IntArray, codes: Sequence[IntArray], knobs: Sequence[str], wanted: Collection[str] | None = None
) -> dict[str, IntArray]:
    """Turn mixed-radix row numbers (the first knob varies fastest) into one column per knob, or per selected knob."""
    columns, left, skipped = {}, rows, 1
    for knob, values in zip(knobs, codes, strict=True):
        size = int(values.size)
        if wanted is not None and knob not in wanted:
            skipped *= size
            continue
        left, skipped = left // skipped if skipped > 1 else left, 1
        above = left // size  # NumPy divides by a number many times faster than it takes the rest
        columns[knob] = values.take(left - above * size)
        left = above
    return columns
