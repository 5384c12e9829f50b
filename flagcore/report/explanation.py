"""Formats a prediction in detail: model, memory of the worst stage, parts of the time; and causes of differences."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from flagcore.domain.knob import Knobs
from flagcore.domain.metrics import HIGHEST_LOAD, LATENCIES, STATISTICS, devices_pair, equal_devices, nest_statistics
from flagcore.domain.plan import Counts
from flagcore.domain.prediction import Labels, Prediction
from flagcore.domain.records import GIB, read_prediction
from flagcore.domain.spec import SERVING, objective_value
from flagcore.domain.trial import RUN
from flagcore.i18n import N_, _
from flagcore.report.formats import NAMES, Notebook, hardware_text, render, shown, table, table_columns
from flagcore.report.text import funnel, heading, layers_text, part_name, repeats_text, settings_text, values_text

HEADINGS = NAMES["component_memory"]
TEMPORARY, FREED = N_("temporary"), N_("freed before the peak")
"""The names of the difference of the peak and the sum of the components, if it is positive and if it is negative."""

MIB = 2**20
MIN_SHOWN = 0.0005 * GIB
"""The minimum size of a part of the memory that is shown, in bytes."""


VERDICT = {True: N_("fits"), False: N_("does not fit"), None: N_("capacity unknown")}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Notebook):
    """The counts of all combinations by outcome, the message of each rule, and why the run stopped.

    - `nothing_fits`: if no candidate fits, a message that names the one that needs the least memory.
    - `knobs`: the knobs that plugins add to the engine.
    - `notes`: the plugins' notes on engine and chip.
    - `lost_repeats`: the repeats without a measurement, with their states; `counts` does not include them.
    - `fidelity`: the fidelity of the run's trials.
    - `causes`: a comparison of the times of the best and the baseline.
    - `no_best`: why a run has no best.
    """

    counts: Counts
    messages: Mapping[str, str]
    ended_because: str | None = None
    nothing_fits: str | None = None
    knobs: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    lost_repeats: Mapping[int, str] = field(default_factory=dict)
    fidelity: str = RUN
    causes: str = ""
    no_best: str | None = None

    def __repr__(self) -> str:
        return f"<Explanation of {self.counts.combinations:,} combinations, {self.counts.candidates:,} candidates>"

    def __str__(self) -> str:
        first = [f"{self.causes}\n"] if self.causes else []
        return "\n".join([*first, funnel(self.counts, self.fidelity), *repeats_text(self.lost_repeats)])


def eliminated(explanation: Explanation) -> dict[str, int]:
    """Return the number of combinations that each rule removed."""
    return {**explanation.counts.illegal, **explanation.counts.pruned}


def explanation_text(explanation: Explanation) -> str:
    """Return the counts, the messages of rules, the plugins' knobs and notes, and why a run stopped, as text."""
    rules = [{"rule": name, "message": _(explanation.messages.get(name, ""))} for name in eliminated(explanation)]
    parts = [str(explanation), render(rules, "table", table_columns("rules")) if rules else ""]
    parts += [knobs_text(explanation.knobs), notes_text(explanation.notes)]
    if explanation.no_best:
        parts.append(f"{explanation.no_best}.")
    elif explanation.ended_because:
        parts.append(_("Stopped: {reason}.", reason=explanation.ended_because))
    return "\n\n".join(filter(None, parts))


def prediction_text(record: Mapping[str, Any], labels: Labels) -> str:
    """Format a prediction as text: the parts of the model, of the memory and of the time, with the engine's labels."""
    found = read_prediction(record)
    if found.objective:
        return served_text(found)
    layers = found.stage_layers
    split = [_("Layers of each pipeline stage: {layers}", layers=layers_text(layers))] if layers else []
    model = [model_text(record["model"])] if record["model"] else []
    return "\n\n".join([*model, *split, memory_text(found, labels), time_text(found)])


