"""All that is known of one candidate as text: what became of it, what was predicted, and what would have to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flagcore.domain.objective import SERVING, told
from flagcore.domain.serving import LATENCIES
from flagcore.report.explanation import memory_parts, part_name
from flagcore.report.formats import lookup, shown
from flagcore.report.serving_text import name_of, objective_text
from flagcore.report.text import RECOMPUTE, SHORT, values_text

CHANGES = {
    "allowed": "smallest change that may be tried",
    "faster": "faster, nearby",
    "fastest": "fastest of all",
}
"""What is told of each change, by its name."""


def candidate_report_text(account: Mapping[str, Any]) -> str:
    """Return what is known of a candidate, with the fields of `flagcore.CandidateReport`."""
    name = account["name"][:1].upper() + account["name"][1:]
    heading = f"{name} on {account['devices']} x {account['chip']}: {values_text(account['candidate'])}"
    lines = [heading, f"  {account['state']}", *(f"  - {line}" for line in account["because"])]
    if account["typed"]:
        pairs = {knob: (asked, account["candidate"][knob]) for knob, asked in account["typed"].items()}
        taken = differs_text({knob: pair for knob, pair in pairs.items() if pair[0] != pair[1]})
        lines.append(f"  the engine takes what was asked for this: {taken}")
    return "\n".join([*lines, *_predicted(account), *_believed(account), *_nearest(account), *_changes(account)])


def seconds_text(objective: str, seconds: float) -> str:
    """Return the seconds of a step as the objective tells them."""
    return objective_text(objective, told(objective, seconds)) if objective in SERVING else f"{seconds:.4g} s a step"


def differs_text(differs: Mapping[str, Any]) -> str:
    """Return the knobs in which another candidate differs, with the value of each."""
    left = {knob: pair for knob, pair in differs.items() if knob not in RECOMPUTE or "use_recompute" not in differs}
    lines = []
    for knob, pair in left.items():
        values = [_value(value) for value in pair]
        if knob == "use_recompute":
            how = [differs[each] for each in RECOMPUTE if each in differs]
            words = [" ".join(str(each[place]) for each in how if each[place] is not None) for place in (0, 1)]
            values = [word or plain for word, plain in zip(words, values, strict=True)]
        lines.append(f"{SHORT.get(knob, knob)} {values[0]} -> {values[1]}")
    return ", ".join(lines)


def _predicted(account: Mapping[str, Any]) -> Iterator[str]:
    predicted, objective = account["predicted"], account["objective"]
    if predicted is None:
        yield "Predicted: nothing, for the engine would refuse it."
        return
    step = predicted.get("step_time_s")
    memory = predicted["memory"]
    capacity = f" of {memory['capacity_gib']:.4g}" if "capacity_gib" in memory else ""
    used = f"~{memory['device_used_gib']:.4g}{capacity} GiB a device"
    if step is None:
        yield f"Predicted: {used}; {predicted.get('reason', 'no time')}"
    else:
        bounds = predicted.get("objective", step)
        within = f"(80%: {shown(bounds['low'])} to {shown(bounds['high'])})"
        yield f"Predicted: ~{seconds_text(objective, step['value'])} {within}, {used}"
    latencies = {name: lookup(predicted, f"{name}.p50") for name in LATENCIES}
    if told_of := [f"{name_of(name)} {value:.3g} s" for name, value in latencies.items() if value is not None]:
        yield "  p50: " + ", ".join(told_of)
    parts = {part_name(name): seconds for name, seconds in predicted.get("time", {}).items() if seconds}
    if parts:
        whose = "a request's time" if "objective" in predicted else "time"
        yield f"  {whose}: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items())
    yield "  memory: " + ", ".join(f"{name} {gib:.3g}" for name, gib in memory_parts(memory).items()) + " GiB"


def _believed(account: Mapping[str, Any]) -> Iterator[str]:
    believed, step = account["believed"], lookup(account, "predicted.step_time_s.value")
    if believed is None:
        return
    seconds = believed["step_time_s"]["value"]
    off = f", {seconds / step - 1.0:+.1%} in time against the prediction" if step else ""
    fits = f"; it fits with a chance of {believed['chance_to_fit']:.0%}"
    yield f"Believed after trials: {seconds_text(account['objective'], seconds)}{off}{fits}"


def _nearest(account: Mapping[str, Any]) -> Iterator[str]:
    near = account["nearest"]
    if near is not None:
        measured = seconds_text(account["objective"], near["measured"]["step_time_s"]["median"])
        yield f"Nearest measured: trial {near['number']} ({differs_text(near['differs'])}): {measured}"


def _changes(account: Mapping[str, Any]) -> Iterator[str]:
    own, several = account["expected_s"], dict(account["changes"])
    names = dict(CHANGES)
    if "fastest" in several and several["fastest"] == several.get("faster"):
        names["faster"] = f"{CHANGES['faster']}, and {CHANGES['fastest']}"
        del several["fastest"]
    if not several and account["state"] not in ("open", "ran"):
        yield "No change helps: no candidate is left that may be tried."
    elif own is not None and not account["changes"].keys() & {"faster", "fastest"}:
        removed = account["state"] == "removed"
        yield "Nothing that may be tried is expected to be faster." if removed else "Nothing is expected to be faster."
    if several:
        yield "What would have to change:"
    for what, change in several.items():
        step, mark = change["expected_s"], "" if change["measured"] else "~"
        time = "time unknown" if step is None else f"{mark}{seconds_text(account['objective'], step)}"
        gain = f" ({step / own - 1.0:+.1%} in time)" if step and own else ""
        ran = "" if change["trial"] is None else f", trial {change['trial']}"
        used = lookup(change, "predicted.memory.device_used_gib")
        yield f"  {names[what]}: {differs_text(change['differs'])}: {time}{gain}, ~{used:.3g} GiB{ran}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)
