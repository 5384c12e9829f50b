"""flag estimate: what is known without running anything."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from flagcore.cli import options

T = TypeVar("T")


@click.command("estimate")
@options.tree
@click.option(
    "--jobs", type=click.Path(), metavar="FILE", help="Predict the job records of a JSON-lines file (- for stdin)."
)
@options.chip()
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="How many candidates to list.")
@click.option(
    "--explain", metavar="ID", help="Tell all of one: a candidate's number in the list, baseline, or a job's id."
)
@options.output
@options.plugins
def estimate_command(
    source: tuple[str | None, dict[str, Any] | None],
    jobs: str | None,
    chip: str | None,
    top: int,
    explain: str | None,
    form: str,
    without: tuple[str, ...],
) -> None:
    """Predict memory and time of every candidate of SPEC, or of job records. Runs nothing.

    With --jobs the default format is jsonl, an answer a line. With --config-path and --config-name it takes a tree of
    FlagScale's, as `flag tune` does.
    """
    spec, data = source
    if explain is not None and form == "csv":
        raise click.UsageError("--explain tells one in full, which has no columns: use another --format than csv")
    if (spec is None) == (jobs is None):
        raise click.UsageError("give either SPEC or --jobs FILE")
    if jobs is not None and chip is not None:
        raise click.UsageError("--chip goes with SPEC; a job record names its own chip")
    if jobs is not None and _given("top"):
        raise click.UsageError("--top goes with SPEC; every job record is answered")
    if jobs is not None:
        _estimate_jobs(jobs, explain, form if _given("form") or explain is not None else "jsonl", without)
        return
    assert spec is not None
    if spec.endswith(".jsonl"):
        raise click.UsageError(f"{spec} has the name of a file of job records; give it to --jobs")
    _estimate_spec(spec, data, chip, top, explain, form, without)


def _given(option: str) -> bool:
    """Return whether the user gave an option."""
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def _estimate_jobs(jobs: str, explain: str | None, form: str, without: tuple[str, ...]) -> None:
    from flagcore import api
    from flagcore.report.formats import render

    records = _records(jobs)
    if explain is not None:
        ids: list[str] = []
        wanted = _of_id(records, explain, ids)
        found = next(api.estimate_jobs(wanted, without=without, at_once=1, with_model=True), None)
        if found is None:
            near = " or ".join(get_close_matches(explain, dict.fromkeys(ids), n=2))
            hint = f"did you mean {near}?" if near else f"{len(ids)} records have an id"
            raise click.UsageError(f"--explain {explain}: no job record of {jobs} has this id; {hint}")
        _show(found, f"Job {explain}", form)
        return
    at_once = 1 if _is_pipe(jobs) else api.AT_ONCE
    predictions = api.estimate_jobs(records, without=without, at_once=at_once)
    if form == "jsonl":
        for prediction in predictions:
            click.echo(json.dumps(prediction, ensure_ascii=False, allow_nan=False))
    else:
        answers = list(predictions)
        if form in ("table", "csv"):
            answers = [{**each, "reason": _why(each)} for each in answers]
        serve = any("objective" in each for each in answers)
        columns = JOB_COLUMNS if not serve else {**JOB_COLUMNS, **SERVED_COLUMNS} if _trains(answers) else SERVED_JOBS
        options.show(render(answers, form, columns), form)


def _trains(answers: list[dict[str, Any]]) -> bool:
    """Return whether some answer is of training."""
    return any("mfu" in each or "limit" in each for each in answers)


def _why(answer: dict[str, Any]) -> str | None:
    """Return what is to be said of an answer beside its figures."""
    return answer.get("reason") or "; ".join(answer.get("warnings", ())) or None


def _estimate_spec(
    spec: str,
    data: dict[str, Any] | None,
    chip: str | None,
    top: int,
    explain: str | None,
    form: str,
    without: tuple[str, ...],
) -> None:
    from flagcore import api
    from flagcore.report.compact_table import candidates_table
    from flagcore.report.formats import render
    from flagcore.report.text import candidate_columns, candidate_line, funnel

    number = _number(explain)
    found = api.estimate(spec, chip=chip, top=max(top, number), without=without, data=data)
    where = f"{found.devices} x {found.chip}"
    if explain is not None:
        if number > len(found.candidates):
            raise click.UsageError(f"--explain {explain}: there are {len(found.candidates)} candidates")
        record = found.candidates[number - 1] if number else found.baseline
        told = {"chip": found.chip, "devices": found.devices, **record, "model": list(found.model)}
        told |= {"notes": list(found.notes)} if found.notes else {}
        _show(told, f"Candidate {number}" if number else "The baseline", form)
        return
    if form == "table":
        timed = any("step_time_s" in each for each in found.candidates)
        options.say(
            f"The {'fastest predicted candidates' if timed else 'candidates that need least memory'} on {where}:"
        )
    figures = SERVED_COLUMNS if any("objective" in each for each in found.candidates) else PREDICTED_COLUMNS
    knobs = candidate_columns(found.candidates)
    options.show(
        candidates_table(found.candidates, knobs, figures)
        if form == "table"
        else render(found.candidates, form, {"#": "number", **knobs, **figures}),
        form,
    )
    if form == "table":
        options.say("\n" + candidate_line("baseline", found.baseline) + "\n\n" + funnel(found.counts))
        options.say(f"\nPredicted {found.runs}.")
        if found.untimed:
            many = f"{found.untimed:,} of {found.counts.untried:,}"
            options.say(f"{many} candidates have no time, and stand last by memory: {found.no_time}.")


def _number(explain: str | None) -> int:
    """Return the number of the candidate to explain, 0 for the baseline or none."""
    if explain in (None, "baseline"):
        return 0
    if not str(explain).isdecimal() or not 1 <= int(str(explain)) <= MOST_EXPLAINED:
        raise click.UsageError(f"--explain {explain}: give a candidate's number in the list, from 1, or baseline")
    return int(str(explain))


def _show(record: dict[str, Any], title: str, form: str) -> None:
    """Print one prediction in full: text for people, or the record."""
    from flagcore.report.explanation import explained, notes_text
    from flagcore.report.formats import render
    from flagcore.report.text import values_text

    if form != "table":
        click.echo(json.dumps(record, indent=2, ensure_ascii=False) if form == "json" else render([record], form, {}))
        return
    if "candidate" in record:
        told = ", ".join(filter(None, [values_text(record["candidate"]), _settings_text(record.get("settings", {}))]))
        options.show(f"{title} on {record['devices']} x {record['chip']}: {told}\n")
    options.show("\n\n".join(filter(None, [explained(record), notes_text(record.get("notes", ()))])))


def _settings_text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items() if value not in (False, 0))


def _is_pipe(file: str) -> bool:
    """Return whether somebody may wait for an answer before the next line is written."""
    try:
        mode = os.fstat(0).st_mode if file == "-" else os.stat(file).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode)


PREDICTED_COLUMNS = {
    "~step s": "step_time_s.value",
    "~tok/s/dev": "tokens_per_second_per_device.value",
    "~mfu": "mfu",
    "~static GiB": "memory.static_gib",
    "~used GiB": "memory.device_used_gib",
    "of GiB": "memory.capacity_gib",
    "limited by": "limit",
}
SERVED_COLUMNS = {
    "~output tok/s": "output_tokens_per_s",
    "~req/s": "requests_per_s",
    "~TTFT p50 s": "ttft_s.p50",
    "~p99": "ttft_s.p99",
    "~TPOT p50 s": "tpot_s.p50",
    "~KV GiB": "memory.kv_cache_gib",
    "~used GiB": "memory.device_used_gib",
    "of GiB": "memory.capacity_gib",
}
MOST_EXPLAINED = 100_000
FITS = {"fits": "memory.fits", "reason": "reason"}
JOB_COLUMNS = {"id": "id", "status": "status", **PREDICTED_COLUMNS, **FITS}
SERVED_JOBS = {"id": "id", "status": "status", **SERVED_COLUMNS, **FITS}


def _records(file: str) -> Iterator[Any]:
    """Yield the record of each line, or what is wrong with it. Raises UsageError where there is none at all."""
    from flagcore.errors import UsageError
    from flagcore.spec import read_job_lines

    name = "stdin" if file == "-" else file
    try:
        with open(0, "rb", closefd=False) if file == "-" else Path(file).open("rb") as stream:
            lines = read_job_lines(stream, file=name)
            first = next(lines, None)
            if first is None:
                raise UsageError(f"{name} holds no job record; write one JSON object a line")
            yield from chain([first], lines)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None


def _of_id(records: Iterable[T], wanted: str, ids: list[str]) -> Iterator[T]:
    """Yield the records of this id, and put all other ids into `ids`."""
    for record in records:
        if isinstance(record, dict):
            if record["id"] == wanted:
                yield record
            ids.append(record["id"])
