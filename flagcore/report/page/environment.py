"""What a run stood on: the spec, the environment, and the facts of the chips with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore import __version__
from flagcore.report.formats import shown
from flagcore.report.page.blocks import Block, Cell, Code, Facts, Section, Text, cell, table
from flagcore.report.page.run import RunData, text_file

UNITS = {"bytes": (2**30, "GiB"), "bytes/s": (1e9, "GB/s"), "flops/s": (1e12, "TFLOP/s")}


def environment(run: RunData) -> Section:
    """Return versions, variables and what was asked for."""
    trial = next((each for each in [run.best or {}, *run.everything] if each.get("measured")), None)
    measured: Mapping[str, Any] = (trial or {}).get("measured") or {}
    hardware = f"{run.result['devices']} x {run.result['chip']}"
    facts = [("Hardware", _kept(hardware)), ("flagcore that wrote this page", _kept(__version__))]
    facts += [(str(name), _kept(version)) for name, version in (measured.get("versions") or {}).items() if version]
    blocks: list[Block] = [Facts(tuple(facts))]
    variables = run.insight.get("environment") or {}
    if variables:
        rows = [[_kept(name), _kept(value)] for name, value in variables.items()]
        blocks.append(table("Environment that plugins give to each trial", ["variable", "value"], rows))
    if measured.get("telemetry"):
        rows = [[_kept(name), cell(float(value))] for name, value in measured["telemetry"].items()]
        blocks.append(table(f"Telemetry of trial {(trial or {})['number']}", ["figure", "value"], rows))
    if measured.get("effective"):
        rows = [[_kept(name, " " not in name), _kept(value)] for name, value in measured["effective"].items()]
        blocks.append(
            table(f"Values that the engine said it used, trial {(trial or {})['number']}", ["name", "value"], rows)
        )
    spec = text_file(run.folder / "spec.yaml", run.secrets)
    if spec:
        blocks.append(Code("The spec (spec.yaml)", spec.rstrip()))
    return Section(anchor="environment", title="Environment", blocks=tuple(blocks))


def chips(run: RunData) -> Section:
    """Return the facts of the chips that predictions used, each with where it is from."""
    blocks: list[Block] = []
    if run.insight.get("kernels_guessed"):
        told = "Nobody has measured this chip's kernels: predicted times come from its peaks, and intervals are wider."
        blocks.append(Text(told, warns=True))
    for chip in run.insight.get("chips") or []:
        rows = [_fact(fact) for fact in chip["facts"]]
        budget = chip.get("memory_budget_bytes")
        if budget:
            rows.append(
                [
                    "memory that a device may use",
                    Cell(f"{shown(budget / 2**30)} GiB", float(budget)),
                    "the spec, or the driver",
                    "",
                ]
            )
        of = f"{chip['nodes']} x {chip['devices_per_node']} {chip['name']} ({chip['vendor']})"
        blocks.append(table(of, ["fact", "value", "kind of source", "source"], rows))
        if chip.get("notes"):
            blocks.append(Text(str(chip["notes"])))
    if not blocks:
        blocks.append(Text("What was known of the chip was not kept with this run."))
    return Section(anchor="chips", title="Facts of the chip, with their sources", blocks=tuple(blocks))


def _kept(value: object, kept: bool = True) -> Cell:
    """Return what is the same in every language, as a cell."""
    return Cell(str(value), kept=kept)


def _fact(fact: Mapping[str, Any]) -> list[Any]:
    unit, name = UNITS[fact["unit"]]
    value = float(fact["value"])
    return [fact["fact"], Cell(f"{shown(value / unit)} {name}", value), fact["kind"], fact["from"]]
