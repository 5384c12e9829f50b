"""Candidates, and the space of all legal candidates, which is stored as one 64-bit integer per candidate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flagcore.i18n import N_, _

KnobValue: TypeAlias = int | bool | str | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A combination of knob values: pairs of name and value, in the order of the space."""

    items: tuple[tuple[str, KnobValue], ...]

    @classmethod
    def of(cls, values: Mapping[str, KnobValue]) -> Candidate:
        """Return the candidate with the given knob values, in the order of the mapping."""
        return cls(tuple(values.items()))

    def as_dict(self) -> dict[str, KnobValue]:
        """Return the knob values by knob name."""
        return dict(self.items)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.items)


IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
Columns: TypeAlias = Mapping[str, IntArray]
"""Candidates as arrays: one integer array per knob, with one element per candidate. Integers are stored as they are,
None and False as 0, True as 1, and a word as its position in `Axis.words`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A knob and its values in a space.

    `values`: the values that are combined with all values of the other knobs.
    `neutral`: the value if the knob does not apply. It is valid even if it is not in `values`.
    `words`: if the values are words, `words[code]` is the word of a code. Code 0 means None.
    `is_flag`: whether the codes 0 and 1 mean False and True.
    `extra_values`: further values that a candidate may have.
    `is_unordered`: whether the order of the values by time or memory is unknown.
    """

    knob: str
    values: tuple[KnobValue, ...]
    neutral: KnobValue = None
    words: tuple[str | None, ...] = ()
    is_flag: bool = False
    extra_values: tuple[KnobValue, ...] = ()
    is_unordered: bool = False

    def encode(self, value: KnobValue) -> int:
        """Return the integer that stands for `value` in columns. Raises ValueError for an unknown word."""
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
    """A legality rule. Candidates that break it are not legal.

    `knobs`: the names of the knobs that the rule depends on.
    `message`: the rule in one line, with the names of its knobs.
    `broken`: a function that takes columns and returns a boolean array: True for each candidate that breaks the rule.
    `search_only`: whether the rule only limits the search, so that candidates named by the user may break it.
    `least_rows`: of a bound: the partial candidates from which a space is large.
    `most_rows`: of a bound that keeps a number of candidates of each piece: how many it can judge in time.
    """

    name: str
    knobs: tuple[str, ...]
    message: str
    broken: Callable[[Columns], BoolArray]
    search_only: bool = False
    least_rows: int = 0
    most_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludingRule:
    """A rule that excludes a candidate, with the values of the candidate that it uses."""

    rule: str
    message: str
    values: Mapping[str, KnobValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}: {_(self.message)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A merge of equivalent candidates into one.

    `knobs`: the names of the knobs that the merge depends on.
    `canonical`: a function that takes columns and returns new columns for some of `knobs`: the values that the engine
    actually uses. Candidates that become equal are counted as merged.
    """

    name: str
    knobs: tuple[str, ...]
    canonical: Callable[[Columns], Columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Legality:
    """The axes of a task, its legality rules, and its merges.

    `bounds`: rules that remove hopeless candidates from large spaces before they are complete.
    """

    axes: tuple[Axis, ...]
    rules: tuple[Rule, ...]
    merges: tuple[Merge, ...]
    bounds: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Space:
    """All legal, distinct candidates. A row is the position of a candidate in the space.

    `codes`: for each axis, the codes of its values.
    `rows`: one mixed-radix number per candidate, sorted. Each digit is an index into `codes` of one axis.
    `combinations`: the number of all combinations of values.
    `illegal`: the number of combinations that each rule removed, by the name of the rule.
    `merged`: the number of combinations that were merged into equivalent ones.
    """

    axes: tuple[Axis, ...]
    codes: tuple[IntArray, ...]
    rows: IntArray
    combinations: int
    illegal: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0

    def __len__(self) -> int:
        return int(self.rows.size)

    def columns(self, rows: IntArray | slice = slice(None)) -> dict[str, IntArray]:
        """Return the columns of the candidates in `rows`, by default of all."""
        return decode(self.rows[rows], self.codes, [axis.knob for axis in self.axes])

    def chunks(self, size: int) -> Iterator[slice]:
        """Yield slices of at most `size` rows that cover the space."""
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def candidate(self, row: int) -> Candidate:
        """Return the candidate in `row`."""
        return as_candidate(self.axes, self.columns(np.array([row])))

    @property
    def choices(self) -> dict[str, tuple[KnobValue, ...]]:
        """The values that each knob has in the space, sorted by code."""
        return {
            axis.knob: tuple(axis.decode(int(code)) for code in sorted(codes.tolist()))
            for axis, codes in zip(self.axes, self.codes, strict=True)
        }

    def find(self, candidate: Candidate) -> int | None:
        """Return the row of `candidate`, or None if it is not in the space."""
        key = self._key(candidate)
        position = len(self) if key is None else int(np.searchsorted(self.rows, key))
        return position if position < len(self) and self.rows[position] == key else None

    def with_candidate(self, candidate: Candidate) -> Space:
        """Return the space with `candidate` added, unless the space already contains it.

        Raises ValueError if the candidate has a value that is not on the knob's axis.
        """
        key = self._key(candidate)
        if key is None:
            raise ValueError(f"{candidate} has a value that its axis does not have")
        if self.find(candidate) is not None:
            return self
        rows = np.insert(self.rows, int(np.searchsorted(self.rows, key)), key)
        return replace(self, rows=rows, combinations=self.combinations + 1)

    def _key(self, candidate: Candidate) -> int | None:
        values, key, stride = candidate.as_dict(), 0, 1
        for axis, codes in zip(self.axes, self.codes, strict=True):
            digits = np.flatnonzero(codes == axis.encode(values.get(axis.knob, axis.neutral)))
            if not digits.size:
                return None
            key += int(digits[0]) * stride
            stride *= codes.size
        return key


def as_candidate(axes: Sequence[Axis], columns: Columns) -> Candidate:
    """Return the candidate that `columns` describe, which have a single row."""
    return Candidate(tuple((axis.knob, axis.decode(int(columns[axis.knob][0]))) for axis in axes))


def decode(
    rows: IntArray, codes: Sequence[IntArray], knobs: Sequence[str], wanted: Collection[str] | None = None
) -> dict[str, IntArray]:
    """Convert `rows`, which are mixed-radix numbers (see `Space`), to columns. The first knob varies fastest.

    `wanted`: the knobs whose columns are returned. None means all.
    """
    columns, remainder, divisor = {}, rows, 1
    for knob, values in zip(knobs, codes, strict=True):
        size = int(values.size)
        if wanted is not None and knob not in wanted:
            divisor *= size
            continue
        remainder, divisor = remainder // divisor if divisor > 1 else remainder, 1
        quotient = remainder // size  # many times faster than NumPy's operator %
        columns[knob] = values.take(remainder - quotient * size)
        remainder = quotient
    return columns


def rows_by_codes(columns: Columns, knobs: Sequence[str]) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """Yield each distinct combination of codes of `knobs`, and the indices of the candidates that have it."""
    groups, inverse = np.unique(np.stack([columns[knob] for knob in knobs]), axis=1, return_inverse=True)
    for group, codes in enumerate(groups.T.tolist()):
        yield tuple(codes), np.flatnonzero(inverse.reshape(-1) == group)


DOES_NOT_FIT = "does_not_fit"
NEEDS_AS_MUCH_MEMORY = "needs_as_much_memory_as_one_that_ran_out"
DOES_AS_MUCH_WORK = "does_the_work_of_a_measured_one_and_more"
LEARNED_MESSAGES = {
    DOES_NOT_FIT: N_("the candidate's predicted memory is more than a device has"),
    NEEDS_AS_MUCH_MEMORY: N_("a trial ran out of memory, and no knob of this candidate needs less"),
    DOES_AS_MUCH_WORK: N_("a trial was measured, and this candidate does at least as much work"),
}
"""The messages of the pruning rules that are derived from predictions and from trials, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The candidates that rules have removed from the space. A row is the position of a candidate in the space.

    `rule`: for each row, the rule that removed it: 0 for a row that was not removed, otherwise the index in `rules`
    plus one.
    `trial`: for each row, the number of the trial from which that rule was learned. -1 for other rules.
    `exceeds_memory`: for each row, whether it does not fit according to corrected predictions.
    `applied_trials`: the numbers of the trials from which rules have already been learned.
    """

    rule: NDArray[np.int16]
    trial: IntArray
    exceeds_memory: BoolArray
    rules: tuple[str, ...] = ()
    applied_trials: frozenset[int] = field(default_factory=frozenset)

    @property
    def open_rows(self) -> IntArray:
        """The rows that no rule has removed."""
        return np.flatnonzero(self.rule == 0)

    def reason(self, row: int) -> str | None:
        """Return the name of the rule that removed `row`, or None if the row was not removed.

        For a learned rule, the number of the trial is added to the name.
        """
        rule = int(self.rule[row])
        if not rule:
            return None
        trial = int(self.trial[row])
        return self.rules[rule - 1] + (f" (trial {trial})" if trial >= 0 else "")


def pareto(first: FloatArray, second: FloatArray) -> IntArray:
    """Return the indices of the Pareto-optimal points, sorted by descending `first`. Both arrays have one element per
    point.

    For these points, no other point has a higher `first` and a higher `second`. Points with NaN are skipped.
    """
    order = np.lexsort((-second, -first))
    order = order[~np.isnan(first[order]) & ~np.isnan(second[order])]
    best_before = np.maximum.accumulate(np.concatenate(([-np.inf], second[order])))[:-1]
    return order[second[order] > best_before].astype(np.int64)
