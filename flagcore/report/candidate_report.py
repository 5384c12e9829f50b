"""The report of a candidate as text, and two candidates side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from flagcore.domain.knob import Knobs
from flagcore.domain.objective import SERVING, objective_value
from flagcore.domain.serving import LATENCIES
from flagcore.i18n import N_, _
from flagcore.report.explanation import memory_parts, part_name
from flagcore.report.formats import hardware_text, lookup, shown, table
from flagcore.report.names import NAMES
from flagcore.report.text import (
    details,
    heading,
    knob_of,
    latency_name,
    layers_text,
    objective_text,
    state_name,
    value_text,
    values_text,
)

SAME = 1e-9
"""Maximum relative difference of equal figures."""


def candidate_report_text(account: Mapping[str, Any], knobs: Knobs) -> str:
    """Return the report of a candidate from the fields of `flagcore.CandidateReport`."""
    place = _(
        "{name} on {hardware}",
        name=_title(account["name"]),
        hardware=hardware_text(account["devices"], account["chip"]),
    )
    title = f"{place}: {values_text(account['candidate'], knobs)}"
    paragraph = [account["causes"]] if account["causes"] else []
    lines = [title, *paragraph, f"  {state_name(account['state'])}", *(f"  - {line}" for line in account["because"])]
    if account["requested"]:
        pairs = {
            knob: (requested_value, account["candidate"][knob])
            for knob, requested_value in account["requested"].items()
        }
        changed = differs_text({knob: pair for knob, pair in pairs.items() if pair[0] != pair[1]}, knobs)
        lines.append("  " + _("equivalent for the engine: {changes}", changes=changed))
    parts = (_predicted(account), _believed(account), _nearest(account, knobs), _changes(account, knobs))
    return "\n".join([*lines, *chain(*parts), *_matches(account, knobs)])


def _title(name: str) -> str:
    """Return the name of a candidate (trial, position in the prediction, best, baseline) for the start of a line."""
    kind, _separator, number = name.partition(" ")
    if number.isdecimal():
        return _("Trial {number}", number=number) if kind == "trial" else _("Candidate {number}", number=number)
    titles = {"the candidate": N_("The candidate"), "best": N_("Best"), "baseline": N_("Baseline")}
    return _(titles[name]) if name in titles else name[:1].upper() + name[1:]


def seconds_text(objective: str, seconds: float) -> str:
    """Return the time of a step in the unit of the objective."""
    return (
        objective_text(objective, objective_value(objective, seconds))
        if objective in SERVING
        else f"{seconds:.4g} s/step"
    )


def differs_text(differs: Mapping[str, Any], knobs: Knobs) -> str:
    """Return the knobs in which two candidates differ, with both values."""
    lines = []
    for name, pair in differs.items():
        knob = knob_of(name, knobs)
        if knob.part_of in differs:
            continue
        values = [value_text(value) for value in pair]
        texts = [differs[each] for each in details(name, knobs) if each in differs]
        words = [" ".join(str(each[place]) for each in texts if each[place] is not None) for place in (0, 1)]
        values = [word or plain for word, plain in zip(words, values, strict=True)]
        lines.append(f"{knob.title} {values[0]} -> {values[1]}")
    return ", ".join(lines)


def _predicted(account: Mapping[str, Any]) -> Iterator[str]:
    predicted, objective = account["predicted"], account["objective"]
    if predicted is None:
        yield _("No prediction, because the engine would reject it.")
        return
    step = predicted.get("step_time_s")
    memory = predicted["memory"]
    capacity = f" / {memory['capacity_gib']:.4g}" if "capacity_gib" in memory else ""
    used = f"~{memory['device_used_gib']:.4g}{capacity} GiB"
    if step is None:
        yield _("Predicted: {value}", value=f"{used}; {predicted.get('reason', _('time unknown'))}")
    else:
        bounds = predicted.get("objective", step)
        interval = _("(80%: {low} to {high})", low=shown(bounds["low"]), high=shown(bounds["high"]))
        yield _("Predicted: {value}", value=f"~{seconds_text(objective, step['value'])} {interval}, {used}")
    latencies = {name: lookup(predicted, f"{name}.p50") for name in LATENCIES}
    if medians := [f"{latency_name(name)} {value:.3g} s" for name, value in latencies.items() if value is not None]:
        yield "  p50: " + ", ".join(medians)
    parts = {_(part_name(name)): seconds for name, seconds in predicted.get("time", {}).items() if seconds}
    if parts:
        time_name = _("time of a request") if "objective" in predicted else _("time")
        yield f"  {time_name}: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items())
    sizes = ", ".join(f"{_(name)} {gib:.3g}" for name, gib in memory_parts(memory).items())
    yield f"  {_('memory')}: {sizes} GiB"
    if layers := predicted.get("stage_layers"):
        yield "  " + _("Layers of each pipeline stage: {layers}", layers=layers_text(layers))


def _believed(account: Mapping[str, Any]) -> Iterator[str]:
    believed, step = account["believed"], lookup(account, "predicted.step_time_s.value")
    if believed is None:
        return
    seconds = believed["step_time_s"]["value"]
    text = _(
        "Predicted after trials: ~{value}, probability to fit {chance:.0%}",
        value=seconds_text(account["objective"], seconds),
        chance=believed["chance_to_fit"],
    )
    yield text + ("" if not step else f" ({_('time')} {seconds / step - 1.0:+.1%})")


def _nearest(account: Mapping[str, Any], knobs: Knobs) -> Iterator[str]:
    nearest = account["nearest"]
    if nearest is not None:
        step_text = seconds_text(account["objective"], nearest["measured"]["step_time_s"]["median"])
        changes = differs_text(nearest["differs"], knobs)
        yield _(
            "Nearest measured: trial {number} ({changes}): {value}",
            number=nearest["number"],
            changes=changes,
            value=step_text,
        )


def _changes(account: Mapping[str, Any], knobs: Knobs) -> Iterator[str]:
    own, changes = account["expected_s"], dict(account["changes"])
    names = dict(NAMES["changes"])
    if "fastest" in changes and changes["fastest"] == changes.get("faster"):
        names["faster"] = names["fastest"]
        del changes["fastest"]
    if not changes and account["state"] not in ("open", "ran"):
        yield _("No change is possible: no allowed candidate is left.")
    elif own is not None and not account["changes"].keys() & {"faster", "fastest"}:
        yield _("No allowed candidate is expected to be faster.")
    if changes:
        yield _("Possible changes:")
    for what, change in changes.items():
        step, mark = change["expected_s"], "" if change["measured"] else "~"
        time = _("time unknown") if step is None else f"{mark}{seconds_text(account['objective'], step)}"
        gain = f" ({_('time')} {step / own - 1.0:+.1%})" if step and own else ""
        trial_text = "" if change["trial"] is None else f", {_('trial')} {change['trial']}"
        used = lookup(change, "predicted.memory.device_used_gib")
        yield f"  {_(names[what])}: {differs_text(change['differs'], knobs)}: {time}{gain}, ~{used:.3g} GiB{trial_text}"


def _matches(account: Mapping[str, Any], knobs: Knobs) -> Iterator[str]:
    if account["matches"]:
        yield _("It is the fastest with these knobs. The next ones:")
    for each in account["matches"]:
        step, mark = each["expected_s"], "" if each["measured"] else "~"
        time = _("time unknown") if step is None else f"{mark}{seconds_text(account['objective'], step)}"
        yield f"  {values_text(each['candidate'], knobs)}: {time}"


def compared_text(both: Mapping[str, Any], knobs: Knobs) -> str:
    """Return a comparison from the fields of `flagcore.api.explaining.compare.Comparison`."""
    lines = [f"{name}: {_side_text(both[name.lower()], knobs)}" for name in ("A", "B")]
    lines.append(_("Changed knobs: {changes}", changes=differs_text(both["differs"], knobs) or "-"))
    if both["tasks"]:
        lines.append(_("Changed tasks: {changes}", changes="; ".join(both["tasks"])))
    rows = list(_rows(both))
    parts = ["\n".join(lines), *([table(["", "A", "B", "B - A", "%"], rows)] if rows else [])]
    if both["gap"] is not None:
        verdict = NAMES["verdicts"][both["certainty"]]
        parts.append(_("Time of B vs A: {gap:+.1%} ({verdict})", gap=both["gap"], verdict=_(verdict)))
    return "\n".join(["\n\n".join(parts), *(f"  {line}" for line in both["because"])])


def _side_text(side: Mapping[str, Any], knobs: Knobs) -> str:
    place = f"{side['where']}, {hardware_text(side['devices'], side['chip'])}"
    state_text = state_name(side["state"])
    return f"{side['name']} ({place}): {values_text(side['candidate'], knobs)} ({state_text})"


def _rows(both: Mapping[str, Any]) -> Iterator[list[str]]:
    sides, objective = (both["a"], both["b"]), both["objective"]
    name = heading(objective) if objective in SERVING else _("step s")

    def row(text: str, key: str, seconds: bool = False) -> Iterator[list[str]]:
        pair = [lookup(side, key) for side in sides]
        if seconds and objective in SERVING:
            pair = [each and objective_value(objective, each) for each in pair]
        if any(pair):
            yield _row(text, pair)

    yield from row(name, "measured.step_time_s", seconds=True)
    if any(side["measured"] for side in sides):
        for text, key in ((_("spread within a run"), "spread_s"), (_("spread between runs"), "between_s")):
            yield [*_row(text, [_share(side, key) for side in sides])[:3], "-", "-"]
        yield [*_row(_("runs"), [lookup(side, "measured.runs") for side in sides])[:3], "-", "-"]
        yield from row(_("in use GiB"), "measured.device_used_gib")
    yield from row(f"~{name}", "predicted.step_time_s.value", seconds=True)
    yield from row(f"~{name} {_('(after trials)')}", "believed.step_time_s.value", seconds=True)
    for part, pair in both["time"].items():
        yield _row(f"~  {_(part_name(part))} s", pair)
    for figure, pair in both["figures"].items():
        yield _row(f"~{latency_name(figure)} s", pair)
    yield from row(_("~in use GiB"), "predicted.memory.device_used_gib")
    for part, pair in both["memory"].items():
        yield _row(f"~  {_(part)} GiB", pair)


def _share(side: Mapping[str, Any], name: str) -> float | None:
    seconds = lookup(side, f"measured.{name}")
    return None if seconds is None else float(seconds) / float(side["measured"]["step_time_s"])


def _row(name: str, pair: Sequence[float | None]) -> list[str]:
    a, b = pair
    cells = [name, *("-" if figure is None else shown(figure) for figure in (a, b))]
    if a is None or b is None:
        return [*cells, "-", "-"]
    if abs(b - a) <= SAME * abs(a):
        return [*cells, "0", "0.0%"]
    return [*cells, f"{b - a:+.3g}", f"{b / a - 1.0:+.1%}" if a * b > 0.0 else "-"]
