"""Parse a candidate as a user types it: knobs by name or short name, `tp=2, mbs 16, dist-opt`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from unicodedata import normalize

from flagcore.contracts import Workload
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import Knobs
from flagcore.domain.space import Axis, Columns, IntArray
from flagcore.errors import SpecError, UsageError
from flagcore.problem import Problem, candidate_columns
from flagcore.report.text import details, knob_of
from flagcore.stages.build import canonical

YES, NO, UNSET = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "-", "")
QUOTE = '"'
MOST = 80
"""Letters of what was typed that a message repeats."""


def parse_candidate(text: str, problem: Problem, workload: Workload) -> tuple[dict[str, IntArray], frozenset[str]]:
    """Return the columns of the candidate in `text`, and the knobs that it names: knob=value or knob value,
    with commas or blanks between.

    A flag may stand alone, or after `no`. A knob that is not named has the only value that the space gives it, if that
    does anything beside the named ones, else what the engine does without it; a data-parallel size is what the devices
    leave. Raises UsageError.
    """
    task, axes = problem.platform.task, problem.legality.axes
    given = _knob_values(text, axes, problem.knobs)
    for axis in axes:
        value, listed = given.get(axis.knob), (*axis.values, axis.neutral, *axis.also)
        if isinstance(value, int) and not axis.is_flag and value < 1 and value not in listed:
            raise UsageError(f"{axis.knob} = {value} is no size; {_values(axis)}")
    fixed = {axis.knob: axis.values[0] for axis in axes if len(axis.values) == 1}
    try:
        whole, plain = (candidate_columns(task, workload, values) for values in ({**fixed, **given}, given))
    except SpecError as error:
        wrong = [axis for axis in axes if axis.knob == error.key.rpartition(".")[2] and not error.fix]
        raise UsageError("; ".join([str(error), *map(_values, wrong)])) from None
    implied = [
        axis.knob
        for axis in axes
        if axis.is_flag and axis.knob not in given and (axis.knob not in fixed or plain[axis.knob][0])
    ]
    columns = {axis.knob: (plain if axis.knob in implied else whole)[axis.knob] for axis in axes}
    merged = canonical(columns, problem.legality.merges)
    return {knob: (columns if knob in given else merged)[knob] for knob in columns}, frozenset(given)


def as_candidate(axes: Sequence[Axis], columns: Columns) -> Candidate:
    """Return the candidate in columns of one row."""
    return Candidate(tuple((axis.knob, axis.decode(int(columns[axis.knob][0]))) for axis in axes))


def _knob_values(text: str, axes: Sequence[Axis], knobs: Knobs) -> dict[str, KnobValue]:
    by_name = {axis.knob.casefold(): axis for axis in axes}
    by_name |= {knob_of(axis.knob, knobs).title.casefold(): axis for axis in axes}
    given: dict[str, KnobValue] = {}
    for part in _parts(_from_json(text), by_name, knobs):
        if not part:
            continue
        name, value = _split(part, by_name)
        off, name = name.startswith("no "), name.removeprefix("no ")
        axis = by_name.get(name)
        if axis is None:
            raise UsageError(_unknown(part, name, by_name, _knobs(axes, knobs)))
        if value is None and not off and not axis.is_flag:
            raise UsageError(f"{part}: give {axis.knob} a value; {_values(axis)}")
        if off or value is None:
            values: dict[str, KnobValue] = {axis.knob: not off if axis.is_flag else axis.neutral}
        elif (further := details(axis.knob, knobs)) and value.casefold() not in (*YES, *NO):
            if len(value.split()) > len(further):
                raise UsageError(f"{part}: give {', '.join(further)}, in this order, and no more")
            how = zip(further, value.split(), strict=False)
            values = {axis.knob: True} | {knob: _value(each, by_name[knob]) for knob, each in how}
        else:
            values = {axis.knob: _value(value, axis)}
        if twice := given.keys() & values:
            raise UsageError(f"{part}: {', '.join(twice)} is given twice")
        given |= values
    if not given:
        raise UsageError(f"{text[:MOST]!r} names no knob; {_knobs(axes, knobs)}")
    return given


def _from_json(text: str) -> str:
    """Return a JSON object of knobs as `knob=value`, any other text with plain signs. Raises UsageError."""
    if not text.strip().startswith("{"):
        return re.sub(r"\s*=\s*", "=", normalize("NFKC", text))
    try:
        knobs = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{text[:MOST]!r} is no JSON object of knobs ({error}); quote it for the shell") from None
    return ", ".join(f"{name}={json.dumps(value).strip(QUOTE)}" for name, value in knobs.items())


def _parts(text: str, by_name: Mapping[str, Axis], knobs: Knobs) -> list[str]:
    """Return what stands between commas, or between blanks where knobs' names or words with an equals sign begin."""
    return [each for part in text.split(",") for each in _apart(part.strip(), by_name, knobs)]


