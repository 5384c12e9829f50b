"""The estimate of a spec: its record, its text, and the text on the gain of mixing several kinds of chips."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from flagcore.domain.chip import Fact
from flagcore.domain.knob import Knobs
from flagcore.domain.metrics import devices_pair, flat_statistics
from flagcore.domain.plan import Counts, SearchTime
from flagcore.domain.prediction import Labels
from flagcore.domain.records import read_prediction
from flagcore.domain.space import KnobValue
from flagcore.i18n import N_, _, ngettext
from flagcore.report import text as texts
from flagcore.report.formats import NAMES, Notebook, hardware_text, known_columns, render, shown, table, table_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipPlan:
    """The fastest candidate on some kinds of chips.

    `time`: the seconds of each part of a step. `split`: how a mixed plan divides the work between the kinds. `last`: as
    of a candidate of `Estimate`.
    `unlimited_tokens_per_second`: the rate of the fastest candidate, also if it does not fit in memory.
    """

    chips: str
    devices: int
    tokens_per_second: float
    step_time_s: float
    candidate: Mapping[str, KnobValue]
    implementation: str
    time: Mapping[str, float] = field(default_factory=dict)
    split: str = ""
    last: str = ""
    unlimited_tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """The plan that mixes kinds of chips, of those that start the fastest, and the fastest plan of each kind alone.

    - `others`: the fastest plans that divide the work in the other ways of the engine.
    - `alone`, `unable`: the plans of the kinds that can run the job alone, and the names of the other kinds.
    - `idle`: the share of the pipeline's time in which the devices of a kind have no work.
    - `limit`: the bottleneck of the mixed plan.
    - `slowest`: the kind with the slowest stage.
    - `stages`: for each pipeline of the mixed plan, the kind and the number of layers of each stage, in order.
    - `kinds`: the kinds in the order of their hosts, so of their ranks.
    """

    mixed: ChipPlan
    others: tuple[ChipPlan, ...] = ()
    alone: tuple[ChipPlan, ...] = ()
    unable: tuple[str, ...] = ()
    idle: Mapping[str, float]
    limit: str
    slowest: str
    stages: tuple[tuple[tuple[str, int], ...], ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def sum_alone(self) -> float:
        """The sum of the tokens per second of the fastest plan of each kind of chip alone."""
        return sum(each.tokens_per_second for each in self.alone)

    @property
    def best_alone(self) -> ChipPlan | None:
        """The plan of the fastest single kind of chip, or None if no kind can run the job alone."""
        return max(self.alone, key=lambda each: each.tokens_per_second, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published run, with its measured and its predicted tokens per second and device.

    `run`: the model, the devices, the precision and the tokens per sequence.
    `mfu`: the measured model FLOPs utilization. None if the peak rate is unknown.
    `source`: the address of the publication.
    `is_bound`: whether `mfu` bounds the plan's: in the same precision, and not of experts if the plan is dense.
    `knobs`: the knobs of the engine that made the run.
    """

    run: str
    precision: str
    candidate: Mapping[str, KnobValue]
    measured: float
    predicted: float
    mfu: float | None
    source: str
    is_bound: bool = True
    knobs: Knobs = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(Notebook):
    """The fastest predicted candidates of a spec, and the counts of all combinations by outcome.

    - `number` of a candidate: its position among all candidates, from 1.
    - `recommended` of a candidate: whether a plan uses it; `recommended` of the estimate is this candidate.
    - `last` of a candidate: why it is listed after all others, although it may be faster.
    - `objective`: what the candidates are sorted by.
    - `model`: the weights of each part of the model.
    - `untimed`: the number of candidates without a predicted time.
    - `no_time`: the reason for it.
    - `precision`: the number format of the job.
    - `runs`: what runs the trials.
    - `assumed`: the implementation and settings that a plan assumes.
    - `notes`: the plugins' notes on engine and chip.
    - `unmodelled`: the names of settings that change the cost and are not predicted.
    - `defaults`: the candidate with the engine's own defaults, if it is legal and not the baseline.
    - `behind`: how much slower the recommended candidate is than the fastest, as a share; NaN without times.
    - `gain`: the predicted gain of the recommended candidate over the baseline on equal devices, as in a run. None if
      unknown.
    - `limits`: the latency limits in seconds, by statistic.
    - `expected_s`: the time of a step that the recommended candidate is expected to take, and an 80% interval.
    - `expected`: this time, why it differs from the predicted one, and what it means for the whole job, as text.
    - `crowded`: the fastest candidate that leaves no margin of memory, if it is faster than those that do.
    - `slo` of a candidate: the figures that exceed the latency limits. `nearest_limit`: the one closest to its limit.
    - `unmet`: a message if every candidate exceeds a limit, or if only the baseline fits, or does not.
    - `published`: published runs on the same chip, the nearest to the job first. Runs are predicted once read.
    - `best_mfu`: the highest published MFU on the chip in the job's precision, if known.
    - `mixing`: a comparison of a mixed cluster with each of its kinds of chips alone.
    - `search`: an upper bound for the seconds of all trials.
    - `knobs`, `labels`: the knobs of the task, and the labels of the engine.
    - `target`: the first target of `flag export` that accepts the recommended candidate. Empty if none does, or
      if `flagcore.estimate` got no `start`.
    """

    chip: str
    devices: int
    counts: Counts
    baseline: Mapping[str, Any]
    candidates: tuple[Mapping[str, Any], ...]
    model: tuple[Mapping[str, Any], ...]
    objective: str = ""
    defaults: Mapping[str, Any] | None = None
    behind: float = 0.0
    gain: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    expected_s: tuple[float, float, float] | None = None
    expected: str = ""
    crowded: Mapping[str, Any] | None = None
    unmet: str = ""
    untimed: int = 0
    no_time: str = ""
    precision: str = ""
    runs: str = ""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    search: SearchTime | None = None
    published: Sequence[PublishedRun] = ()
    best_mfu: Fact | None = None
    mixing: Mixing | None = None
    knobs: Knobs = field(default_factory=dict)
    labels: Labels = field(default_factory=Labels)
    target: str = ""

    @property
    def recommended(self) -> Mapping[str, Any]:
        """The record of the candidate that a plan uses."""
        return next(each for each in self.candidates if each["recommended"])

    def __repr__(self) -> str:
        line = texts.record_line("recommended", self.recommended, self.knobs)
        return f"<Estimate on {self.devices} x {self.chip}, {self.counts.candidates:,} candidates; {line}>"

    def __str__(self) -> str:
        return _candidates_table(self)


