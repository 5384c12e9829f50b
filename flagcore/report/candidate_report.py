"""Formats the report on a candidate, and the comparison of two candidates with the causes of their difference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from flagcore.domain.knob import Knobs
from flagcore.domain.prediction import Belief, Prediction
from flagcore.domain.records import GIB
from flagcore.domain.space import ExcludingRule, KnobValue
from flagcore.domain.spec import SERVING, objective_value
from flagcore.i18n import N_, _
from flagcore.report.explanation import memory_parts, shown_latencies, used_text
from flagcore.report.formats import IF_KNOWN, NAMES, Notebook, hardware_text, shown, table
from flagcore.report.text import (
    details,
    heading,
    knob_of,
    latency_name,
    layers_text,
    nearest_limit,
    objective_text,
    part_name,
    state_name,
    value_text,
    values_text,
    waits,
    word_of,
)

SAME = 1e-9
"""The maximum relative difference between figures that count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningRule(ExcludingRule):
    """A rule that removed a legal candidate. `trial` is the number of the trial from which the rule was learned."""

    trial: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another candidate that is named in the report on a candidate.

    `differs`: the knobs in which both differ, each with the values of the reported and of the other candidate. `trial`:
    the number of its trial, if it has one. `measured`: whether `known_s` was measured.
    """

    candidate: Mapping[str, KnobValue]
    differs: Mapping[str, tuple[KnobValue, KnobValue]]
    predicted: Prediction
    known_s: float | None
    trial: int | None
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CandidateReport(Notebook):
    """A report on one candidate, in GiB and seconds. Knobs are given by name.

    - `name`: the input.
    - `requested`: its knobs if another, equivalent `candidate` is reported.
    - `state`: ILLEGAL, OUTSIDE, REMOVED, RAN or OPEN.
    - `because`: the reasons for the state.
    - `rules`: the rules that cause the state, each with `rule`, `message`, the `values` that it uses, and the `trial`
      of a learned rule.
    - `predicted`: the prediction, or None for an illegal candidate. Its sizes are in bytes, and in GiB in
      `as_data()`.
    - `published`: the prediction with the settings of the published run that `name` stands for.
    - `believed`: the prediction corrected by trials.
    - `trials`: the trials of the candidate.
    - `known_s`: the step time as measured, else believed, else predicted.
    - `known_by`: in words, how this time and those of `changes` are known.
    - `changes`: up to three other candidates: `allowed` is the nearest valid one, `faster` a faster one nearby, and
      `fastest` the fastest of all that a plan proposes. Each has `differs`, `candidate`, `predicted`, `known_s`,
      `trial` and `measured`.
    - `causes`: a paragraph on where the candidate spends more or less time than the best; the best is compared with the
      baseline.
    - `matches`: if `name` does not determine a candidate of the space, the fastest matching one is reported, and these
      are the next ones.
    - `limits`: the latency limits in seconds, by statistic.
    - `knobs`: the knobs of the task; used only to render the report as text.
    """

    name: str
    where: str
    chip: str
    devices: int
    objective: str
    candidate: Mapping[str, KnobValue]
    state: str
    because: tuple[str, ...]
    rules: tuple[ExcludingRule, ...] = ()
    requested: Mapping[str, KnobValue] | None = None
    predicted: Prediction | None = None
    published: Prediction | None = field(default=None, metadata=IF_KNOWN)
    believed: Belief | None = None
    known_s: float | None = None
    known_by: str = ""
    trials: tuple[Mapping[str, Any], ...] = ()
    changes: Mapping[str, Alternative] = field(default_factory=dict)
    causes: str = ""
    matches: tuple[Alternative, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    knobs: Knobs = field(default_factory=dict)

    def __str__(self) -> str:
        return candidate_report_text(self)

    def __repr__(self) -> str:
        return f"<CandidateReport of {self.name}: {self.state}; {self.because[0]}>"


def candidate_report_text(report: CandidateReport) -> str:
    """Format the report on a candidate as text."""
    knobs = report.knobs
    hardware = hardware_text(report.devices, report.chip)
    place = _("{name} on {hardware}", name=_title(report.name), hardware=hardware)
    lines = [f"{place}: {values_text(report.candidate, knobs)}", *([report.causes] if report.causes else [])]
    lines += [f"  {state_name(report.state)}", *(f"  - {line}" for line in report.because)]
    if report.requested:
        pairs = {knob: (value, report.candidate[knob]) for knob, value in report.requested.items()}
        changed = differs_text({knob: pair for knob, pair in pairs.items() if pair[0] != pair[1]}, knobs)
        lines.append("  " + _("equivalent for the engine: {changes}", changes=changed))
    return "\n".join([*lines, *_predicted(report), *_changes(report), *_matches(report)])


def _title(name: str) -> str:
    """Return the start of a line about a candidate: a trial, a position in the prediction, best or baseline."""
    kind, _separator, number = name.partition(" ")
    if number.isdecimal():
        return _("Trial {number}", number=number) if kind == "trial" else _("Candidate {number}", number=number)
    titles = {"the candidate": N_("The candidate"), "best": N_("Best"), "baseline": N_("Baseline")}
    titles["recommended"] = N_("Recommended")
    return _(titles[name]) if name in titles else name[:1].upper() + name[1:]


def seconds_text(objective: str, seconds: float) -> str:
    """Format a step time in seconds in the unit of the objective."""
    if objective in SERVING:
        return objective_text(objective, objective_value(objective, seconds))
    return f"{seconds:.4g} s/step"


def differs_text(differs: Mapping[str, Any], knobs: Knobs) -> str:
    """Return a text with the knobs in which two candidates differ, each with both values."""
    lines = []
    for name, pair in differs.items():
        knob, texts = knob_of(name, knobs), [differs[each] for each in details(name, knobs) if each in differs]
        words = [" ".join(str(each[place]) for each in texts if each[place] is not None) for place in (0, 1)]
        before, after = (word or value_text(word_of(knob, value)) for word, value in zip(words, pair, strict=True))
        lines += [] if knob.part_of in differs else [f"{knob.title} {before} -> {after}"]
    return ", ".join(lines)


def _predicted(report: CandidateReport) -> Iterator[str]:
    """Yield lines with the predicted time, its 80% interval, and the memory of a candidate."""
    predicted = report.predicted
    if predicted is None:
        yield _("No prediction, because it breaks a rule.")
        return
    used, step_s = f"~{used_text(predicted, '.4g')} GiB", predicted.step_time_s
    if step_s is None:
        yield _("Predicted: {value}", value=f"{used}; {predicted.reason or _('time unknown')}")
    elif bounds := predicted.objective or predicted.step:
        interval = _("(80% of predictions: {low} to {high})", low=shown(bounds.low), high=shown(bounds.high))
        yield _("Predicted: {value}", value=f"~{seconds_text(report.objective, step_s)} {interval}, {used}")
    yield from (f"  {line}" for line in _parts(predicted, report.limits))
    if report.believed is not None:
        seconds, chance = report.believed.step_time_s, report.believed.chance_to_fit
        value = seconds_text(report.objective, seconds)
        text = N_("Predicted after trials: ~{value}, probability of fitting in memory {chance:.0%}")
        yield _(text, value=value, chance=chance) + _gain(seconds, step_s)


def _parts(predicted: Prediction, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield the latencies, the parts of the time and of the memory, and the layers of each stage."""
    figures = shown_latencies(predicted, limits).items()
    if figures:
        yield ", ".join(f"{latency_name(name)} {shown(each)} s" for name, each in figures)
    if nearest := nearest_limit(predicted.figures, limits)[1]:
        yield _("nearest limit: {limit}", limit=nearest)
    if parts := [f"{_(part_name(part))} {seconds:.3g} s" for part, seconds in predicted.parts_s.items() if seconds]:
        yield f"{_('time of a request') if predicted.objective else _('time')}: " + ", ".join(parts)
    yield from waits(predicted)
    shares = [(name, share) for name, share in predicted.figures.items() if name.endswith("_hit_rate") and share]
    if shares:
        yield ", ".join(f"{share:.1%} {_(NAMES['rates'][name])}" for name, share in shares)
    sizes = ", ".join(f"{_(name)} {size / GIB:.3g}" for name, size in memory_parts(predicted).items())
    yield f"{_('memory')}: {sizes} GiB"
    if layers := predicted.stage_layers:
        yield _("Layers of each pipeline stage: {layers}", layers=layers_text(layers))