def _apart(part: str, by_name: Mapping[str, Axis], knobs: Knobs) -> list[str]:
    """Return `TP2 MBS=4 full recompute` as its knobs, what begins with no knob in one piece."""
    words: list[str] = []
    for word in part.split():
        joined = re.fullmatch(r"(\D+)(\d+)", word)
        words += joined.groups() if joined and joined[1].casefold() in by_name else [word]
    words = _flag_first(words, by_name, knobs)
    starts = _starts(words, by_name)
    if not starts or (starts[0] != 0 and words[0].casefold() != "no"):
        return [part]
    firsts = [at - 1 if at and words[at - 1].casefold() == "no" else at for at in starts]
    return [" ".join(words[begin:end]) for begin, end in zip(firsts, [*firsts[1:], len(words)], strict=True)]


def _starts(words: Sequence[str], by_name: Mapping[str, Axis]) -> list[int]:
    """Return the places where a knob begins; the names of tables may have blanks in them."""
    longest = max(len(name.split()) for name in by_name)
    starts, at = [], 0
    while at < len(words):
        named = (each for each in range(longest, 0, -1) if _name(words[at : at + each]) in by_name)
        long = next(named, 0)
        starts += [at] if long or "=" in words[at] else []
        at += max(long, 1)
    return starts


def _name(words: Sequence[str]) -> str:
    """Return words without what the last one says after an equals sign."""
    return " ".join([*words[:-1], words[-1].partition("=")[0]]).casefold()


def _flag_first(words: Sequence[str], by_name: Mapping[str, Axis], knobs: Knobs) -> list[str]:
    """Return `full recompute` as tables have it: recompute full."""
    flags = {knob_of(axis.knob, knobs).title.casefold(): details(axis.knob, knobs) for axis in by_name.values()}
    turned = list(words)
    for at, (first, second) in enumerate(pairwise(words)):
        how = by_name.get(next(iter(flags.get(second.casefold(), ())), ""))
        if how and first.casefold() in filter(None, how.words):
            turned[at : at + 2] = [second, first]
    return turned


def _split(part: str, by_name: Mapping[str, Axis]) -> tuple[str, str | None]:
    """Return the name and the value of one knob; the names of tables may have blanks in them."""
    if "=" in part:
        name, _, value = part.partition("=")
        return name.strip().casefold(), value.strip()
    folded = " ".join(part.casefold().split())
    for name in sorted(by_name, key=len, reverse=True):
        if folded == name or folded == f"no {name}":
            return folded, None
        if folded.startswith(f"{name} "):
            return name, part.strip()[len(name) :].strip()
    return re.split(r"\s", folded)[0], None


def _value(text: str, axis: Axis) -> KnobValue:
    folded = text.strip("'\"").casefold()
    if axis.is_flag:
        if folded in YES or folded in NO:
            return folded in YES
        raise UsageError(f"{axis.knob} = {text} is neither true nor false")
    if folded in UNSET:
        return axis.neutral
    if re.fullmatch(r"-?\d{1,18}", folded) and not axis.words:
        return int(folded)
    return next((word for word in axis.words if word is not None and word.casefold() == folded), text)


def _unknown(part: str, name: str, by_name: Mapping[str, Axis], listed: str) -> str:
    near = get_close_matches(name[:MOST], by_name, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{part[:MOST]!r} is not a knob with a value, a trial, best or baseline; {hint}{listed}"


def _knobs(axes: Sequence[Axis], knobs: Knobs) -> str:
    labels = {axis.knob: knob_of(axis.knob, knobs).label for axis in axes}
    return f"knobs: {', '.join(name + (f' ({label})' if label else '') for name, label in labels.items())}"


def _values(axis: Axis) -> str:
    """Return what the space has of a knob, the first of many."""
    few = ", ".join("none" if value is None else str(value) for value in axis.values[:12])
    return f"the space has {few}{', ...' if len(axis.values) > 12 else ''}"
