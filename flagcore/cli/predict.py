"""flag estimate and explain: what is known without running anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click

from flagcore.cli import options


@click.command("estimate")
@click.argument("spec", required=False, type=click.Path())
@click.option(
    "--jobs", type=click.Path(), metavar="FILE", help="Predict the job records of a JSON-lines file (- for stdin)."
)
@click.option("--chip", metavar="NAME", help="Plan for this chip instead of the spec's.")
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="How many candidates to list.")
@options.output
@options.plugins
def estimate_command(
    spec: str | None, jobs: str | None, chip: str | None, top: int, form: str, without: tuple[str, ...]
) -> None:
    """Predict memory and time of every candidate of SPEC, or of job records. Runs nothing."""
    from flagcore import api
    from flagcore.report.formats import render
    from flagcore.report.text import candidate_columns, funnel

    if (spec is None) == (jobs is None):
        raise click.UsageError("give either SPEC or --jobs FILE")
    if jobs is not None and chip is not None:
        raise click.UsageError("--chip goes with SPEC; a job record names its own chip")
    if jobs is not None:
        predictions = api.estimate_jobs(_records(jobs), without=without)
        if form in ("jsonl", "table"):
            for prediction in predictions:
                click.echo(json.dumps(prediction, ensure_ascii=False, allow_nan=False))
        else:
            click.echo(render(list(predictions), form, JOB_COLUMNS))
        return
    assert spec is not None
    found = api.estimate(spec, chip=chip, top=top, without=without)
    if form == "table":
        options.say(f"The fastest predicted candidates on {found.devices} x {found.chip}:")
    click.echo(render(found.candidates, form, {**candidate_columns(found.candidates), **PREDICTED_COLUMNS}))
    if form == "table":
        options.say("\n" + funnel(found.counts))


@click.command("explain")
@click.argument("spec", metavar="SPEC|RUN", type=click.Path())
@click.option("--chip", metavar="NAME", help="Plan for this chip instead of the spec's.")
@options.output
@options.plugins
def explain_command(spec: str, chip: str | None, form: str, without: tuple[str, ...]) -> None:
    """Tell where every combination of SPEC went: which rule removed how many, and what each rule says.

    With the folder of a run, tell it as it was when the run ended.
    """
    from dataclasses import asdict

    from flagcore import api
    from flagcore.errors import NothingFits
    from flagcore.report.formats import render
    from flagcore.report.text import funnel

    found = api.explain(spec, chip=chip, without=without)
    if form == "table":
        took = {**found.counts.illegal, **found.counts.pruned}
        says = [{"rule": name, "says": found.says.get(name, "")} for name in took]
        click.echo(funnel(found.counts))
        click.echo("\n" + render(says, "table", {"rule": "rule", "says": "says"}))
        if found.ended_because:
            click.echo(f"\nThe run ended because {found.ended_because}.")
    elif form == "json":
        click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False))
    else:
        click.echo(render([asdict(found)], form, {"counts": "counts"}))
    if found.nothing_fits:
        raise NothingFits(found.nothing_fits)


PREDICTED_COLUMNS = {
    "~step s": "step_time_s.value",
    "~tok/s/dev": "tokens_per_second_per_device.value",
    "~mfu": "mfu",
    "~static GiB": "memory.static_gib",
    "~used GiB": "memory.device_used_gib",
    "of GiB": "memory.capacity_gib",
}
LONGEST_LINE = 1 << 20
JOB_COLUMNS = {"id": "id", "status": "status", "reason": "reason", **PREDICTED_COLUMNS}


def _records(file: str) -> Iterator[Any]:
    """Yield one value a line; a line that is no JSON becomes a text, which the estimate calls invalid."""
    from flagcore.errors import UsageError

    try:
        with open(0, "rb", closefd=False) if file == "-" else Path(file).open("rb") as stream:
            yield from (_value(line) for line in _lines(stream) if line.strip())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long only its start, which is no JSON."""
    while line := stream.readline(LONGEST_LINE):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST_LINE)
        yield line


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.decode("utf-8", errors="replace")[:80]
