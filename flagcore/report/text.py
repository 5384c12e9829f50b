"""Formats candidates, states of trials, counts of combinations and serving metrics as text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain, groupby
from statistics import fmean, median
from typing import Any, TypeAlias

from flagcore.domain import prediction
from flagcore.domain.chip import disturbances
from flagcore.domain.knob import Knob, Knobs
from flagcore.domain.metrics import HIGHEST_LOAD, MIN_REQUESTS, HighestLoad, nest_statistics
from flagcore.domain.plan import Counts, Plan, SearchTime, Speedup
from flagcore.domain.prediction import MEMORY_ERROR, Prediction
from flagcore.domain.records import GIB, read_prediction
from flagcore.domain.space import DOES_NOT_FIT, Candidate
from flagcore.domain.spec import SERVING, is_rate, objective_value
from flagcore.domain.trial import PROBE, RUN, Measurement, Shortened, Trial, TrialState, is_disturbed
from flagcore.i18n import N_, Message, _, columns, left, ngettext
from flagcore.report.formats import NAMES, shown, size_text

Stage: TypeAlias = tuple[str | None, str, int]
"""A stage of the search space: the rule that removed candidates, the name of the stage, and the number of candidates.
The rule is None for a total, and empty if no rule removed them."""


def funnel_stages(counts: Counts, fidelity: str = RUN) -> Iterator[Stage]:
    """Yield the totals, and the combinations and candidates that were removed, by reason.

    The states of trials are included only if any trial ran.
    """
    yield None, _("combinations"), counts.combinations
    for rule, number in _largest_first(counts.illegal):
        yield rule, _(NAMES["not_tried"].get(rule, N_("illegal: {rule}")), rule=_(rule)), number
    yield "", _("duplicates"), counts.merged
    yield None, _("candidates"), counts.candidates
    yield DOES_NOT_FIT, _("predicted not to fit"), counts.does_not_fit
    yield from ((rule, _("pruned: {rule}", rule=_(rule)), number) for rule, number in _largest_first(counts.pruned))
    outcomes = {state_name(TrialState.MEASURED.value, fidelity): counts.measured}
    outcomes |= {_("stopped early"): counts.stopped, _("failed"): counts.failed}
    if any(outcomes.values()):
        yield from (("", name, number) for name, number in outcomes.items())
    yield None, _("untried"), counts.untried


def funnel(counts: Counts, fidelity: str = RUN) -> str:
    """Return how many combinations each rule removed, one line per rule, and the states of trials, as text."""
    stages = funnel_stages(counts, fidelity)
    rows = [(name, number) if rule is None else (f"  {name}", -number) for rule, name, number in stages]
    width, longest = max(columns(name) for name, number in rows), max(len(f"{number:,}") for name, number in rows)
    return "\n".join(f"{left(name, width)}  {number:>{longest},}" for name, number in rows)


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: -pair[1])


def repeats_text(lost: Mapping[int, str]) -> list[str]:
    """Return a note on repeats without a measurement, which the counts do not include. Empty if there are none."""
    states = [_("trial {number} {state}", number=number, state=state_name(state)) for number, state in lost.items()]
    if not states:
        return []
    return [
        ngettext(
            "Not counted above: {count} failed repeat ({states}).",
            "Not counted above: {count} failed repeats ({states}).",
            len(lost),
            states=", ".join(states),
        )
    ]


def state_name(state: str, fidelity: str = RUN) -> str:
    """Return the name of a trial's state as it is shown to users, for trials of a fidelity."""
    if fidelity == PROBE and state == TrialState.MEASURED.value:
        return _("probed")
    return _(state.replace("_", " "))


def reason_text(reason: str | None) -> str:
    """Return the reason for a trial's state in the selected language, as far as it is a message, or an empty string.

    Advice in brackets at its end is a message of its own.
    """
    reason = reason or ""
    for found in re.finditer(r" \(", reason if reason.endswith(")") else ""):
        if (advice := _(reason[found.end() : -1])) != reason[found.end() : -1]:
            return _("{reason} ({advice})", reason=reason[: found.start()], advice=advice)
    return _(reason)


