"""The commands flag estimate, probe, explain and compare: predictions, and why a candidate wins or loses."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from flagcore import api
from flagcore.cli import options
from flagcore.errors import FlagError, NothingFits, UsageError
from flagcore.i18n import N_, _


@click.command("estimate")
@options.tree
@options.model
@options.rate
@click.option(
    "--jobs", type=click.Path(), metavar="FILE", help="Predict job records from a JSON Lines file (- for stdin)."
)
@options.settings()
@options.chip()
@options.objective
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Number of candidates to list.")
@click.option("--all", "every", is_flag=True, help="List every candidate, not only the fastest of each layout.")
@click.option("--evidence", is_flag=True, help="List the published runs on this chip, measured and predicted.")
@click.option("--explain", metavar="ID", help="Show one candidate in detail, named as for `flag explain`.")
@click.option(
    "--like",
    metavar="NAME",
    help="Compare a layout with the best: of a published run, named by words of --evidence, or as knobs or flags.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the plan as a page with charts to FILE.",
)
@options.output
@options.plugins
def estimate_command(
    spec: Any, jobs: str | None, top: int, every: bool, explain: str | None, form: str, **arguments: Any
) -> None:
    """Predict memory and time of all candidates of SPEC, or of job records, without running anything.

    With --jobs, the predictions are JSON lines. A config of another tuner (--config-path, --config-name) may replace
    SPEC.
    """
    if (spec is None) == (jobs is None):
        raise click.UsageError(_("one of SPEC, --model and --jobs is required"))
    if spec is not None and os.fspath(spec).endswith(".jsonl"):
        raise click.UsageError(_("{file} looks like job records: use --jobs {file}", file=os.fspath(spec)))
    if spec is not None and explain is not None and form == "csv":
        raise click.UsageError(_("--explain does not support --format csv"))
    if jobs is not None:
        _estimate_jobs(jobs, form, arguments["without"])
        return
    spec = api.changed_spec(spec, {})  # read once: it may be stdin
    if arguments["chip"] is None:
        api.require_chip(spec)
    modes = (arguments["evidence"] or None, explain, arguments["like"], arguments["report"])
    if sum(each is not None for each in modes) > 1:
        raise click.UsageError(_("--evidence, --explain, --like and --report are mutually exclusive"))
    is_listed = every or click.get_current_context().get_parameter_source("top") is not ParameterSource.DEFAULT
    if is_listed and any(each is not None for each in modes[:3]):
        raise click.UsageError(_("--top and --all have no use with --evidence, --explain and --like"))
    by_engine = {} if any(each is not None for each in modes) else api.specs_by_engine(spec)
    if len(by_engine) < 2:
        _estimate_spec(spec, top, explain, form, distinct=not every and explain is None, **arguments)
        return
    kept = {key: arguments[key] for key in ("chip", "objective", "without")}
    _estimate_engines(by_engine, form, top=top, distinct=not every, **kept)


def _estimate_engines(specs: dict[str, api.LoadedSpec], form: str, **arguments: Any) -> None:
    """Print the plan of each engine, and then the recommended candidates side by side, the fastest first.

    An engine without a plan is skipped with a message. If there is no plan, the error of the last one is raised.
    """
    from flagcore.report.estimate import estimate_columns

    plans: dict[str, api.Estimate] = {}
    for name, spec in specs.items():
        try:
            plans[name] = api.estimate(spec, **arguments)
        except FlagError as error:
            if name == list(specs)[-1] and not plans:
                raise
            options.say(f"{name}: {error}")
            continue
        if form == "table":
            options.show(f"{name}:")
            _show_candidates(plans[name], form)
            options.show("")
    columns = {_("engine"): "engine"}
    for each in plans.values():
        columns |= {head: key for head, key in estimate_columns(each).items() if form != "table" or head[0] == "~"}
    seconds = {name: each.recommended.get("step_time_s", {"value": inf})["value"] for name, each in plans.items()}
    order = sorted(plans, key=lambda name: (plans[name].unmet != "", seconds[name]))
    shown = [(name, [plans[name].recommended] if form == "table" else plans[name].candidates) for name in order]
    options.show_records([{"engine": name, **each} for name, found in shown for each in found], form, columns)


def _estimate_jobs(jobs: str, form: str, without: tuple[str, ...]) -> None:
    """Print the prediction of each job record in a file as JSON lines. No other option is allowed."""
    context = click.get_current_context()
    allowed = {"jobs", "without", *(("form",) if form == "jsonl" else ())}
    for each in context.command.params:
        if each.name not in allowed and context.get_parameter_source(str(each.name)) is not ParameterSource.DEFAULT:
            text = N_("{option} requires SPEC: job records are predicted as they are, as JSON lines")
            raise click.UsageError(_(text, option=each.opts[0]))
    with options.language_of("jsonl"):
        at_once = 1 if _is_pipe(jobs) else api.AT_ONCE
        for prediction in api.estimate_jobs(_records(jobs), without=without, at_once=at_once):
            options.show(json.dumps(prediction, ensure_ascii=False, allow_nan=False), "jsonl")


def _estimate_spec(spec: str | api.LoadedSpec, top: int, explain: str | None, form: str, **arguments: Any) -> None:
    like, report = arguments.pop("like"), arguments.pop("report")
    on_page = None if report is None else partial(options.write_file, report)
    if (number := _number(explain)) is None or like is not None:
        objective = {"auto_tuner.objective": arguments["objective"]} if arguments["objective"] else {}
        report_on, name = (api.explain_candidate, str(explain)) if like is None else (api.explain_like, like)
        changed = api.changed_spec(spec, objective)
        _print(report_on(changed, name, chip=arguments["chip"], without=arguments["without"]), form)
        return
    is_shown = form == "table" and explain is None and not arguments["evidence"] and sys.stderr.isatty()
    on_first = options.say if is_shown else None
    start = _export_command if form == "table" or on_page else None
    estimate = api.estimate(spec, top=max(top, number), on_first=on_first, on_page=on_page, start=start, **arguments)
    if explain is not None:
        _show_candidate(estimate, number, explain, form)
    elif arguments["evidence"]:
        _show_evidence(estimate, form)
    else:
        _show_candidates(estimate, form)


def _show_candidates(estimate: api.Estimate, form: str) -> None:
    """Print the candidates and, in a table, what is known about them and the command that starts the best."""
    from flagcore.report.estimate import estimate_columns, estimate_texts

    if form != "table":
        if estimate.unmet:
            options.say(estimate.unmet)
        options.show_records(estimate.candidates, form, estimate_columns(estimate))
        return
    for text, is_result in estimate_texts(estimate):
        (options.show if is_result else options.say)(text)
    if estimate.target and (command := _export_command(estimate.target)):
        options.say("\n" + _("Start the recommended candidate: {command}", command=command))


def _show_candidate(estimate: api.Estimate, number: int, name: str, form: str) -> None:
    """Print a candidate in detail: one of the list by its number, the baseline (0) or the recommended one (PLAN)."""
    from flagcore.report.explanation import detail_text

    if number > len(estimate.candidates):
        count = len(estimate.candidates)
        raise click.UsageError(_("--explain {id}: there are {count} candidates", id=name, count=count))
    of_name = {PLAN: estimate.recommended, 0: estimate.baseline}
    record = of_name[number] if number in of_name else estimate.candidates[number - 1]
    details = {"chip": estimate.chip, "devices": estimate.devices, **record, "model": list(estimate.model)}
    details |= {"notes": list(estimate.notes)} if estimate.notes else {}
    if number == 0 and estimate.unmet:  # such as: it isn't the job's own layout, because that is predicted not to fit
        options.say(estimate.unmet)
    title = {PLAN: _("Recommended"), 0: _("Baseline")}.get(number) or _("Candidate {number}", number=number)
    if form == "table":
        options.show(detail_text(details, title, estimate.knobs, estimate.labels))
        if record.get("recommended") and estimate.expected:
            options.show("\n" + estimate.expected)
    else:
        options.show_record(details, form)


def _show_evidence(estimate: api.Estimate, form: str) -> None:
    """Print the published runs on the chip."""
    from flagcore.report.estimate import published_table
    from flagcore.report.formats import as_data

    runs: list[dict[str, Any]] = as_data(estimate.published)
    if form == "table" and not runs:
        options.say(_("no published run of such a job on {chip} is known", chip=estimate.chip))
    elif form == "table":
        options.show(published_table(estimate.published))
    else:
        options.show_records(runs, form, {name: name for name in runs[0]} if runs else {})


def _export_command(target: str) -> str:
    """Return the command that writes the script of the recommended candidate. Empty for a config of another tool."""
    if click.get_current_context().params["config_path"]:
        return ""
    return shlex.join(["flag", "export", *options.job_words(), "--to", target])


def _number(explain: str | None) -> int | None:
    """Return the number of the candidate to explain: 0 for the baseline or none, PLAN for the recommended one, and None
    for one named by its knobs."""
    if explain in (None, "baseline"):
        return 0
    name = str(explain).strip()
    if name in ("best", "recommended"):
        return PLAN
    if not name.lstrip("-").isdecimal():
        return None
    number = int(name[:10])
    if number < 1:
        raise click.UsageError(_("--explain {id}: expected the number of a candidate, or baseline", id=explain))
    return number


PLAN = -1


def _is_pipe(file: str) -> bool:
    """Return whether a file is a pipe. Its writer may wait for each prediction before it writes the next line."""
    try:
        mode = os.fstat(0).st_mode if file == "-" else os.stat(file).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode)


def _records(file: str) -> Iterator[Any]:
    """Yield the record of each line, or the line's error. Raises UsageError if the file is empty."""
    from flagcore.spec.jobs import read_job_lines

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