def detail_text(record: Mapping[str, Any], title: str, knobs: Knobs, labels: Labels) -> str:
    """Return the prediction of a candidate in detail. Hardware and candidate come first, plugins' notes last."""
    hardware, values = hardware_text(record["devices"], record["chip"]), values_text(record["candidate"], knobs)
    parts = [_("{title} on {hardware}: {values}", title=title, hardware=hardware, values=values)]
    if assumed := settings_text({key: value for key, value in record.get("assumed", {}).items() if value}):
        parts.append(_("Assumed settings: {settings}", settings=assumed))
    return "\n\n".join(filter(None, [*parts, prediction_text(record, labels), notes_text(record.get("notes", ()))]))


def served_text(found: Prediction) -> str:
    """Return the predicted rates and latencies of a server, the parts of a request's time, and the memory."""
    time, data = found.parts_s, nest_statistics(found.figures)
    total_s = sum(time.values())
    rates = [
        f"~{shown(data[name])} {_(words)}"
        for name, words in NAMES["rates"].items()
        if name in data and not (name.startswith("goodput") and data[name] == data.get("requests_per_s"))
    ]
    latencies = {_(words): data[name] for name, words in NAMES["latencies"].items() if name in data}
    rows = [[words, *(shown(each.get(of)) for of in STATISTICS)] for words, each in latencies.items()]
    parts = ["\n".join(rates), table([_("~seconds"), *STATISTICS], rows) if rows else ""]
    if total_s > 0.0:
        about = {name: _(NAMES["part_descriptions"].get(name, "")) for name in time}
        shares = [[_(part_name(n)), shown(s), f"{s / total_s:.1%}", about[n]] for n, s in time.items()]
        heading = _("Mean time of a request: ~{seconds} s", seconds=shown(total_s))
        parts.append(f"{heading}\n{table([_('part'), '~s', _('share'), _('description')], shares)}")
    else:
        parts.append(found.reason)
    return "\n\n".join(filter(None, [*parts, _served_memory(found)]))


def _served_memory(found: Prediction) -> str:
    cache, tokens = found.figures.get("kv_cache_bytes", 0.0), found.figures.get("kv_cache_tokens")
    parts = {_("weights"): found.static_bytes - cache, _("activations and graphs"): found.activation_bytes}
    if cache:
        name = _("KV cache") if tokens is None else _("KV cache ({count:,.0f} tokens in all instances)", count=tokens)
        parts[name] = cache
    return _(
        "Memory per device: {parts} GiB; in use ~{used} GiB ({verdict})",
        parts=", ".join(f"{name} ~{size / GIB:.2f}" for name, size in parts.items()),
        used=used_text(found),
        verdict=_(VERDICT[found.fits]),
    )


def used_text(found: Prediction, digits: str = ".2f") -> str:
    """Format the memory in use of a device in GiB, and its capacity if it is known."""
    sizes = (found.device_used_bytes, found.capacity_bytes)
    return " / ".join(f"{size / GIB:{digits}}" for size in sizes if size is not None)


