"""The commands flag tune, run, runs, report and export."""

import json
import logging
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from flagcore import api
from flagcore.cli import options
from flagcore.domain.files import write
from flagcore.errors import HostLost, Interrupted
from flagcore.i18n import N_, _


def _watchers() -> Sequence[str]:
    from flagcore.plugins import WATCHERS, names

    return names(WATCHERS)


@click.command("tune")
@options.tree
@options.model
@options.rate
@click.option("--run-dir", type=click.Path(), metavar="DIR", help="Directory of the run [default: runs/NAME-OF-SPEC].")
@click.option("--new", is_flag=True, help="Start a new run; an existing one is renamed, not deleted.")
@click.option("--storage", metavar="URL", help="Optuna storage for the trials [default: journal in the run].")
@click.option(
    "--fidelity",
    type=click.Choice(("estimate", "schedule", "probe", "run")),
    help="Predict only, ask the engine's scheduler, probe ranks, or run [default: as in SPEC, else run].",
)
@click.option("--max-trials", metavar="N", help="Maximum number of trials.")
@click.option("--time", "max_time", metavar="TIME", help="Time limit of the whole search, such as 30min or 2h.")
@click.option("--no-answers", is_flag=True, help="Recommend candidates whose answers were not checked.")
@click.option("--dry-run", is_flag=True, help="Check what is needed, and print the first candidates; start nothing.")
@options.settings(waits=False)
@options.chip(N_("Tune for this chip instead of the one in the spec."))
@options.objective
@click.option(
    "--watch",
    multiple=True,
    metavar="NAME",
    shell_complete=options.completing(_watchers),
    help="Send events to a watcher (repeatable).",
)
@click.option("-v", "--verbose", is_flag=True, help="Show why each trial was chosen, and its log file.")
@options.formats
@options.plugins
def tune_command(
    spec: Any,
    chip: str | None,
    verbose: bool,
    form: str,
    max_trials: str | None,
    max_time: str | None,
    no_answers: bool,
    dry_run: bool,
    **given: Any,
) -> None:
    """Find the fastest configuration for SPEC, or for --model, by running candidates.

    An interrupted run is resumed: finished trials are never repeated. A run can also be resumed with more trials or
    time, or at a higher fidelity, which reuses its probes.

    A config of another tuner (--config-path, --config-name) may replace SPEC; OVERRIDES are those of hydra (a.b=c,
    action=auto_tune). Keys that are dropped, or have another meaning here, are reported.
    """
    from flagcore.cli.progress import progress
    from flagcore.report.formats import fitted

    if spec is None:
        raise click.UsageError(_("Missing argument") + " 'SPEC'.")
    if chip is not None:
        spec = api.changed_spec(spec, {"cluster.chip": chip})
    limits = {"max_trials": max_trials, "max_time": max_time, "answers": "null" if no_answers else None}
    if changes := [f"auto_tuner.control.{key}={value}" for key, value in limits.items() if value is not None]:
        spec = api.with_settings(spec, changes)
    if verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("flagcore").setLevel(logging.INFO)
    if dry_run:
        _show_dry_run(spec, form, {key: given[key] for key in ("without", "fidelity", "objective")})
        return
    try:
        with fitted(None), progress(sys.stderr, options.is_quiet(), verbose) as on_event:  # wide tables in files
            outcome = api.tune(spec, on_event=on_event, **given)
    except (Interrupted, HostLost) as error:
        command = shlex.join(["flag", *(word for word in click.get_current_context().obj if word != "--new")])
        error.args = (_("{error}; resume with `{command}`", error=error, command=command),)
        raise
    _show_outcome(outcome, form)
    _print_next_steps(outcome.run_dir, outcome.reported, outcome.can_start)
    if outcome.run_best:
        api.run_best(outcome.run_dir, stdout=2, on_ready=_ready)


def _show_outcome(outcome: "api.Outcome", form: str) -> None:
    from flagcore.report.formats import table_columns
    from flagcore.report.text import candidate_columns

    if form == "table":
        options.show(str(outcome))
    elif form == "json":
        options.show(json.dumps(outcome.data, indent=1, ensure_ascii=False), form)
    else:
        trials = outcome.data["trials"]
        figures = "trials_serving" if any((each["measured"] or {}).get("figures") for each in trials) else "trials"
        columns = {"trial": "number", **candidate_columns(trials, outcome.plan.knobs), **table_columns(figures)}
        options.show_records([outcome.data] if form == "yaml" else trials, form, columns)