def _gain(seconds: float | None, other: float | None) -> str:
    """Return the relative change of a time in parentheses, or an empty string if it is unknown."""
    return f" ({_('time')} {seconds / other - 1.0:+.1%})" if seconds and other else ""


def _changes(report: CandidateReport) -> Iterator[str]:
    """Yield lines with the candidates that could be tried instead."""
    known_s, changes = report.known_s, dict(report.changes)
    names = dict(NAMES["changes"])
    if "fastest" in changes and changes["fastest"] == changes.get("faster"):
        names["faster"] = names["fastest"]
        del changes["fastest"]
    if not changes and report.state not in ("open", "ran"):
        yield _("No change is possible: no allowed candidate is left.")
    elif known_s is not None and not changes.keys() & {"faster", "fastest"}:
        yield _("No allowed candidate is expected to be faster.")
    if changes:
        yield _("Possible changes (times are {known_by}):", known_by=report.known_by)
    for kind, change in changes.items():
        trial = "" if change.trial is None else f", {_('trial')} {change.trial}"
        used = f"~{change.predicted.device_used_bytes / GIB:.3g} GiB{trial}"
        differs = differs_text(change.differs, report.knobs)
        yield f"  {_(names[kind])}: {differs}: {_time(report, change)}{_gain(change.known_s, known_s)}, {used}"