def estimate_columns(estimate: Estimate) -> dict[str, str]:
    """Return the columns of the candidates' table: for each heading, the dotted key of the value in a candidate's
    record."""
    rows = estimate.candidates
    is_served = estimate.objective not in NAMES["training_units"]
    figures = table_columns("predicted_serving" if is_served else "predicted")
    if is_served and estimate.objective not in figures.values():
        figures = {f"~{texts.heading(estimate.objective)}": "objective.value", **figures}
    figures |= {f"~{texts.heading(name)}": name for name in estimate.limits if name not in figures.values()}
    figures |= table_columns("served_memory") if is_served else {}
    optional = known_columns(rows, "layouts", "context", "highest", "cost", "last")
    return {"#": "number", **texts.candidate_columns(rows, estimate.knobs), **figures, **optional}


def estimate_texts(estimate: Estimate) -> Iterator[tuple[str, bool]]:
    """Yield the paragraphs of an estimate, each with whether it is a result or a message about the results."""
    hardware = hardware_text(estimate.devices, estimate.chip)
    if estimate.unmet:
        yield estimate.unmet + "\n", False
    if any("step_time_s" in each for each in estimate.candidates):
        yield _("Fastest predicted candidates on {hardware}:", hardware=hardware), False
    else:
        yield _("Candidates with the least memory on {hardware}:", hardware=hardware), False
    yield _candidates_table(estimate), True
    yield "\n" + _recommended_text(estimate), True
    if estimate.expected:
        yield "\n" + estimate.expected, False
    if estimate.assumed:
        yield "\n" + texts.assumed_text(estimate.assumed), True
    if bottleneck := texts.bottleneck_text(read_prediction(estimate.recommended)):
        yield "\n" + bottleneck, False
    names = _("baseline"), _("engine defaults"), _("faster, but without a margin of memory")
    others = zip(names, (estimate.baseline, estimate.defaults, estimate.crowded), strict=True)
    lines = [
        ", ".join([texts.record_line(n, each, estimate.knobs), *_missed(estimate, each)]) for n, each in others if each
    ]
    devices = devices_pair(estimate.baseline, estimate.recommended)
    if estimate.gain and (estimate.gain > 0.0 or devices[0] != devices[1]):
        gain = "~" + texts.gain_text(estimate.objective, estimate.gain, devices)
        lines[0] += "; " + _("recommended: {gain}", gain=gain)
    yield "\n" + "\n".join(lines) + "\n\n" + texts.funnel(estimate.counts), False
    if estimate.mixing:
        yield "\n" + mixing_text(estimate.mixing, estimate.knobs, estimate.recommended["candidate"]), True
    if runs := estimate.published[:SHOWN_RUNS]:
        yield "\n" + _("Published runs on this chip that are nearest to this job:"), False
        yield published_table(runs), False
    yield from ((text, False) for text in _notes(estimate) if text)