def _show_dry_run(spec: Any, form: str, given: dict[str, Any]) -> None:
    from flagcore.report.estimate import estimate_columns
    from flagcore.report.text import record_line, search_time_text

    plan = api.dry_run(spec, **given)
    if form != "table":
        options.show_records(plan.candidates, form, estimate_columns(plan))
        return
    options.show(record_line(_("baseline"), plan.baseline, plan.knobs) + f"\n\n{plan}")
    options.say("\n" + (search_time_text(plan.search) if plan.search else ""))


@click.command("run")
@click.argument("run", type=click.Path(), metavar="RUN|MODEL")
@click.option("--port", type=click.IntRange(1, 65000), help="Port of the servers [default: 8000].")
@click.option("--dry-run", is_flag=True, help="Print the script that would start, and start nothing.")
@click.option("--restarts", type=click.IntRange(0, 1000), default=0, help="Start training again after failures.")
@click.option("--spares", default="", metavar="HOSTS", help="Hosts that replace lost ones, separated by commas.")
@click.option("--stall", type=options.Seconds(1), help="Time without output after which a job hangs [default: 30min].")
@options.chip(N_("Serve MODEL on this chip, as predicted; auto: the chip of this machine."))
@click.option("--engine", metavar="NAME", help="Serve MODEL with this engine [default: the first that can start].")
@options.quiet
def run_command(run: str, chip: str | None, engine: str | None, spares: str, **given: Any) -> None:
    """Start the best configuration of RUN (the directory of a run) in the foreground.

    Your `train.command` replaces this process, without the flags that shorten a trial. Without it, the full command of
    the engine is printed, for you to complete (exit code 2). With --restarts, training goes on from its last checkpoint
    after it fails or hangs, with spares in the places of lost hosts. Servers run as child processes. Their URL is
    printed when they are ready, and they stop with this process. With --chip or --engine, MODEL (the path of weights)
    is planned and served.
    """
    given |= {"on_ready": _ready, "spares": [*filter(None, spares.split(","))]}
    if chip is None and engine is None:
        api.run_best(run, **given)
    if given["dry_run"] or given["restarts"] or spares:
        raise click.UsageError(_("--dry-run, --restarts and --spares are for runs, --chip and --engine for weights"))
    if not Path(run).exists():
        raise click.UsageError(_("{run} does not exist: give the path of weights; nothing is downloaded", run=run))
    with tempfile.TemporaryDirectory() as folder:
        planned = Path(folder, Path(run).name)
        with options.patience(_("flag: predicting the candidates")):
            api.plan_server(run, planned, chip=None if chip == "auto" else chip, engine=engine)
        options.say("".join(each.read_text("utf-8") for each in sorted(planned.rglob("*.sh"), reverse=True)))
        api.run_best(planned, **given)


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE", help="Output file, - for stdout [default: report.html in RUN].")
@options.plugins
def report_command(run: Path, output: str | None, without: tuple[str, ...]) -> None:
    """Write the report of RUN (the directory of a run) as one page that opens offline.

    It shows the best configuration and its uncertainty, the search space, the search, predicted against measured,
    memory, time, the bottleneck, the influence of each knob, every trial with the end of its logs, and the facts of the
    chip. Works during a run, too.
    """
    text = api.report(run, without=without)
    if output == "-":
        click.echo(text, nl=False)
        return
    if output:
        options.write_file(Path(output), text)
    else:
        write(run / api.REPORT, text, fix=_("use -o for another file"))
    options.show(output or str(run / api.REPORT), "path")


def _print_next_steps(folder: Path, reported: bool, can_start: bool) -> None:
    lines = [_("Saved to {folder}.", folder=folder)]
    if reported:
        lines.append(_("Report: open {file}", file=folder / api.REPORT))
    if can_start:
        lines.append(_("Start the best configuration: {command}", command=f"flag run {folder}"))
    elif (script := folder / "best.sh").exists():
        text = N_("To start the best configuration, complete {file}, or write other files: {command}")
        lines.append(_(text, file=script, command=f"flag export {folder} --to ..."))
    else:
        lines.append(_("The best configuration cannot be started here; `flag run {folder}` says why.", folder=folder))
    options.say("\n".join(lines))