def _matches(report: CandidateReport) -> Iterator[str]:
    """Yield lines with the next candidates that have the knobs of the input."""
    if report.matches:
        yield _("It is the fastest with these knobs. The next ones:")
    for each in report.matches:
        yield f"  {values_text(each.candidate, report.knobs)}: {_time(report, each)}"


def _time(report: CandidateReport, other: Alternative) -> str:
    """Format the expected step time of another candidate."""
    step, mark = other.known_s, "" if other.measured else "~"
    return _("time unknown") if step is None else f"{mark}{seconds_text(report.objective, step)}"


SIGNIFICANT, NOT_SIGNIFICANT = "significant", "not significant"
CORRECTED, PREDICTED, UNKNOWN = "corrected", "predicted", "unknown"
"""The certainty of a comparison. SIGNIFICANT: all runs of one candidate are faster by more than the noise.
NOT_SIGNIFICANT: both were measured, but the runs overlap. CORRECTED: at least one time is a prediction that trials of
both runs correct. PREDICTED: at least one time is an uncorrected prediction. UNKNOWN: a time is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRuns:
    """The measured runs of a compared candidate; see `Comparison`."""

    step_time_s: float | None
    spread_s: float
    between_s: float | None
    runs: int
    noise: float
    fidelity: str
    device_used_gib: float | None = field(default=None, metadata=IF_KNOWN)

    def share(self, seconds: float | None) -> float | None:
        """Return `seconds` as a fraction of the step time, or None."""
        return seconds / self.step_time_s if seconds is not None and self.step_time_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two compared candidates; see `Comparison`."""

    name: str
    where: str
    candidate: Mapping[str, KnobValue]
    chip: str
    devices: int
    state: str
    because: tuple[str, ...]
    predicted: Prediction | None
    believed: Belief | None
    measured: MeasuredRuns | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Notebook):
    """A comparison of two candidates, `a` and `b`. Times are in seconds, memory is in GiB, and the first value of each
    pair is that of `a`.

    - `a`, `b`: each has `name`, `where`, `candidate`, `state`, `predicted`, `believed` (the prediction corrected by
      trials, or None if the candidate ran), and `measured` (None if it was not measured). `measured` has `step_time_s`
      (the median over `runs` runs), `spread_s` (of the steps in a run), `between_s` (between the fastest and the
      slowest run, or None for a single run), `noise` as a fraction, and `device_used_gib` if known.
    - `differs`: the knobs that differ.
    - `tasks`: the other differences between the two specs.
    - `time`, `memory`, `figures` (of servers): predictions by part, all empty if a candidate is illegal.
    - `loads`: the highest loads of both, if the specs search for them and they differ. `time` and `figures` are then
      those at the lower one. None otherwise.
    - `gap`: the time of `b` relative to the time of `a` on equal devices, minus one; in training, per token.
    - `certainty`: SIGNIFICANT, NOT_SIGNIFICANT, CORRECTED, PREDICTED or UNKNOWN.
    - `because`: the explanation.
    - `knobs`: the knobs of both tasks; used only to render the comparison as text.
    """

    a: Side
    b: Side
    objective: str
    differs: Mapping[str, tuple[KnobValue, KnobValue]]
    tasks: tuple[str, ...]
    time: Mapping[str, tuple[float, float]]
    memory: Mapping[str, tuple[float, float]]
    figures: Mapping[str, tuple[float, float]]
    gap: float | None
    certainty: str
    because: tuple[str, ...]
    loads: tuple[float, float] | None = field(default=None, metadata=IF_KNOWN)
    knobs: Knobs = field(default_factory=dict)

    def __str__(self) -> str:
        return compared_text(self)

    def __repr__(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:+.1%} in time, {self.certainty}"
        return f"<Comparison of {self.a.name} and {self.b.name}: {gap}>"