@click.command("probe")
@click.argument("spec", type=click.Path())
@click.option(
    "--candidate",
    metavar="ID",
    help="Candidate to probe: number in the list of `flag estimate`, baseline, or knobs as name=value,...",
)
@click.option(
    "--top",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Probe the N fastest predicted candidates.",
    metavar="N",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    metavar="R",
    help="Global rank to probe (repeatable) [default: the most informative ranks].",
)
@options.settings()
@options.chip(N_("Plan for this chip, which must be on this machine."))
@click.option(
    "--seconds",
    type=options.Seconds(min=1.0, max=86400.0),
    metavar="TIME",
    help="Time limit per candidate, such as 90 or 5min [default: control.max_time_per_task].",
)
@click.option("--folder", type=click.Path(), metavar="DIR", help="Save jobs and logs to DIR [default: not saved].")
@options.output
@options.plugins
def probe_command(spec: str, candidate: str | None, top: int, form: str, **arguments: Any) -> None:
    """Measure single ranks of candidates of SPEC on one device, for any number of devices in SPEC.

    One process runs the layers, micro-batches and optimizer of a rank of the full job. There are no other ranks, so
    communication is predicted, not measured.
    """
    from flagcore.report.estimate import probed_text
    from flagcore.report.formats import table_columns

    if candidate is not None and top != 1:
        raise click.UsageError(_("--candidate and --top are mutually exclusive"))
    arguments["on_rank"] = lambda line: options.say(f"flag: {line}")
    probes = api.probe(spec, candidate=candidate, top=top, **arguments)
    if form not in ("table", "csv"):
        options.show_records([each.as_data() for each in probes], form, {})
        return
    rows = [{"number": number, **rank} for number, each in enumerate(probes, start=1) for rank in each.ranks]
    columns = table_columns("probed")
    if len(probes) == 1:
        del columns["#"]
    options.show_records(rows, form, columns)
    if form == "table":
        for number, each in enumerate(probes, start=1):
            options.say("\n" + probed_text(number if len(probes) > 1 else None, each.as_data(), each.knobs))


