"""The report of a candidate as text: its state, its prediction, and the changes that would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flagcore.domain.knob import Knobs
from flagcore.domain.objective import SERVING, objective_value
from flagcore.domain.serving import LATENCIES
from flagcore.i18n import N_, _
from flagcore.report.explanation import memory_parts, part_name
from flagcore.report.formats import lookup, shown
from flagcore.report.serving_text import name_of, objective_text
from flagcore.report.text import details, knob_of, values_text

CHANGES = {
    "allowed": N_("smallest allowed change"),
    "faster": N_("faster, nearby"),
    "fastest": N_("fastest of all"),
}
"""Descriptions of the kinds of changes."""


def candidate_report_text(account: Mapping[str, Any], knobs: Knobs) -> str:
    """Return the report of a candidate from the fields of `flagcore.CandidateReport`."""
    name = account["name"][:1].upper() + account["name"][1:]
    heading = f"{name} on {account['devices']} x {account['chip']}: {values_text(account['candidate'], knobs)}"
    lines = [heading, f"  {account['state']}", *(f"  - {line}" for line in account["because"])]
    if account["typed"]:
        pairs = {knob: (asked, account["candidate"][knob]) for knob, asked in account["typed"].items()}
        taken = differs_text({knob: pair for knob, pair in pairs.items() if pair[0] != pair[1]}, knobs)
        lines.append("  " + _("equivalent for the engine: {changes}", changes=taken))
    return "\n".join(
        [*lines, *_predicted(account), *_believed(account), *_nearest(account, knobs), *_changes(account, knobs)]
    )


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
        values = [_value(value) for value in pair]
        how = [differs[each] for each in details(name, knobs) if each in differs]
        words = [" ".join(str(each[place]) for each in how if each[place] is not None) for place in (0, 1)]
        values = [word or plain for word, plain in zip(words, values, strict=True)]
        lines.append(f"{knob.title} {values[0]} -> {values[1]}")
    return ", ".join(lines)


def _predicted(account: Mapping[str, Any]) -> Iterator[str]:
    predicted, objective = account["predicted"], account["objective"]
    if predicted is None:
        yield _("Predicted: nothing, the engine would reject it.")
        return
    step = predicted.get("step_time_s")
    memory = predicted["memory"]
    capacity = f" / {memory['capacity_gib']:.4g}" if "capacity_gib" in memory else ""
    used = f"~{memory['device_used_gib']:.4g}{capacity} GiB"
    if step is None:
        yield _("Predicted: {value}", value=f"{used}; {predicted.get('reason', _('time unknown'))}")
    else:
        bounds = predicted.get("objective", step)
        within = _("(80%: {low} to {high})", low=shown(bounds["low"]), high=shown(bounds["high"]))
        yield _("Predicted: {value}", value=f"~{seconds_text(objective, step['value'])} {within}, {used}")
    latencies = {name: lookup(predicted, f"{name}.p50") for name in LATENCIES}
    if medians := [f"{name_of(name)} {value:.3g} s" for name, value in latencies.items() if value is not None]:
        yield "  p50: " + ", ".join(medians)
    parts = {_(part_name(name)): seconds for name, seconds in predicted.get("time", {}).items() if seconds}
    if parts:
        whose = _("time of a request") if "objective" in predicted else _("time")
        yield f"  {whose}: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items())
    sizes = ", ".join(f"{_(name)} {gib:.3g}" for name, gib in memory_parts(memory).items())
    yield f"  {_('memory')}: {sizes} GiB"


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
    near = account["nearest"]
    if near is not None:
        measured = seconds_text(account["objective"], near["measured"]["step_time_s"]["median"])
        changes = differs_text(near["differs"], knobs)
        yield _(
            "Nearest measured: trial {number} ({changes}): {value}",
            number=near["number"],
            changes=changes,
            value=measured,
        )


def _changes(account: Mapping[str, Any], knobs: Knobs) -> Iterator[str]:
    own, several = account["expected_s"], dict(account["changes"])
    names = dict(CHANGES)
    if "fastest" in several and several["fastest"] == several.get("faster"):
        names["faster"] = names["fastest"]
        del several["fastest"]
    if not several and account["state"] not in ("open", "ran"):
        yield _("No change helps: no allowed candidate is left.")
    elif own is not None and not account["changes"].keys() & {"faster", "fastest"}:
        yield _("No allowed candidate is expected to be faster.")
    if several:
        yield _("Possible changes:")
    for what, change in several.items():
        step, mark = change["expected_s"], "" if change["measured"] else "~"
        time = _("time unknown") if step is None else f"{mark}{seconds_text(account['objective'], step)}"
        gain = f" ({_('time')} {step / own - 1.0:+.1%})" if step and own else ""
        ran = "" if change["trial"] is None else f", {_('trial')} {change['trial']}"
        used = lookup(change, "predicted.memory.device_used_gib")
        yield f"  {_(names[what])}: {differs_text(change['differs'], knobs)}: {time}{gain}, ~{used:.3g} GiB{ran}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)