def _notes(estimate: Estimate) -> Iterator[str]:
    """Yield how far an estimate can be trusted, and how long a search takes. Texts may be empty."""
    yield _ceiling_text(estimate)
    yield "\n" + _("Predicted {for_what}.", for_what=estimate.runs)
    interval = texts.interval_text(estimate.recommended, estimate.objective)
    if not estimate.expected_s:  # one interval for one figure
        yield interval
    if interval and estimate.unmodelled:
        text = N_("The interval is wider because of settings that are not predicted: {names}.")
        yield _(text, names=", ".join(estimate.unmodelled))
    if estimate.search:
        yield "flag tune: " + texts.search_time_text(estimate.search)
    if estimate.untimed:
        yield ngettext(
            "{count:,} candidate of {total:,} has no predicted time, and is listed last: {reason}.",
            "{count:,} candidates of {total:,} have no predicted time, and are listed last: {reason}.",
            estimate.untimed,
            total=estimate.counts.untried,
            reason=estimate.no_time,
        )


SHOWN_RUNS = 3


def published_table(runs: Sequence[PublishedRun]) -> str:
    """Return a table of published runs. Columns with ~ are predicted."""
    rows = []
    for each in runs:
        figures = map(shown, (each.measured, each.predicted, each.mfu))
        rows.append([each.run, texts.values_text(each.candidate, each.knobs), *figures, each.source])
    return table([_("run"), _("candidate"), "tok/s/dev", "~tok/s/dev", "mfu", _("source")], rows)


def _ceiling_text(estimate: Estimate) -> str:
    """Return a warning if the recommended candidate has a higher MFU than published runs in the same precision."""
    mfu, precision = estimate.recommended.get("mfu"), estimate.precision
    published = [(fact.value, fact.source.detail)] if (fact := estimate.best_mfu) else []
    if not mfu or (published and mfu <= published[0][0]):  # runs need not be predicted
        return ""
    published += [(each.mfu, each.run) for each in estimate.published if each.mfu and each.is_bound]
    if not published or mfu <= max(published)[0]:
        return ""
    best, source = max(published)
    text = N_("The predicted MFU of {mfu} is above the best published on this chip in {precision}: {best} ({source}).")
    return _(text, mfu=f"{mfu:.1%}", precision=precision, best=f"{best:.1%}", source=source)


