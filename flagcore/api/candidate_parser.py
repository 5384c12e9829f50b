"""Parse a candidate as a user types it (`tp=2, mbs 16, dist-opt`), and find the rules that it breaks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from unicodedata import normalize

from flagcore.contracts import Problem
from flagcore.domain.knob import Knobs
from flagcore.domain.space import Axis, Candidate, Columns, ExcludingRule, IntArray, KnobValue, as_candidate
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import N_, _, did_you_mean
from flagcore.report.text import details, knob_of
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.stages.build import canonical

YES, NO, UNSET = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "-", "")
MAX_TEXT = 80
"""The maximum length of the input that a message repeats."""


def parse_candidate(text: str, problem: Problem) -> tuple[dict[str, IntArray], frozenset[str]]:
    """Return the columns of the candidate in `text`, and the names of the knobs that the text contains.

    The text has the form `knob=value` or `knob value`, separated by commas, or that of a command's flags (`--knob
    value`). A flag may stand alone, or after `no`, and is on if a knob that refines it is named. A missing knob gets
    its only value in the space if that value has an effect with the named knobs, else the engine's default. The
    data-parallel size follows from the number of devices. Raises UsageError.
    """
    axes = problem.legality.axes
    given_values = _knob_values(text, axes, problem.knobs)
    _require_valid(given_values, axes, problem.knobs)
    fixed_values = {axis.knob: axis.values[0] for axis in axes if len(axis.values) == 1}
    try:
        whole, plain = (
            candidate_columns(problem.platform, values) for values in ({**fixed_values, **given_values}, given_values)
        )
    except SpecError as error:
        wrong_axes = [axis for axis in axes if axis.knob == error.key.rpartition(".")[2] and not error.fix]
        raise UsageError("; ".join([str(error), *map(values_of, wrong_axes)])) from None
    implied_flags = [
        axis.knob
        for axis in axes
        if axis.is_flag and axis.knob not in given_values and (axis.knob not in fixed_values or plain[axis.knob][0])
    ]
    columns = {axis.knob: (plain if axis.knob in implied_flags else whole)[axis.knob] for axis in axes}
    canonical_columns = canonical(columns, problem.legality.merges)
    return {knob: (columns if knob in given_values else canonical_columns)[knob] for knob in columns}, frozenset(
        given_values
    )


def _require_valid(values: Mapping[str, KnobValue], axes: Sequence[Axis], knobs: Knobs) -> None:
    """Raise UsageError for a number below 1, or a value of a knob with effects, that the knob does not list."""
    for axis in axes:
        value, listed = values.get(axis.knob), (*axis.values, axis.neutral, *axis.extra_values)
        is_unknown = axis.knob in values and knob_of(axis.knob, knobs).effects and value not in listed
        if is_unknown or (isinstance(value, int) and not axis.is_flag and value < 1 and value not in listed):
            text = N_("{knob} = {value} is not a valid value; {values}")
            raise UsageError(_(text, knob=axis.knob, value=value, values=values_of(axis)))


def broken_rules_of(problem: Problem, columns: Columns) -> list[ExcludingRule]:
    """Return the rules that one candidate breaks, each with the candidate's values of its knobs."""
    values = as_candidate(problem.space.axes, columns).as_dict()
    return [
        ExcludingRule(rule=rule.name, message=rule.message, values={knob: values.get(knob) for knob in rule.knobs})
        for rule in problem.legality.rules
        if not rule.search_only and bool(rule.broken(columns).any())
    ]


def legal_candidate(problem: Problem, columns: Columns) -> Candidate:
    """Return the candidate in one-row `columns`, as the engine runs it. Raises UsageError if it is illegal."""
    if rules := broken_rules_of(problem, columns):
        raise UsageError(_("the candidate is illegal: {rules}", rules="; ".join(map(str, rules))))
    return as_candidate(problem.space.axes, canonical(columns, problem.legality.merges))


def _knob_values(text: str, axes: Sequence[Axis], knobs: Knobs) -> dict[str, KnobValue]:
    """Return the value of each knob that `text` names. Raises UsageError."""
    by_name = {axis.knob.casefold(): axis for axis in axes}
    by_name |= {knob_of(axis.knob, knobs).title.casefold(): axis for axis in axes}
    knob_values: dict[str, KnobValue] = {}
    for part, off, axis, value in _named_knobs(text, by_name, knobs, _knobs(axes, knobs)):
        if off or value is None:
            values = {axis.knob: _value_alone(part, axis, off=off)}
        else:
            values = _values_of_part(part, axis, value, by_name, details(axis.knob, knobs))
        if twice := knob_values.keys() & values:
            raise UsageError(_("{part}: repeated knob: {knobs}", part=part, knobs=", ".join(twice)))
        knob_values |= values
    parents = {by_name.get(knobs[name].part_of) for name, value in knob_values.items() if value and name in knobs}
    knob_values = {axis.knob: True for axis in parents if axis and axis.is_flag} | knob_values
    if not knob_values:
        raise UsageError(_("{text!r} contains no knob; {knobs}", text=text[:MAX_TEXT], knobs=_knobs(axes, knobs)))
    return knob_values


def _value_alone(part: str, axis: Axis, *, off: bool) -> KnobValue:
    """Return the value of a knob that is named without one, maybe after `no`. Raises UsageError if it needs one."""
    if axis.is_flag:
        return not off
    if not off:
        raise UsageError(_("{part}: {knob} needs a value; {values}", part=part, knob=axis.knob, values=values_of(axis)))
    return axis.neutral


def _values_of_part(
    part: str, axis: Axis, value: str, by_name: Mapping[str, Axis], further: Sequence[str]
) -> dict[str, KnobValue]:
    """Return the values of a knob and, if `value` has those instead, of the knobs `further` that refine it."""
    if not further or value.casefold() in (*YES, *NO):
        return {axis.knob: _value(value, axis)}
    if len(value.split()) > len(further):
        raise UsageError(_("{part}: expected {knobs}, in this order", part=part, knobs=", ".join(further)))
    pairs = zip(further, value.split(), strict=False)
    return {axis.knob: True} | {knob: _value(each, by_name[knob]) for knob, each in pairs}


def _named_knobs(
    text: str, by_name: Mapping[str, Axis], knobs: Knobs, listed: str
) -> Iterator[tuple[str, bool, Axis, str | None]]:
    """Yield, for each knob in `text`, its part of the text, whether it is negated by `no`, its axis, and its value.

    `listed` is the list of knobs for error messages.
    """
    names = "|".join(map(re.escape, sorted(by_name, key=len, reverse=True)))
    knob_and_value = re.compile(rf"(no\s+)?({names})(?:\s*=\s*|\s+|(?=\d)|$)(.*)", re.IGNORECASE)
    text = re.sub(r"(?:^|(?<=\s))--([\w-]+)", lambda flag: "," + flag[1].replace("-", "_"), normalize("NFKC", text))
    parts = list[str]()
    for part in filter(None, re.split(r"\s*,\s*", text.strip())):
        previous = knob_and_value.fullmatch(parts[-1]) if parts else None
        takes_words = previous is not None and knob_of(by_name[previous[2].casefold()].knob, knobs).kind == "words"
        if takes_words and not knob_and_value.fullmatch(part):
            parts[-1] += f",{part}"  # a further word of its value
        else:
            parts.append(part)
    for part in parts:
        if (match := knob_and_value.fullmatch(part)) is None:
            hint = did_you_mean(re.split(r"[\s=]", part)[0].casefold()[:MAX_TEXT], by_name, cutoff=0.7)
            problem = _("{text!r} is not a knob with a value, a trial, best or baseline", text=part[:MAX_TEXT])
            raise UsageError("; ".join(filter(None, [problem, hint, listed])))
        yield part, bool(match[1]), by_name[match[2].casefold()], match[3] or None


def _value(text: str, axis: Axis) -> KnobValue:
    folded = text.strip("'\"").casefold()
    if axis.is_flag:
        if folded in YES or folded in NO:
            return folded in YES
        raise UsageError(_("{knob} = {value} is neither true nor false", knob=axis.knob, value=text))
    if folded in UNSET:
        return axis.neutral
    if re.fullmatch(r"-?\d{1,18}", folded) and not axis.words:
        return int(folded)
    parts = sorted(re.split(r"\s*,\s*", folded))
    return next((word for word in axis.words if word is not None and sorted(word.casefold().split(",")) == parts), text)


def _knobs(axes: Sequence[Axis], knobs: Knobs) -> str:
    labels = {axis.knob: knob_of(axis.knob, knobs).label for axis in axes}
    names = (f"{name} ({label})" if label else name for name, label in labels.items())
    return _("knobs: {names}", names=", ".join(names))


def values_of(axis: Axis) -> str:
    """Return a phrase that lists the first values of a knob in the space."""
    value_list = ", ".join("none" if value is None else str(value) for value in axis.values[:12])
    return _("the space has {values}", values=value_list + (", ..." if len(axis.values) > 12 else ""))