def model_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the parameters of a model by component, in billions."""
    rows = [
        [part["component"], _billions(part["params_per_layer"]), str(part["layers"]), _billions(part["params"])]
        for part in parts
    ]
    rows.append([_("Total"), "", "", _billions(sum(part["params"] for part in parts))])
    return table(["", "per-layer param(B)", "num layers", "params(B)"], rows)


def memory_text(found: Prediction, labels: Labels) -> str:
    """Return the memory of the worst stage by component, with its totals, as far as the components are known.

    The components sum to static memory and activations, which may reach their maximum at different times. The row
    `TEMPORARY` or `FREED` contains the peak minus this sum.
    """
    components, static, activation = found.components, found.static_bytes, found.activation_bytes
    rest = found.peak_allocated_bytes - static - activation
    parts = [(labels.components.get(name, name), components[name]) for name in by_component(components, labels)]
    parts.append((_(TEMPORARY if rest > 0.0 else FREED), {"activation_bytes": rest}))
    figures = [key for key in HEADINGS if any(key in part for part in components.values())]
    totals = {key: sum(part.get(key, 0.0) for _name, part in parts) for key in ("params", *figures)}
    rows = [
        [name, f"{part.get('params', 0.0):,.0f}"]
        + [f"{part.get(key, 0.0) / GIB:.3f}".replace("-0.000", "0.000") for key in figures]
        for name, part in [*parts, (_("Total"), totals)]
    ]
    line = labels.memory_line.format(
        static_mb=static / MIB, activation_mb=activation / MIB, total_mb=(static + activation) / MIB
    )
    peak, reserved = (f"{size / GIB:.2f}" for size in (found.peak_allocated_bytes, found.reserved_bytes))
    names = {"used": used_text(found), "verdict": _(VERDICT[found.fits])}
    text = N_("Peak allocated {peak} GiB, reserved {reserved} GiB, in use {used} GiB ({verdict})")
    title = _("Memory of a device of pipeline stage {number} (highest):", number=found.worst_stage)
    headings = [_("Item"), _("Params"), *(_(HEADINGS[key]) for key in figures)]
    shown = [title, table(headings, rows), ""] if components else []
    return "\n".join([*shown, *([line] if line else []), _(text, peak=peak, reserved=reserved, **names)])


def by_component(names: Iterable[str], labels: Labels) -> list[str]:
    """Return the names of components in the order in which reports show them, with unknown names last."""
    order = {name: place for place, name in enumerate(labels.components)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def memory_parts(found: Prediction) -> dict[str, float]:
    """Return the parts of the memory in use of a device in bytes. Their names are in English.

    The parts sum to `device_used_bytes`. Parts below `MIN_SHOWN` are left out.
    """
    components, static, peak = found.components, found.static_bytes, found.peak_allocated_bytes
    rest, unused = peak - static - found.activation_bytes, found.figures.get("unused_bytes", 0.0)
    if (cache := found.figures.get("kv_cache_bytes")) is not None:
        adapters = found.figures.get("adapter_bytes", 0.0)
        states = {N_("weights"): static - cache - adapters, N_("adapters"): adapters, N_("cache"): cache}
    elif components:
        names = NAMES["component_states"]
        states = {name: sum(part.get(key, 0.0) for part in components.values()) for key, name in names.items()}
        states[N_("other states")] = static - sum(states.values())
    else:
        states = {N_("weights and optimizer"): static}
    parts = {
        **states,
        N_("activations"): found.activation_bytes + min(rest, 0.0),  # less if some are freed before others exist
        TEMPORARY: max(rest, 0.0),
        N_("allocator"): found.reserved_bytes - peak,
        N_("context and libraries"): found.device_used_bytes - found.reserved_bytes - unused,
        N_("outside of the engine's share, which is too small"): unused,
    }
    return {name: size for name, size in parts.items() if abs(size) >= MIN_SHOWN}


def needs_text(found: Prediction) -> str:
    """Return the memory in use of a device, its capacity and its parts in one line."""
    sizes = ", ".join(f"{_(name)} {size / GIB:.2f}" for name, size in memory_parts(found).items())
    stage = "" if "kv_cache_bytes" in found.figures else ", " + _("stage {number}", number=found.worst_stage)
    return _("needs {used} GiB per device", used=used_text(found)) + f"{stage}: {sizes}"


def time_text(found: Prediction) -> str:
    """Return the parts of a step with their shares, the 80% interval of its time, and its bottleneck."""
    step, rate = found.step, found.tokens_per_second_per_device
    if step is None or rate is None:
        reason = found.reason.removeprefix("no time: ")
        return _("Time: unknown ({reason})", reason=reason) if reason else _("Time: unknown")
    rows = [[_(part_name(n)), f"{s:.4g}", f"{s / step.value:.1%}"] for n, s in found.time_s.items()]
    rows.append([_("step"), f"{step.value:.4g}", ""])
    interval = _("80% interval: {low:.4g} to {high:.4g} s", low=step.low, high=step.high)
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    speed = f"{rate.value:,.0f} tokens/s/device{mfu}"
    limit = _("Bottleneck: {limit}", limit=_(found.limit))
    return "\n".join([table([_("Time"), "s", _("share")], rows), "", f"{interval}; {speed}", limit])


def knobs_text(knobs: Sequence[Mapping[str, Any]]) -> str:
    """Format the plugins' knobs as text: values, effects, and why some values cannot be launched."""
    if not knobs:
        return ""
    rows = []
    for knob, effect in ((each, effect) for each in knobs for effect in each["effects"]):
        value = str(effect["value"])
        settings = ", ".join(f"{key}={to}" for key, to in effect["settings"].items())
        part = "" if effect["part"] == "step" else f" of {part_name(effect['part'])}"
        time = f"{f'as {settings}; ' if settings else ''}x{_range(effect['time'])}{part}"
        set_by = " ".join([*effect["flags"], *(f"{name}={to}" for name, to in effect["environment"].items())])
        if reason := knob["not_launched"].get(value):
            set_by = _("predicted only: {reason}", reason=_(reason))
        in_space = _("yes") if knob["in_space"] else _("no")
        rows.append([knob["knob"], value.lower(), in_space, time, f"x{_range(effect['memory'])}", set_by])
    heading = _("Knobs of plugins; `auto` in a space includes those that can be launched:")
    details = [_details(each, before) for each, before in zip(knobs, [{}, *knobs], strict=False)]
    headings = [_("knob"), _("value"), _("in space"), _("time"), _("peak memory"), _("set by")]
    return "\n".join([heading, table(headings, rows), "", *details])