def _missed(estimate: Estimate, record: Mapping[str, Any]) -> list[str]:
    limits, figures = estimate.limits, flat_statistics(record)
    return [
        _("{name} too high", name=texts.latency_name(name)) for name in limits if figures.get(name, 0.0) > limits[name]
    ]


def _candidates_table(estimate: Estimate) -> str:
    columns, rows = estimate_columns(estimate), estimate.candidates
    if any("slo" in each for each in rows):
        columns |= {"SLO": "slo_text"}
        rows = tuple({**each, "slo_text": ", ".join(_missed(estimate, each)) or _("met")} for each in rows)
    width = len(str(rows[-1]["number"]))
    marks = (
        {
            "number": f"{each['number']:>{width}}{'*' * each['recommended']}",
            "candidate": {n: texts.word_of(texts.knob_of(n, estimate.knobs), v) for n, v in each["candidate"].items()},
        }
        for each in rows
    )
    return render([{**each, **mark} for each, mark in zip(rows, marks, strict=True)], "table", columns)


def _recommended_text(estimate: Estimate) -> str:
    """Return why the marked candidate is recommended."""
    best = estimate.recommended
    nearest = texts.nearest_limit(flat_statistics(best), estimate.limits)[1]
    limit = "; " + _("nearest limit: {limit}", limit=nearest) if nearest else ""
    if not estimate.behind > 0.0:
        if not estimate.crowded and _is_slower(estimate) and "slo" not in estimate.baseline:
            return _("* the fastest of the space, but slower than the baseline, which is not in it") + limit
        if "last" not in best and any("last" in each for each in estimate.candidates):
            return _("* recommended: the fastest of those not listed last") + limit
        if best["candidate"] == estimate.baseline["candidate"]:
            return _("* recommended: the baseline; no candidate is predicted to be faster") + limit
        is_timed, least = "step_time_s" in best, N_("* recommended: the one with the least memory")
        return (_("* recommended: the fastest") if is_timed else _(least)) + limit
    text = N_(
        "* recommended: {behind} slower than the fastest, which is less than predictions can tell, and its layout is "
        "simpler, more usual or that of a published run"
    )
    return _(text, behind=f"{estimate.behind:.2%}") + limit


def _is_slower(estimate: Estimate) -> bool:
    """Return whether the baseline is faster than the recommended candidate, on all its devices."""
    own, base = (each.get("step_time_s", {}).get("value") for each in (estimate.recommended, estimate.baseline))
    return estimate.gain is not None and bool(own and base and own > base)


def probed_text(number: int | None, probed: Mapping[str, Any], knobs: Knobs) -> str:
    """Return why ranks failed, whether times are extrapolated, and the predictions without and with the probe.

    `number` is the number of the candidate if several were probed.
    """
    ranks, prefix = probed["ranks"], "" if number is None else f"{number} "
    lines = [_("rank {rank}: {reason}", rank=each["rank"], reason=each["reason"]) for each in ranks if each["reason"]]
    measured = [each["measured"] for each in ranks if "measured" in each]
    extrapolated = [each["microbatches"] for each in measured if each["microbatches_run"] < each["microbatches"]]
    lines += [_("Times are extrapolated to {count} micro-batches.", count=count) for count in extrapolated[:1]]
    names = {"predicted": _("predicted"), "combined": _("with probe")}
    lines += [texts.record_line(prefix + name, {**probed, **probed[key]}, knobs) for key, name in names.items()]
    return "\n".join(lines)


PAYS = 1.02
"""The throughput, relative to the fastest kind alone, from which mixing is called worthwhile."""


