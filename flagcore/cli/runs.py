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
    from flagcore.report.text import run_rows

    records = api.list_runs(folder)
    if form == "table" and not records:
        options.say(_("no run in {folder}; `flag tune` creates one", folder=folder))
        return
    options.show_records(run_rows(records) if form == "table" else records, form, options.columns("runs"))
    _say_unmeasured(records, form)


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
    from flagcore.report.text import run_rows

    if len(runs) < 2:
        raise click.UsageError(_("expected at least two runs"))
    records = api.compare_runs(runs)
    if form != "table":
        options.show_records(records, form, options.columns("runs", "runs_compared"))
        return
    knobs = {name: f"candidate.{name}" for name in api.differing_knobs(records)}
    columns = {**options.columns("runs", "runs_compared"), **knobs}
    rows = [[_(name), *(shown(lookup(each, key)) for each in run_rows(records))] for name, key in columns.items()]
    options.show(table(rows[0], rows[1:]))
    _say_unmeasured(records, form)


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


def _say_unmeasured(records: Sequence[Mapping[str, Any]], form: str) -> None:
    """Print below a table why runs have no measurement, and how to go on."""
    from flagcore.api.runs import UNMEASURED

    for each in records if form == "table" else ():
        if each["state"] == UNMEASURED:
            options.say(f"{each['run']}: {each['no_best']}")
