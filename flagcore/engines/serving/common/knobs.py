"""One table a knob: its name, its flag, what `auto` tries, and how a value of a spec is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.objective import is_rate
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray
from flagcore.domain.spec import AUTO, Task
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.common.names import DP, EP, INSTANCES, PP, SIZES, TP
from flagcore.engines.serving.common.place import Place
from flagcore.errors import SpecError

INT, FLAG, WORD, SHARE, SPLIT = "int", "flag", "word", "share", "split"
"""Kinds: a whole number, yes or no, one of some words, a number between 0 and 1, devices of unequal instances."""
SHARES = tuple(f"{thousandths / 1000:g}" for thousandths in range(1, 1001))
"""The values of a SHARE as words, so that its code is the same in every task: thousandths."""
SPELT_OTHERWISE = {"instance": INSTANCES}
"""FlagScale's names of knobs."""
WITHOUT_SAYING: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys((INSTANCES, TP, PP, DP, EP), (None, 1)),
    **dict.fromkeys((SIZES, "max_num_seqs", "max_num_batched_tokens", "block_size"), (None,)),
    "enforce_eager": (None, False),
}
"""The knobs of job records, and their values that an engine without such a knob has anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A knob of an engine. `neutral` is the value with which the engine is not told of it.

    `flags` are its spellings on the command line without dashes, the one to use first; none where flagcore or the
    environment carries it. Of a FLAG, they say True, and `off` says False. `auto` gives what is worth trying,
    `codes` the numbers behind an INT's words. `meant` are names of the same knob in other engines, which job records
    and specs for several engines may use.
    """

    name: str
    kind: str = INT
    auto: Callable[[Task], Sequence[KnobValue]] = lambda task: ()
    words: tuple[str, ...] = ()
    codes: Mapping[str, int] | None = None
    neutral: KnobValue = None
    flags: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    meant: tuple[str, ...] = ()

    def value(self, given: object, key: str) -> KnobValue:
        """Return `given`, as a spec has it under `key`, as a value of this knob. Raises SpecError."""
        if given is None:
            return self.neutral
        if self.kind == FLAG and isinstance(given, bool):
            return given
        if self.kind == INT and isinstance(given, str) and given in (self.codes or {}):
            return (self.codes or {})[given]
        if self.kind == INT and isinstance(given, int) and not isinstance(given, bool) and (given or self.neutral):
            return given  # 0 is the code of a knob that is not set
        if self.kind == SPLIT:
            return heterogeneous.read(given, key)
        if self.kind == WORD:
            word = {True: "on", False: "off"}.get(given, str(given)) if isinstance(given, bool) else str(given)
            if word in self.words:
                return word
        if self.kind == SHARE and (share := _number(given)) is not None and 0 < share <= 1:
            return SHARES[max(1, round(share * len(SHARES))) - 1]
        raise SpecError(key=key, value=given, problem=f"is no value of {self.name}", fix=self._fix(given))

    def _fix(self, given: object) -> str:
        if self.kind == WORD:
            near = get_close_matches(str(given), self.words, n=1)
            return f"did you mean {near[0]}?" if near else f"use {', '.join(self.words)}"
        wanted = {INT: "a whole number from 1, or null", FLAG: "true or false", SHARE: "a number above 0, at most 1"}[
            self.kind
        ]
        return f"use {wanted}" + "".join(f", or {word}" for word in self.codes or ())

    def axis(self, task: Task, fixed: KnobValue) -> Axis:
        """Return the axis of a task: the values that its spec names, else the one that is `fixed` for all."""
        asked, key = self._named(task.spec.space), f"auto_tuner.space.{self.name}"
        if asked == AUTO:
            values = tuple(self.auto(task)) or (fixed,)
        elif asked is None:
            values = (fixed,)
        else:
            values = tuple(self.value(each, key) for each in asked)
        baseline = self._named(task.spec.baseline or {})
        others = (fixed, self.neutral, *(() if baseline is None else (self.value(baseline, "auto_tuner.baseline"),)))
        words = heterogeneous.words(task) if self.kind == SPLIT else SHARES if self.kind == SHARE else self.words
        return Axis(
            knob=self.name,
            values=tuple(dict.fromkeys(values)),
            neutral=self.neutral,
            words=(None, *words) if words else (),
            is_flag=self.kind == FLAG,
            also=tuple(each for each in dict.fromkeys(others) if each not in values),
        )

    def arguments(self, value: KnobValue) -> tuple[str, ...]:
        """Return the flags that tell the engine `value`; none for what it does by itself."""
        if value is None or value == self.neutral or not (self.flags or self.off):
            return ()
        if self.kind == FLAG:
            spelt = self.flags if value else self.off
            return (f"--{spelt[0]}",) if spelt else ()
        return (f"--{self.flags[0]}", str(value))

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, then others for it."""
        return (self.name, *self.meant, *(other for other, meant in SPELT_OTHERWISE.items() if meant == self.name))

    def _named(self, given: Mapping[str, Any]) -> Any:
        """Return what a mapping has under one of its names."""
        return next((given[each] for each in self.names if each in given), None)


def axes(task: Task, knobs: Sequence[Knob], fixed: Mapping[str, KnobValue]) -> tuple[Axis, ...]:
    """Return the axes of all knobs. Raises SpecError for a key of the space that is none of them."""
    for given, where in ((task.spec.space, "space"), (task.spec.baseline or {}, "baseline")):
        _known(given, knobs, task.spec.serve.engine, f"auto_tuner.{where}.")
    return tuple(knob.axis(task, fixed.get(knob.name, knob.neutral)) for knob in knobs)


def values(given: Mapping[str, object], knobs: Sequence[Knob], engine: str) -> dict[str, KnobValue]:
    """Return `flagcore.engines.serving.common.contract.Engine.values` for some knobs."""
    named = _known(given, knobs, engine, "")
    return {knob.name: knob.value(given[name], name) for name, knob in named.items()}


def _known(given: Mapping[str, object], knobs: Sequence[Knob], engine: str, where: str) -> dict[str, Knob]:
    """Return the knobs that a mapping names, by the names that it has. Raises SpecError for none, and for one twice."""
    by_name = {name: knob for knob in knobs for name in knob.names}
    found: dict[str, Knob] = {}
    for name, value in given.items():
        if name not in by_name:
            if value in WITHOUT_SAYING.get(name, ()):
                continue
            own = [knob.name for knob in knobs]
            near = get_close_matches(str(name), own, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"its knobs: {', '.join(own)}"
            raise SpecError(key=f"{where}{name}", problem=f"is no knob of {engine}", fix=fix)
        knob = by_name[name]
        twice = next((other for other, known in found.items() if known is knob), None)
        if twice is not None:
            problem, fix = f"is the same knob of {engine} as {twice}", "give one of the two"
            raise SpecError(key=f"{where}{name}", problem=problem, fix=fix)
        found[name] = knob
    return found


def split_arguments(
    args: Mapping[str, EngineArg], knobs: Sequence[Knob]
) -> tuple[dict[str, KnobValue], dict[str, EngineArg]]:
    """Return which knobs a spec's `engine_args` fix for all candidates, and the flags that are no knobs.

    A knob may be given by its own name or by a flag of the engine. Raises SpecError.
    """
    fixed: dict[str, KnobValue] = {}
    others: dict[str, EngineArg] = {}
    for key, value in args.items():
        name = bare(key)
        knob = next((each for each in knobs if name in (each.name.replace("_", "-"), *each.flags, *each.off)), None)
        if knob is None:
            others[name] = value
        elif knob.kind == FLAG and name in knob.off and isinstance(value, bool):
            fixed[knob.name] = not value
        else:
            fixed[knob.name] = knob.value(value, f"serve.engine_args.{key}")
    return fixed, others


def bare(flag: str) -> str:
    """Return a flag without its dashes, words joined by dashes."""
    return flag.lstrip("-").replace("_", "-")


def arguments(knobs: Sequence[Knob], values: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """Return the command line of a candidate's knobs."""
    return tuple(word for knob in knobs for word in knob.arguments(values.get(knob.name, knob.neutral)))


def column(columns: Columns, knob: Knob, fixed: Mapping[str, KnobValue]) -> IntArray:
    """Return a knob's column; where there is none, what is fixed for all, or its neutral value."""
    if knob.name in columns:
        return columns[knob.name]
    like = next(iter(columns.values()), np.zeros(1))
    value = fixed.get(knob.name, knob.neutral)
    words = SHARES if knob.kind == SHARE else knob.words
    return np.full(like.shape, words.index(value) + 1 if isinstance(value, str) else value or 0)


def shares(codes: IntArray, otherwise: FloatArray | float) -> FloatArray:
    """Return a SHARE's column as numbers, `otherwise` where it is not set."""
    return np.where(codes > 0, codes / len(SHARES), otherwise)


UNEQUAL = Knob(name=SIZES, kind=SPLIT, auto=heterogeneous.worth_trying)


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """Return the powers of two from `first`, one of them, to `last`."""
    return tuple(first << step for step in range(max(0, last // first).bit_length()))


def instances(task: Task) -> tuple[int, ...]:
    """Return the divisors of the cards for a rate; for a latency one instance: more of them answer no sooner."""
    return divisors(Place.of(task).cards) if is_rate(task.spec.objective) else (1,)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in ascending order."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