def mixing_text(mixing: Mixing, knobs: Knobs, recommended: Mapping[str, KnobValue]) -> str:
    """Return a table with the mixed plans, each kind alone and their sum, and a line about the gain.

    The candidate `recommended` is marked, and a plan that is listed last has the reason.
    """
    plans = [(_(each.split or N_("mixed")), each) for each in (mixing.mixed, *mixing.others)]
    plans += [(_("alone"), each) for each in mixing.alone]
    headings = [_("plan"), _("chips"), _("devices"), "~s/step", "~tok/s", _("candidate")]
    rows = []
    for name, each in plans:
        figures = map(shown, (each.devices, each.step_time_s, each.tokens_per_second))
        name += "*" * (each.candidate == recommended) + (f": {_(each.last)}" if each.last else "")
        rows.append([name, each.chips, *figures, texts.values_text(each.candidate, knobs)])
    if len(mixing.alone) > 1:
        devices = sum(each.devices for each in mixing.alone)
        rows.append([_("sum of single chips"), "-", str(devices), "-", shown(mixing.sum_alone), "-"])
    return "\n".join([table(headings, rows), *_order_texts(mixing), verdict(mixing)])


def _order_texts(mixing: Mixing) -> Iterator[str]:
    """Yield the chips of the stages of the mixed plan, and the order of its hosts, if they are known."""
    pipelines = []
    for stages in mixing.stages:
        runs, first = [], 0
        for (title, layers), equal in groupby(stages):
            last = first + len(list(equal)) - 1
            numbers = str(first) if first == last else f"{first}-{last}"
            runs.append(_("stage {stages} on {chip} (layers: {layers})", stages=numbers, chip=title, layers=layers))
            first = last + 1
        pipelines.append(", ".join(runs))
    if pipelines:
        yield _("Mixed plan: {stages}.", stages="; ".join(dict.fromkeys(pipelines)))
    if mixing.kinds:
        yield _("Hosts in the order of the ranks: {kinds}.", kinds=", ".join(mixing.kinds))


def verdict(mixing: Mixing) -> str:
    """Return whether mixing pays, what limits it, and which chips are idle."""
    text, used = _("No kind of chip can run the job alone."), mixing.mixed.implementation
    if best := mixing.best_alone:
        rate = mixing.mixed.tokens_per_second
        times, share = rate / best.tokens_per_second, rate / mixing.sum_alone
        pays = N_("Mixing the chips is worthwhile: ~{times:.2f}x the speed of {chip} alone")
        does_not_pay = N_("Mixing the chips is not worthwhile: ~{times:.2f}x the speed of {chip} alone")
        text = _(pays if times >= PAYS else does_not_pay, times=times, chip=best.chips)
        if mixing.unable:
            text += ". " + _("{chips} cannot run the job alone.", chips=", ".join(mixing.unable))
        else:
            text += ", " + _("and ~{share:.0%} of the combined speed of all kinds alone.", share=share)
            unlimited = sum(each.unlimited_tokens_per_second for each in mixing.alone)
            if share > 1.0 and unlimited > rate:
                why = N_("The kinds alone lack memory for faster plans, whose combined speed is ~{rate} tok/s.")
                text += " " + _(why, rate=shown(unlimited))
            elif share > 1.0:
                why = N_("Devices and batch divide worse for the kinds alone: {parts}.")
                text += " " + _(why, parts=", ".join(map(_loss, mixing.alone)))
    if own := [each for each in mixing.alone if each.implementation != used]:
        kinds = ", ".join(f"{each.chips} {each.implementation}" for each in own)
        text += " " + _("train.implementation differs: alone {kinds}, mixed {used}.", kinds=kinds, used=used)
    if idle := ", ".join(f"{name} ~{share:.0%}" for name, share in mixing.idle.items()):
        limit = {"limit": _(mixing.limit), "slowest": mixing.slowest, "idle": idle}
        text += " " + _("Limited by {limit}, slowest stage on {slowest}; idle: {idle}.", **limit)
    return text


def _loss(plan: ChipPlan) -> str:
    """Return the chips of a plan and the largest part of its step besides compute."""
    share, name = max((seconds / plan.step_time_s, name) for name, seconds in plan.time.items() if name != "compute_s")
    return f"{plan.chips} {_(texts.part_name(name))} ~{share:.0%}"