def search_time_text(time: SearchTime) -> str:
    """Format the expected time of a search, and its upper bound."""
    trials = ngettext("{count} trial", "{count} trials", time.trials)
    repeats = ngettext("{count} repeat", "{count} repeats", time.repeats)
    starts, limit = _("at most {trials} and {repeats}", trials=trials, repeats=repeats), duration_text(time.at_most_s)
    if time.measuring_s is None:
        return _("Expected: {starts}; limit: {limit}.", starts=starts, limit=limit)
    seconds = time.measuring_s + time.starting_s
    if seconds >= time.at_most_s:
        return _("Expected: the whole limit of {limit}, with {starts}.", starts=starts, limit=limit)
    text = N_("Expected: ~{time}, of which ~{start} for starts, with {starts}; limit: {limit}.")
    if time.starts_guessed:
        text = N_("Expected: ~{time}, of which ~{start} for starts (a guess), with {starts}; limit: {limit}.")
    of_starts = duration_text(time.starting_s)
    return _(text, time=duration_text(seconds), start=of_starts, starts=starts, limit=limit)


DEPTHS = "mtp_num_layers"
"""The key of the assumed depths of multi-token prediction."""


def assumed_text(assumed: Mapping[str, object]) -> str:
    """Format the assumed implementation, settings and depths of multi-token prediction of a plan."""
    settings = {key: value for key, value in assumed.items() if key != DEPTHS}
    text = N_("Assumed: {implementation} layers, {settings} (set train.implementation or train.settings to change).")
    of_depths = N_("Assumed: {depths} trained depths of multi-token prediction (set {key} to change).")
    lines = [_(of_depths, depths=assumed[DEPTHS], key=f"train.{DEPTHS}")] if DEPTHS in assumed else []
    if settings:
        kind = settings.pop("implementation")
        lines.insert(0, _(text, implementation=kind, settings=settings_text(settings)))
    return "\n".join(lines)


def settings_text(settings: Mapping[str, object]) -> str:
    """Format settings in one line. Those that are on have no value."""
    return ", ".join(name if value is True else f"{name}={value}" for name, value in settings.items())


def scaled_text(seconds: float, shortened: Shortened | None) -> str:
    """Return a text with the measured time from which a whole step was scaled, and with the nodes that were used."""
    if shortened and shortened.nodes:
        text = N_("scaled from {seconds} s on {nodes} of {of_nodes} nodes")
        return _(text, seconds=shown(seconds), nodes=shortened.nodes, of_nodes=shortened.of_nodes)
    return _("scaled from {seconds} s of a shortened step", seconds=shown(seconds))