def _details(knob: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return what a knob does, requires and claims, and its sources, unless the one `before` has the same."""
    text = _("{knob}: {text}. ", knob=knob["knob"], text=_(knob["help"]))
    requires = _("Requires {knobs}. ", knobs=", ".join(map(_, knob["needs"]))) if knob["needs"] else ""
    claim = _("Claim: {claim}. ", claim=_(knob["claim"])) if knob["claim"] else ""
    effect = _(" Effect: {effect}.", effect=knob["effect"]) if knob["effect"] else ""
    is_same = all(knob[key] == before.get(key) for key in ("source", "effect"))
    return text + requires + claim + (_("(as above)") if is_same else f"({knob['source']}){effect}")


def _range(factor: Mapping[str, float]) -> str:
    low, high = (f"{factor[bound]:g}" for bound in ("low", "high"))
    return f"{factor['value']:g}" + ("" if factor["low"] == factor["high"] else f" ({low} to {high})")


def notes_text(notes: Sequence[str]) -> str:
    """Return the plugins' notes on an engine and chip, one per line."""
    return "\n".join([_("Notes on this engine and chip:"), *(f"- {note}" for note in notes)]) if notes else ""


def _billions(count: float) -> str:
    return f"{count / 1e9:.4f}"


MAX_PARTS = 3
"""The maximum number of listed parts."""
SMALL, EXPLAINED = 0.1, 0.5
"""The smallest listed part against a difference, relative to the largest part; and the share of a difference that a
prediction must have, so that its parts are listed as the reason."""
SAME_TIME = 5e-4
"""The relative difference below which two times are shown as equal."""


def shown_latencies(found: Prediction, limits: Iterable[str] = ()) -> dict[str, float]:
    """Return the predicted medians of a server's latencies and the statistics of `limits`, such as `ttft_s.p50`."""
    names = dict.fromkeys([*(f"{each}.p50" for each in LATENCIES), *limits])
    return {name: found.figures[name] for name in names if name in found.figures}


def figure_pairs(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return pairs of the values in `a` and `b` with the same name. A value that one of them lacks is 0."""
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) or b.get(name)]
    return {name: (float(a.get(name) or 0.0), float(b.get(name) or 0.0)) for name in names}


def differences_text(time: Mapping[str, tuple[float, float]], change: float) -> str:
    """Return the largest differences of the parts of a time in seconds, second minus first, that have the sign of
    `change`, and those against it. Empty if there are none with its sign."""
    sizes = sorted(((second - first, name) for name, (first, second) in time.items()), key=lambda each: -abs(each[0]))
    along = [each for each in sizes if each[0] * change > 0.0][:MAX_PARTS]
    against = (
        [each for each in sizes if each[0] * change < 0.0 and abs(each[0]) >= SMALL * abs(along[0][0])] if along else []
    )
    texts = [", ".join(f"{name} {seconds:+.3g} s" for seconds, name in each[:MAX_PARTS]) for each in (along, against)]
    return texts[0] + (f"; {_('the other way: {parts}', parts=texts[1])}" if against else "")


def causes_text(
    objective: str,
    other: str,
    seconds: tuple[float, float],
    predictions: tuple[Prediction | None, Prediction | None],
    source: str,
    *,
    has_rounds: bool = False,
) -> str:
    """Return a paragraph on where a candidate spends more or less time than another one.

    `other`: the name of the other candidate. `seconds`: the step times of the other and of this candidate.
    `predictions`: their predictions, whose parts are given if they explain EXPLAINED of the difference. `source`: how
    `seconds` are known. With `has_rounds`, the text gives no speedup, because the report already shows the speedup over
    the rounds of repeats. Rates on different numbers of devices are per device. Parts at different loads
    or numbers of devices are not compared.
    """
    before, after = seconds
    if abs(after - before) <= SAME_TIME * before:
        return _("It is as fast as {other} ({source}).", other=other, source=source)
    values, unit, figures_of = seconds, _(heading(objective)), [each.figures if each else {} for each in predictions]
    is_equal = equal_devices(objective, *figures_of) == 1.0
    is_one_load = len({each.get(HIGHEST_LOAD) for each in figures_of}) == 1
    if objective in SERVING:
        values = (objective_value(objective, before), objective_value(objective, after))
        if not is_equal:
            base, own = devices_pair(*figures_of)
            values, unit = (values[0] / base, values[1] / own), f"{unit}/dev"
        text = N_("It has {value} {unit}, {change:+.1%} against the {before} of {other} ({source}).")
        text_without_change = N_("It has {value} {unit} against the {before} of {other} ({source}).")
        parts_of = N_("Largest predicted differences in the time of a request: {parts}.")
    else:
        text = N_("A step takes {value} s, {change:+.1%} against the {before} s of {other} ({source}).")
        text_without_change = N_("A step takes {value} s against the {before} s of {other} ({source}).")
        parts_of = N_("Largest predicted differences: {parts}.")
    figures = {"value": shown(values[1]), "before": shown(values[0]), "change": values[1] / values[0] - 1.0}
    names = {"unit": unit, "other": other, "source": source}
    paragraph = _(text_without_change if has_rounds else text, **figures, **names)
    times = figure_pairs(*(each.parts_s if each else {} for each in predictions))
    predicted_before, predicted_after = (each.step_time_s if each else None for each in predictions)
    if predicted_before is None or predicted_after is None or not (is_equal and is_one_load):
        return paragraph
    share = (predicted_after - predicted_before) / (after - before)
    parts = differences_text({_(part_name(name)): pair for name, pair in times.items()}, after - before)
    if share < EXPLAINED or not parts:
        return paragraph
    if not isclose(share, 1.0):
        paragraph += " " + _("The predicted difference is {share:.0%} of that.", share=share)
    return paragraph + " " + _(parts_of, parts=parts)
