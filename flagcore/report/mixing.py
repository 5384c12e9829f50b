"""The gain of mixing several kinds of chips, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.knob import Knobs
from flagcore.i18n import _
from flagcore.report.formats import render, shown
from flagcore.report.text import values_text

PAYS = 1.02
"""Mixing pays from this throughput on, relative to the fastest kind alone."""


def mixing_text(mixing: Mapping[str, Any], knobs: Knobs) -> str:
    """Return a table of the mixed plans, each kind alone and their sum, and one line on the gain."""
    alone = mixing["alone"]
    plans = [mixing["mixed"], *mixing["others"]]
    rows = [{**each, "plan": _(each["split"]) if each["split"] else _("mixed")} for each in plans]
    rows += [{**each, "plan": _("alone")} for each in alone]
    table = [{**row, "text": values_text(row["candidate"], knobs)} for row in rows]
    if alone:
        rate, devices = (sum(each[key] for each in alone) for key in ("tokens_per_second", "devices"))
        table.append({"plan": _("sum of single chips"), "devices": devices, "tokens_per_second": rate})
    columns = {
        _("plan"): "plan",
        _("chips"): "chips",
        _("devices"): "devices",
        "~s/step": "step_time_s",
        "~tok/s": "tokens_per_second",
        _("candidate"): "text",
    }
    return render(table, "table", columns) + "\n" + verdict(mixing)


def verdict(mixing: Mapping[str, Any]) -> str:
    """Return whether mixing pays, what limits it, and which chips idle."""
    figures = {"times": mixing["of_best_alone"], "chip": mixing["best_alone"], "share": mixing["of_sum"]}
    if not mixing["alone"]:
        text = _("No kind of chip can run the job alone.")
    elif mixing["of_best_alone"] >= PAYS:
        text = _("Mixing pays: ~{times:.2f} x {chip} alone, ~{share:.0%} of the sum.", **figures)
    else:
        text = _("Mixing does not pay: ~{times:.2f} x {chip} alone, ~{share:.0%} of the sum.", **figures)
    used = mixing["mixed"]["implementation"]
    if own := [each for each in mixing["alone"] if each["implementation"] != used]:
        kinds = ", ".join(f"{each['chips']} {each['implementation']}" for each in own)
        text += " " + _("train.implementation differs: alone {kinds}, mixed {used}.", kinds=kinds, used=used)
    idle = ", ".join(f"{name} ~{share:.0%}" for name, share in mixing["idle"].items())
    if idle:
        limit = {"limit": _(mixing["limit"]), "slowest": mixing["slowest"], "idle": idle}
        text += " " + _("Limited by {limit}, slowest stage on {slowest}; idle: {idle}.", **limit)
    balanced = mixing["balanced"]
    if balanced and balanced["layers"] != mixing["layers"]:
        layers, better = (", ".join(map(str, each)) for each in (mixing["layers"], balanced["layers"]))
        figures = {"layers": layers, "better": better, "seconds": shown(balanced["step_time_s"])}
        text += " " + _("Layers {layers}; balanced: {better}, ~{seconds} s/step.", **figures)
    return text