@click.command("explain")
@click.argument("spec", required=False, metavar="[SPEC|RUN]", type=click.Path())
@click.argument("candidate", nargs=-1, metavar="[CANDIDATE]...")
@options.model
@options.rate
@options.settings()
@options.chip()
@options.output
@options.plugins
def explain_command(spec: Any, candidate: tuple[str, ...], form: str, **arguments: Any) -> None:
    """Explain how the search space of SPEC was reduced: each rule, and how many combinations it eliminated.

    With RUN (the directory of a run), explain the space at the end of that run. With CANDIDATE, explain that one: why
    it was eliminated, its prediction, and what would have to change. CANDIDATE is the number of a trial, best,
    baseline, or knobs as in tables: "tp=2, mbs=16, dist-opt".
    """
    from dataclasses import asdict

    from flagcore.report.explanation import eliminated, explanation_text

    if spec is None:
        raise click.UsageError(_("one of SPEC, RUN and --model is required"))
    if candidate:
        _print(api.explain_candidate(spec, ", ".join(candidate), **arguments), form)
        return
    explanation = api.explain(spec, **arguments)
    if form == "table":
        options.show(explanation_text(explanation))
    elif form == "csv":
        removed = eliminated(explanation)
        messages = explanation.messages.items()
        rows = [{"rule": rule, "removed": removed.get(rule, 0), "message": message} for rule, message in messages]
        options.show_records(rows, form, "eliminated")
    else:
        options.show_record(asdict(explanation), form)
    if explanation.nothing_fits:
        raise NothingFits(explanation.nothing_fits)


@click.command("compare")
@click.argument("names", nargs=-1, metavar="A B")
@click.option("--spec", type=click.Path(), metavar="SPEC", help="Compare two candidates of this spec.")
@options.settings()
@options.chip()
@options.output
@options.plugins
def compare_command(names: tuple[str, ...], form: str, **arguments: Any) -> None:
    """Compare two candidates: knobs, predicted time and memory, measurements, and why they differ.

    A and B are RUN:CANDIDATE, or RUN for its best. B may be CANDIDATE alone, of the same run. With --spec, both are
    CANDIDATE alone. CANDIDATE is as for `flag explain`.
    """
    if len(names) != 2:
        usage = "`flag compare RUN:best RUN:baseline`, `flag compare --spec SPEC 1 2`"
        raise click.UsageError(_("expected two candidates, got {count}: {usage}", count=len(names), usage=usage))
    _print(api.compare(*names, **arguments), form)


def _print(found: api.CandidateReport | api.Comparison, form: str) -> None:
    if form == "csv":
        raise click.UsageError(_("--format csv is not available for a report of candidates"))
    if form == "table":
        options.show(str(found))
    else:
        options.show_record(found.as_data(), form)