def compared_text(both: Comparison) -> str:
    """Format a comparison of two candidates as text."""
    lines = []
    for name, side in (("A", both.a), ("B", both.b)):
        place = f"{side.where}, {hardware_text(side.devices, side.chip)}"
        values = f"{values_text(side.candidate, both.knobs)} ({state_name(side.state)})"
        lines.append(f"{name}: {side.name} ({place}): {values}")
    lines = [*lines, _("Changed knobs: {changes}", changes=differs_text(both.differs, both.knobs) or "-")]
    if both.tasks:
        lines.append(_("Changed tasks: {changes}", changes="; ".join(both.tasks)))
    if both.loads:
        text = N_("Highest load: A {a}, B {b}; parts of the time and latencies are those of both at {least}")
        a, b, least = map(shown, (*both.loads, min(both.loads)))
        lines.append(_(text, a=a, b=b, least=least))
    rows = [each for each in _rows(both) if each]
    parts = ["\n".join(lines), *([table(["", "A", "B", "B - A", "%"], rows)] if rows else [])]
    if both.gap is not None:
        verdict = NAMES["verdicts"][both.certainty]
        parts.append(_("Time of B vs A: {gap:+.1%} ({verdict})", gap=both.gap, verdict=_(verdict)))
    return "\n".join(["\n\n".join(parts), *(f"  {line}" for line in both.because)])


def _rows(both: Comparison) -> Iterator[list[str]]:
    """Yield the rows of the table. The row of a metric that neither candidate has is empty."""
    is_served, step = both.objective in SERVING, attrgetter("step_time_s")
    name = heading(both.objective) if is_served else _("step s")

    def pair(record: str, figure: Callable[[Any], float | None]) -> list[float | None]:
        return [figure(each) if each else None for each in (getattr(side, record) for side in (both.a, both.b))]

    def speed(record: str) -> list[float | None]:
        times = pair(record, step)
        return [objective_value(both.objective, each) if each and is_served else each for each in times]

    yield _row(name, speed("measured"))
    if both.a.measured or both.b.measured:
        spreads = {_("spread within a run"): "spread_s", _("spread between runs"): "between_s"}
        for words, key in spreads.items():
            shares = [each.measured and each.measured.share(getattr(each.measured, key)) for each in (both.a, both.b)]
            yield [words, *("-" if each is None else f"{each:.1%}" for each in shares), "-", "-"]
        yield [_("runs"), *map(shown, pair("measured", attrgetter("runs"))), "-", "-"]
        yield _row(_("in use GiB"), pair("measured", attrgetter("device_used_gib")))
    yield _row(f"~{name}", speed("predicted"))
    yield _row(f"~{name} {_('(after trials)')}", speed("believed"))
    yield from (_row(f"~  {_(part_name(part))} s", times) for part, times in both.time.items())
    yield from (_row(f"~{latency_name(figure)} s", times) for figure, times in both.figures.items())
    yield _row(_("~in use GiB"), pair("predicted", lambda found: found.device_used_bytes / GIB))
    yield from (_row(f"~  {_(part)} GiB", sizes) for part, sizes in both.memory.items())


def _row(name: str, pair: Sequence[float | None]) -> list[str]:
    (a, b), cells = pair, [name, *map(shown, pair)]
    if not any(pair):
        return []
    if a is None or b is None:
        return [*cells, "-", "-"]
    if abs(b - a) <= SAME * abs(a):
        return [*cells, "0", "0.0%"]
    return [*cells, f"{b - a:+.3g}", f"{b / a - 1.0:+.1%}" if a * b > 0.0 else "-"]
