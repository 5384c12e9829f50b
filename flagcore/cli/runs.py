"""flag runs: list, show, compare and delete runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from flagcore.cli import options
from flagcore.i18n import N_, _


@click.group("runs")
def runs_command() -> None:
    """List, show, compare or delete runs (the directories that `flag tune` writes)."""


@runs_command.command("list")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"), metavar="[DIR]")
@options.output
def runs_list(folder: Path, form: str) -> None:
    """List the runs in DIR [default: runs], the latest first."""
    from flagcore import api

    records = api.list_runs(folder)
    if form == "table" and not records:
        options.say(_("no run in {folder}; `flag tune` creates one", folder=folder))
        return
    options.show_records(_shown(records, form), form, options.columns("runs"))


@runs_command.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@options.output
@options.plugins
def runs_show(run: Path, form: str, without: tuple[str, ...]) -> None:
    """Show the best configuration of RUN and all trials, as `flag tune` does at its end. Works during a run, too."""
    from flagcore import api

    data, text = api.show_run(run, without)
    if form == "table":
        options.show(text)
    elif form in ("json", "jsonl"):
        click.echo(json.dumps(data, indent=1 if form == "json" else None, ensure_ascii=False))
    else:
        options.show_records([data] if form == "yaml" else data["trials"], form, options.columns("trials"))


@runs_command.command("compare")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="RUN RUN...")
@options.output
def runs_compare(runs: tuple[Path, ...], form: str) -> None:
    """Compare the best configurations of several runs side by side; gains are relative to the first.

    `flag compare` compares two candidates in detail.
    """
    from flagcore import api
    from flagcore.report.formats import lookup, shown, table

    if len(runs) < 2:
        raise click.UsageError(_("expected at least two runs"))
    records = api.compare_runs(runs)
    if form != "table":
        options.show_records(records, form, options.columns("runs", "runs_compared"))
        return
    knobs = {name: f"candidate.{name}" for name in api.differing_knobs(records)}
    columns = {**options.columns("runs", "runs_compared"), **knobs}
    rows = [[_(name), *(shown(lookup(each, key)) for each in _shown(records, form))] for name, key in columns.items()]
    options.show(table(rows[0], rows[1:]))


@runs_command.command("rm")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("-y", "--yes", is_flag=True, help=N_("Delete without asking."))
def runs_rm(runs: tuple[Path, ...], yes: bool) -> None:
    """Delete runs with all their trials and logs. Other files in their directories are kept."""
    from flagcore import api

    for record in [record for each in runs for record in api.compare_runs([each])]:
        question = _("Delete {run} ({trials} trials)?", run=record["run"], trials=record.get("trials", "?"))
        if not yes and not sys.stdin.isatty():
            raise click.UsageError(_("{option} is required: stdin is not a terminal", option="--yes"))
        if yes or click.confirm(question, err=True):
            api.remove_run(record["run"])
            options.say(_("Deleted {run}.", run=record["run"]))


def _shown(records: Sequence[Mapping[str, Any]], form: str) -> list[dict[str, Any]]:
    """Return records with texts for a table: states in the language of the user, figures with units."""
    if form != "table":
        return [dict(each) for each in records]
    return [{**each, **_texts(each)} for each in records]


def _texts(record: Mapping[str, Any]) -> dict[str, str | None]:
    from flagcore.report.formats import shown, size_text
    from flagcore.report.text import duration_text

    speedup, value, mark = record.get("speedup"), record.get("value"), "" if record.get("fidelity") == "run" else "~"
    low, high, unit = record.get("low"), record.get("high"), record.get("unit")
    gain, seconds = record.get("gain"), record.get("seconds")
    gain_text = f"{mark}{speedup or 0.0:+.1%}" if record.get("significant") else _("not significant")
    return {
        "state": _(record["state"]),
        "value": None if value is None else f"{mark}{shown(value)} {unit}",
        "range": None if low is None or low == high else f"{shown(low)} - {shown(high)}",
        "speedup": None if speedup is None else gain_text,
        "memory_gib": size_text(record.get("memory_gib")),
        "seconds": None if seconds is None else duration_text(seconds),
        "gain": None if gain is None else f"{mark}{gain:+.1%}",
    }