def duration_text(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def candidate_text(candidate: Candidate, knobs: Knobs) -> str:
    """Return a candidate in one line. Knobs at their neutral value are left out."""
    return values_text(candidate.as_dict(), knobs)


def best_text(best: Trial | None, speedup: Speedup | None, knobs: Knobs) -> str:
    """Return the best trial of a run and its speedup in one line of English."""
    word = "recommended" if best and best.state is TrialState.PREDICTED else "best trial"
    text = f"{word} {best.number}: {candidate_text(best.candidate, knobs)}" if best else "no best"
    if speedup is None:
        return text
    verdict = "no significant gain" if speedup.conclusive else "gain not conclusive"
    is_shown = speedup.significant or word == "recommended"
    return f"{text}, gain {speedup.value:+.1%}" if is_shown else f"{text}, {verdict}"


def values_text(values: Mapping[str, Any], knobs: Knobs) -> str:
    """Return knobs and their values in one line, as `candidate_text` does."""
    parts: list[str] = []
    for name, value in values.items():
        knob = knob_of(name, knobs)
        if knob.part_of or not (_is_set(knob, value) or (knob.shows_neutral and value is not None)):
            continue
        if value is True:
            texts = [str(values[each]) for each in details(name, knobs) if values.get(each) is not None]
            parts.append(" ".join([knob.title, *texts]))
        else:
            parts.append(f"no {knob.title}" if value is False else f"{knob.title} {word_of(knob, value)}")
    return ", ".join(parts) or _("engine defaults")


def word_of(knob: Knob, value: Any) -> Any:
    """Return the word that a number stands for, such as `auto` for -1, or another value itself."""
    return next((word for word, code in knob.spellings.items() if type(value) is int and code == value), value)


def value_text(value: object) -> str:
    """Format the value of a knob."""
    if value is None:
        return _("unset")
    return (_("on") if value else _("off")) if isinstance(value, bool) else str(value)


def knob_of(name: str, knobs: Knobs) -> Knob:
    """Return the knob with this name. For an unknown name, it is a knob that has only this name."""
    return knobs.get(name) or Knob(name=name)


def details(flag: str, knobs: Knobs) -> list[str]:
    """Return the names of the knobs that refine the knob `flag`."""
    return [knob.name for knob in knobs.values() if knob.part_of == flag]


def layers_text(layers: Sequence[int]) -> str:
    """Format the number of layers of each pipeline stage. Equal neighbors are joined."""
    runs = [(count, len(list(equal))) for count, equal in groupby(layers)]
    return ", ".join(f"{number} x {count}" if number > 1 else str(count) for count, number in runs)


def record_line(name: str, record: Mapping[str, Any], knobs: Knobs) -> str:
    """Return a candidate of an estimate with its predicted time and memory in one line."""
    return candidate_line(name, record["candidate"], read_prediction(record), knobs)


def candidate_line(name: str, candidate: Mapping[str, Any], found: Prediction, knobs: Knobs) -> str:
    """Return a candidate with its predicted time and memory in one line."""
    seconds, rate = found.step_time_s, found.figures.get("output_tokens_per_s")
    speed = _("time unknown") if seconds is None else _("~{seconds} s/step", seconds=f"{seconds:.4g}")
    speed = _("~{rate} output tokens/s", rate=shown(rate)) if rate is not None else speed
    values = values_text(candidate, knobs)
    text = f"{name}: {speed}" if values == name else f"{name}: {values}: {speed}"
    text += f", ~{found.device_used_bytes / GIB:.4g} GiB"
    return text + (", " + _(excess) if (excess := _excess(found)) else "")


def part_name(part: str) -> str:
    """Return the name of a part of a step or request as it is shown to users."""
    return NAMES["parts"].get(part) or prediction.part_name(part)


def bottleneck_text(found: Prediction) -> str:
    """Return the bottleneck of a predicted step, with its share, and the waits. Empty if the bottleneck is unknown."""
    name, time = found.limit, found.time_s
    if name == "memory":
        used, capacity = map(size_text, (found.device_used_bytes, found.capacity_bytes))
        return _("Bottleneck: memory, ~{used} of {capacity}.", used=used, capacity=capacity)
    seconds = next((value for part, value in time.items() if part_name(part) == name), None)
    if not seconds:
        return ""
    text = N_("Bottleneck: {limit}, ~{share:.0%} of a step.")
    if name != "compute":
        text = N_("Bottleneck besides compute: {limit}, ~{share:.0%} of a step.")
    return " ".join([_(text, limit=_(name), share=seconds / sum(time.values())), *waits(found)])


def waits(found: Prediction) -> list[str]:
    """Return how long each role of a step waits for the other one, and what shortens this."""
    texts = [(text, found.figures.get(name)) for name, text in NAMES["waits"].items()]
    return [_(text, seconds=shown(wait), step=shown(found.step_time_s)) for text, wait in texts if wait]


def _excess(found: Prediction) -> str:
    """Return a phrase for a prediction that does not fit in memory, or an empty string for one that fits."""
    if found.fits is not False:
        return ""
    if found.device_used_bytes <= (found.capacity_bytes or 0.0) * (1.0 + MEMORY_ERROR):
        return N_("over memory by less than the error of predictions: flag tune tries it as the baseline")
    return N_("does not fit")


def candidate_columns(records: Sequence[Mapping[str, Any]], knobs: Knobs) -> dict[str, str]:
    """Return the columns of knobs: the headings, each with the key of the value in a record.

    A knob has a column if it is a size, if it differs between records, or if a value is not neutral.
    """
    columns = dict[str, str]()
    for name in dict.fromkeys(name for record in records for name in record["candidate"]):
        knob, values = knob_of(name, knobs), [record["candidate"].get(name) for record in records]
        is_size = any(each == 1 and each is not True for each in values)
        if is_size or len({*map(str, values)}) > 1 or any(_is_set(knob, each) for each in values):
            columns[knob.title] = f"candidate.{name}"
    return columns


def _is_set(knob: Knob, value: object) -> bool:
    """Return whether a value is not neutral. If the knob has no neutral value, None and False count as neutral."""
    return value is not None and value != (False if knob.neutral is None else knob.neutral)


SHORT_RATES, SHORT_LATENCIES = NAMES["short_rates"], NAMES["short_latencies"]


def heading(objective: str) -> str:
    """Return the heading of an objective's column, with the unit."""
    if unit := {**NAMES["training_units"], **SHORT_RATES}.get(objective):
        return unit
    figure, _, statistic = objective.partition(".")
    return f"{SHORT_LATENCIES[figure]} {statistic or 'mean'} s"


def objective_text(objective: str, figure: float) -> str:
    """Return the value of an objective with its unit."""
    return f"{shown(figure)} {_(heading(objective))}"


def interval_text(record: Mapping[str, Any], objective: str) -> str:
    """Return the predicted objective of a candidate with its 80% interval. It is empty if unknown."""
    interval = record.get("objective") or record.get(objective)
    if not interval:
        return ""
    low, high = shown(interval["low"]), shown(interval["high"])
    text = N_("Candidate {number}: ~{value} (80%: {low} to {high}).")
    return _(text, number=record["number"], value=objective_text(objective, interval["value"]), low=low, high=high)


def figures_text(measured: Measurement, objective: str) -> str:
    """Return rates and latencies in one line, without the objective."""
    figures = nest_statistics(measured.figures)
    rates = [name for name in ("output_tokens_per_s", "requests_per_s") if name != objective and name in figures]
    parts = [f"{shown(figures[name])} {_(SHORT_RATES[name])}" for name in rates]
    parts += [highest_text(figures[HIGHEST_LOAD], measured.highest)] if HIGHEST_LOAD in figures else []
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        latency = figures.get(name) or {}
        text = ", ".join(f"{each} {shown(latency[each])}" for each in ("p50", "p99") if latency.get(each) is not None)
        parts += [f"{SHORT_LATENCIES[name]} {text} s"] if text else []
    return "; ".join(parts)


def highest_text(load: float, found: HighestLoad | None) -> str:
    """Return the highest load within the limits, and which higher loads were not tested."""
    if found is None or found.met is None or found.untested is None:
        return f"{_('highest load')} {shown(load)}"
    if found.exceeded is None:
        return _("highest load at least {load} (higher loads untested: no time left)", load=shown(load))
    text = N_("highest load at least {load} (up to {exceeded} untested: no time left)")
    return _(text, load=shown(load), exceeded=shown(found.exceeded))


def answers_text(trial: Trial | None, baseline: Trial | None) -> str:
    """Return how much the answers of a trial differ from the baseline's, or that this was not checked. Empty if the
    trial measured nothing, or is of the baseline."""
    if trial is None or trial.measurement is None or trial.fidelity != RUN:
        return ""
    if (found := trial.measurement.answers) is None:
        return "" if baseline and baseline.candidate == trial.candidate else _("answers: not checked")
    text, unit = N_("answers: {difference} {unit}, limit {limit}"), _(found.unit)
    return _(text, difference=f"{found.difference:.2g}", unit=unit, limit=f"{found.limit:g}")


def short_line(measured: Measurement, objective: str) -> str:
    """Return the main metrics of a measurement for a line of progress, with the objective first."""
    figures = [objective_text(objective, objective_value(objective, measured.step_time_s))]
    rate = measured.figures.get("output_tokens_per_s")
    figures += [f"{shown(rate)} {_(SHORT_RATES['output_tokens_per_s'])}"] if rate and not is_rate(objective) else []
    for name in ("ttft_s", "tpot_s"):
        median = measured.figures.get(f"{name}.p50")
        figures += [f"{SHORT_LATENCIES[name]} {shown(median)} s"] if median is not None else []
    return ", ".join([*figures, *measured.broken])


def limits_text(limits: Mapping[str, float]) -> str:
    """Format latency limits."""
    return ", ".join(f"{latency_name(name)} <= {limit:g} s" for name, limit in limits.items())


def nearest_limit(figures: Mapping[str, float], limits: Mapping[str, float]) -> tuple[str, str, float]:
    """Return the latency that is closest to its limit: its name, as text, and its share. Empty if none is known."""
    shares = {name: figures[name] / limit for name, limit in limits.items() if name in figures}
    if not (name := max(shares, key=lambda each: shares[each], default="")):
        return "", "", 0.0
    share, value = shares[name], shown(figures[name])
    text = N_("{latency} {value} s, {share:.0%} of {limit:g} s")
    return name, _(text, latency=latency_name(name), value=value, share=share, limit=limits[name]), share


def latency_name(figure: str) -> str:
    """Return the usual name of a latency's statistic, such as p99 TTFT."""
    latency, _, statistic = figure.partition(".")
    return f"{statistic} {SHORT_LATENCIES.get(latency, latency)}".strip()


def notes(plan: Plan) -> list[str]:
    """Return notes on the best measurement, and on trials with few steps or on a busy machine.

    They also warn about percentiles of too few requests.
    """
    best, base = plan.best or plan.fastest, plan.baseline
    measurement = best.measurement if best else None
    noted = [*(measurement.notes if measurement else ()), *_slow_trials(plan)]
    if plan.speedup and base and is_disturbed(plan.runs_of(base.candidate).counted):
        noted.append(
            N_("other programs used cores in all runs of the baseline: it may be faster, and the gain smaller")
        )
    points = measurement.points if measurement else ()
    answered_counts = [point["answered"] for point in points if "answered" in point]
    weak = [name for name, minimum in MIN_REQUESTS.items() if answered_counts and min(answered_counts) < minimum]
    if not weak:
        return noted
    text = N_("{names} of {count:g} requests are unreliable: use num_prompts >= {least}")
    least = max(MIN_REQUESTS[name] for name in weak)
    return [*noted, Message(text, names=", ".join(weak), count=min(answered_counts), least=least)]


def noise_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if the machine became faster or slower."""
    text = N_(
        "machine drift: the speed of the baseline changed by {drift:+.1%} between its first and last run; "
        "results of trials that are far apart in time may differ by as much"
    )
    if plan.drifted and plan.drift is not None:
        yield _(text, drift=plan.drift)


def _slow_trials(plan: Plan) -> list[Message]:
    """Return a note on trials without enough time for all their steps, and one on what slowed the machine down."""
    trials = [each for each in (*plan.trials, *plan.repeats) if not each.source]
    cut = [each for each in trials if each.finished_steps_s or (each.measurement and each.measurement.few_steps)]
    slow_notes = [_cut_short(cut, len(trials))] if cut else []
    readings = [(each.measurement or each).telemetry for each in trials]
    means = {name: fmean(each[name] for each in readings if name in each) for name in {*chain(*readings)}}
    if slow := list(disturbances(means)):
        what = reduce(lambda first, second: Message(N_("{first}; {second}"), first=first, second=second), slow)
        slow_notes.append(Message(N_("during trials, {what}: results may differ on an idle machine"), what=what))
    return slow_notes


def _cut_short(trials: Sequence[Trial], of_count: int) -> Message:
    """Return a note on trials without enough time for all their steps, with the median of seen over predicted times."""
    note = Message(
        N_("{count} of {of_count} trials had no time for all their steps"), count=len(trials), of_count=of_count
    )
    pairs = [(each.step_seen_s, each.predicted_step_s) for each in trials]
    if ratios := [seen / predicted for seen, predicted in pairs if seen and predicted]:
        text = N_("{note}; a step took {ratio:.2g} times as long as predicted (median)")
        note = Message(text, note=note, ratio=median(ratios))
    return note


def at_load(text: str, load: str) -> str:
    """Return the metric in `text` with the `load` at which it was measured, or `text` alone if `load` is empty."""
    return _("{value} at {load}", value=text, load=load) if load else text


def gain_text(objective: str, gain: float, devices: tuple[float, float] = (0.0, 0.0)) -> str:
    """Return a speedup as a change of the objective: an increase of a rate, or a decrease of a latency.

    `devices`: those of the baseline and of the candidate. If they differ, the text says that the gain of a rate is per
    device.
    """
    if objective not in SERVING:
        return f"{gain:+.1%} tokens/s"
    if is_rate(objective):
        if devices[0] != devices[1] and all(devices):
            text = N_("{gain:+.1%} {rate} per device ({own:.0f} devices, the baseline {base:.0f})")
            return _(text, gain=gain, rate=_(heading(objective)), own=devices[1], base=devices[0])
        return f"{gain:+.1%} {_(heading(objective))}"
    return f"{1.0 / (1.0 + gain) - 1.0:+.1%} {heading(objective).removesuffix(' s')}"