def _ready(url: str) -> None:
    options.say(_("flag: ready at {url}", url=url))


class _Export(click.Command):
    """The command `flag export`, whose help lists the targets of all installed engines, launchers and importers."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the targets of `--to`. They are looked up only here, because this loads them."""
        with formatter.section(_("Targets")):
            formatter.write_text(", ".join(api.export_targets()))


@click.command("export", cls=_Export)
@click.argument("spec", required=False, type=click.Path(), metavar="[RUN|SPEC]")
@click.argument("candidate", nargs=-1, metavar="[CANDIDATE]...")
@options.model
@options.rate
@click.option(
    "--to",
    "target",
    default="",
    metavar="TARGET",
    shell_complete=options.completing(lambda: api.export_targets()),
    help="What starts the candidate: one of the targets below.",
)
@click.option("-o", "--output", metavar="DIR", help="Folder, - for stdout [default: NAME-TARGET].")
@click.option("--name", help="Name of the job and of its files [default: name of the file or directory].")
@click.option("--image", help="Container image with the program of the candidate, for kubernetes, dynamo and compose.")
@click.option(
    "--kind", type=click.Choice(("jobset", "pytorchjob", "volcano")), help="Kind of a Kubernetes job [default: jobset]."
)
@click.option("--replicas", type=click.IntRange(1), help="Copies of a server, for kubernetes and dynamo [default: 1].")
@click.option("--restarts", type=click.IntRange(0, 1000), help="Start training again after up to this many failures.")
@options.pods
@options.settings()
@options.chip()
@options.quiet
@options.plugins
def export_command(spec: Any, candidate: tuple[str, ...], target: str, output: str | None, **given: Any) -> None:
    """Write files that start a candidate of RUN, or of SPEC or --model as a plan.

    CANDIDATE has the same form as for `flag explain` [default: best]. The paths of the files are printed.
    """
    names = ("image", "kind", "volume", "queue", "rdma", "user", "pods", "replicas", "resource", "restarts")
    given["options"] = {name: str(value) for name in names if (value := given.pop(name)) is not None}
    if spec is None:
        raise click.UsageError(_("one of SPEC, RUN and --model is required"))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "-") if output == "-" else output
        exported = api.export(spec, target, ", ".join(candidate) or "best", output=place, **given)
        if output == "-" and len(exported.files) > 1:
            raise click.UsageError(_("--to {target} writes several files: use a folder", target=target))
        for file in exported.files:
            if output == "-":
                click.echo(file.read_text("utf-8", errors="surrogateescape"), nl=False)
            else:
                options.show(str(file), "path")
    for note in exported.notes:
        options.say(f"flag: {note}")


@click.group("runs", cls=options.Group)
def runs_command() -> None:
    """List or show runs (the directories that `flag tune` writes). Without a command, list them."""


@runs_command.command("list")
@click.argument("folder", type=click.Path(path_type=Path), required=False, metavar="[DIR]")
@options.output
def runs_list(folder: Path | None, form: str) -> None:
    """List the runs in DIR [default: runs], the latest first."""
    from flagcore.api.runs import UNMEASURED
    from flagcore.report.run import run_rows

    with options.patience(_("flag: reading the runs")):
        records = api.list_runs(folder or api.RUNS) if folder or api.RUNS.exists() else []
    if form == "table" and not records:
        options.say(_("no run in {folder}; `flag tune` creates one", folder=folder or api.RUNS))
        return
    options.show_records(run_rows(records) if form == "table" else records, form, "runs")
    for each in records if form == "table" else ():
        if each["state"] == UNMEASURED:
            options.say(f"{each['run']}: {each['no_best']}")


@runs_command.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@options.output
@options.plugins
def runs_show(run: Path, form: str, without: tuple[str, ...]) -> None:
    """Show the best configuration of RUN and all trials, as `flag tune` does at its end. Works during a run, too."""
    data, text = api.show_run(run, without)
    if form == "table":
        options.show(text)
    elif form in ("json", "jsonl"):
        options.show(json.dumps(data, indent=1 if form == "json" else None, ensure_ascii=False), form)
    else:
        options.show_records([data] if form == "yaml" else data["trials"], form, "trials")
