"""flag estimate: predictions without running anything."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from flagcore.cli import options
from flagcore.i18n import _, did_you_mean, ngettext

if TYPE_CHECKING:
    from flagcore.domain.knob import Knobs
    from flagcore.domain.prediction import Labels


@click.command("estimate")
@options.tree
@click.option(
    "--jobs", type=click.Path(), metavar="FILE", help="Predict job records from a JSON Lines file (- for stdin)."
)
@options.chip()
@options.objective
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Number of candidates to list.")
@click.option("--all", "every", is_flag=True, help="List every candidate, not only the fastest of each layout.")
@click.option(
    "--explain", metavar="ID", help="Show one candidate in detail: number in the list, baseline, or the id of a job."
)
@options.output
@options.plugins
def estimate_command(
    source: tuple[str | None, dict[str, Any] | None],
    jobs: str | None,
    chip: str | None,
    objective: str | None,
    top: int,
    every: bool,
    explain: str | None,
    form: str,
    without: tuple[str, ...],
) -> None:
    """Predict memory and time of all candidates of SPEC, or of job records, without running anything.

    With --jobs the default format is jsonl. A config of another tuner (--config-path, --config-name) may replace SPEC.
    """
    spec, data = source
    if explain is not None and form == "csv":
        raise click.UsageError(_("--explain does not support --format csv"))
    if (spec is None) == (jobs is None):
        raise click.UsageError(_("either SPEC or --jobs FILE is required"))
    if jobs is not None and chip is not None:
        raise click.UsageError(_("--chip requires SPEC: job records name their chip"))
    if jobs is not None and objective is not None:
        raise click.UsageError(_("--objective requires SPEC: job records are not ranked"))
    if jobs is not None and _is_given("top"):
        raise click.UsageError(_("--top requires SPEC: every job record is predicted"))
    if jobs is not None:
        form = form if _is_given("form") or explain is not None else "jsonl"
        with options.language_of(form):
            _estimate_jobs(jobs, explain, form, without)
        return
    assert spec is not None
    if spec.endswith(".jsonl"):
        raise click.UsageError(_("{file} looks like job records: use --jobs {file}", file=spec))
    _estimate_spec(spec, data, chip, top, explain, form, without, every=every, objective=objective)


def _is_given(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def _estimate_jobs(jobs: str, explain: str | None, form: str, without: tuple[str, ...]) -> None:
    from flagcore import api
    from flagcore.api.common.inputs import knobs_of_spec, labels_of_spec

    records = _records(jobs)
    if explain is not None:
        by_id: dict[str, dict[str, Any]] = {}
        for record in records:
            if isinstance(record, dict):
                by_id.setdefault(record["id"], record)
        if explain not in by_id:
            problem = _("--explain: no job record in {file} has id {id!r}", file=jobs, id=explain)
            raise click.UsageError("; ".join(filter(None, [problem, did_you_mean(explain, by_id)])))
        details = next(api.estimate_jobs([by_id[explain]], without=without, at_once=1, with_model=True))
        _show(details, _("Job {id}", id=explain), form, knobs_of_spec(by_id[explain]), labels_of_spec(by_id[explain]))
        return
    batch_size = 1 if _is_pipe(jobs) else api.AT_ONCE
    predictions = api.estimate_jobs(records, without=without, at_once=batch_size)
    if form == "jsonl":
        for prediction in predictions:
            click.echo(json.dumps(prediction, ensure_ascii=False, allow_nan=False))
    else:
        answers = list(predictions)
        if form in ("table", "csv"):
            for each in answers:
                each["reason"] = each.get("reason") or "; ".join(each.get("warnings", ())) or None
        has_serving = any("objective" in each for each in answers)
        has_training = not has_serving or any("mfu" in each or "limit" in each for each in answers)
        figures = ["predicted"] * has_training + ["predicted_serving"] * has_serving
        options.show_records(answers, form, options.columns("jobs", *figures, "jobs_fit"))


def _estimate_spec(
    spec: str,
    data: dict[str, Any] | None,
    chip: str | None,
    top: int,
    explain: str | None,
    form: str,
    without: tuple[str, ...],
    *,
    every: bool,
    objective: str | None,
) -> None:
    from flagcore import api
    from flagcore.domain.price import TDP
    from flagcore.report.formats import hardware_text
    from flagcore.report.mixing import mixing_text
    from flagcore.report.text import (
        assumed_text,
        candidate_columns,
        candidate_line,
        funnel,
        interval_text,
        search_time_text,
        slo_text,
    )

    number = _number(explain)
    distinct = not every and explain is None
    count = max(top, number)
    estimate = api.estimate(
        spec, chip=chip, top=count, distinct=distinct, objective=objective, without=without, data=data
    )
    hardware = hardware_text(estimate.devices, estimate.chip)
    if explain is not None:
        number_of = len(estimate.candidates)
        if number > number_of:
            raise click.UsageError(_("--explain {id}: there are {count} candidates", id=explain, count=number_of))
        record = estimate.candidates[number - 1] if number else estimate.baseline
        details = {"chip": estimate.chip, "devices": estimate.devices, **record, "model": list(estimate.model)}
        details |= {"notes": list(estimate.notes)} if estimate.notes else {}
        _show(
            details,
            _("Candidate {number}", number=number) if number else _("Baseline"),
            form,
            estimate.knobs,
            estimate.labels,
        )
        return
    if form == "table":
        if estimate.unmet:
            options.say(estimate.unmet + "\n")
        if any("step_time_s" in each for each in estimate.candidates):
            options.say(_("Fastest predicted candidates on {hardware}:", hardware=hardware))
        else:
            options.say(_("Candidates with the least memory on {hardware}:", hardware=hardware))
    figures = "predicted_serving" if any("objective" in each for each in estimate.candidates) else "predicted"
    columns = {"#": "number", **candidate_columns(estimate.candidates, estimate.knobs), **options.columns(figures)}
    columns |= options.columns("layouts") if distinct else {}
    columns |= {
        name: key
        for name, key in options.columns("highest", "cost").items()
        if any(key in each for each in estimate.candidates)
    }
    candidates = [
        {**each, "slo_text": slo_text(each["slo"])} if "slo" in each else each for each in estimate.candidates
    ]
    if form == "table" and any("slo" in each for each in candidates):
        columns |= {"SLO": "slo_text"}
    options.show_records(candidates if form == "table" else estimate.candidates, form, columns)
    if form == "table":
        if any(each.get("energy_source") == TDP for each in candidates):
            options.say("\n" + _("Energy is that of the devices at their TDP; they usually take less."))
        if estimate.assumed:
            options.show("\n" + assumed_text(estimate.assumed))
        for text in filter(None, (estimate.bottleneck, estimate.warning)):
            options.say("\n" + text)
        lines = [candidate_line(_("baseline"), estimate.baseline, estimate.knobs)]
        if estimate.defaults:
            lines.append(candidate_line(_("engine defaults on the fewest devices"), estimate.defaults, estimate.knobs))
        options.say("\n" + "\n".join(lines) + "\n\n" + funnel(estimate.counts))
        if estimate.mixing:
            options.show("\n" + mixing_text(estimate.mixing, estimate.knobs))
        options.say("\n" + _("Predicted {for_what}.", for_what=estimate.runs))
        if interval := interval_text(estimate.candidates[0]):
            options.say(interval)
        if estimate.search:
            options.say("flag tune: " + search_time_text(estimate.search))
        if estimate.untimed:
            options.say(
                ngettext(
                    "{count:,} candidate of {total:,} has no predicted time, and is listed last: {reason}.",
                    "{count:,} candidates of {total:,} have no predicted time, and are listed last: {reason}.",
                    estimate.untimed,
                    total=estimate.counts.untried,
                    reason=estimate.no_time,
                )
            )


def _number(explain: str | None) -> int:
    """Return the number of the candidate to explain; 0 for the baseline, or without a candidate."""
    if explain in (None, "baseline"):
        return 0
    if not str(explain).isdecimal() or not 1 <= int(str(explain)) <= MAX_EXPLAINED:
        raise click.UsageError(_("--explain {id}: expected the number of a candidate, or baseline", id=explain))
    return int(str(explain))


def _show(record: dict[str, Any], title: str, form: str, knobs: Knobs, labels: Labels) -> None:
    """Print one prediction in detail, as text or as a record."""
    from flagcore.report.explanation import notes_text, prediction_text
    from flagcore.report.formats import hardware_text
    from flagcore.report.text import values_text

    if form != "table":
        options.show_record(record, form)
        return
    if "candidate" in record:
        settings_and_assumed = {**record.get("settings", {}), **record.get("assumed", {})}
        settings = [f"{key}={value}" for key, value in settings_and_assumed.items() if value not in (False, 0)]
        values = filter(None, [values_text(record["candidate"], knobs), *settings])
        hardware = hardware_text(record["devices"], record["chip"])
        heading = _("{title} on {hardware}: {values}", title=title, hardware=hardware, values=", ".join(values))
        options.show(f"{heading}\n")
    options.show("\n\n".join(filter(None, [prediction_text(record, labels), notes_text(record.get("notes", ()))])))


def _is_pipe(file: str) -> bool:
    """Return whether a file is a pipe, whose writer may wait for each prediction before it writes the next line."""
    try:
        mode = os.fstat(0).st_mode if file == "-" else os.stat(file).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode)


MAX_EXPLAINED = 100_000


def _records(file: str) -> Iterator[Any]:
    """Yield the record of each line, or its error. Raises UsageError for an empty file."""
    from flagcore.errors import UsageError
    from flagcore.spec import read_job_lines

    name = "stdin" if file == "-" else file
    try:
        with open(0, "rb", closefd=False) if file == "-" else Path(file).open("rb") as stream:
            lines = read_job_lines(stream, file=name)
            first = next(lines, None)
            if first is None:
                raise UsageError(_("{file} is empty: expected one JSON object per line", file=name))
            yield from chain([first], lines)
    except OSError as error:
        raise UsageError(_("cannot read {file}: {reason}", file=file, reason=error.strerror or error)) from None
