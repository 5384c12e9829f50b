"""flag tune and run."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from flagcore.cli import options


@click.command("tune")
@options.tree
@click.option("--run-dir", type=click.Path(), metavar="DIR", help="Where the run is kept [default: runs/NAME-OF-SPEC].")
@click.option("--new", is_flag=True, help="Start afresh; an earlier run there is moved aside, not deleted.")
@click.option("--storage", metavar="URL", help="Keep the trials in this optuna storage instead of the run's journal.")
@click.option(
    "--fidelity",
    type=click.Choice(("estimate", "probe", "run")),
    help="Predict only, probe ranks on one device, or run [default: the spec's, else run].",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Tell why each trial is chosen, and where its log is.")
@options.output
@options.plugins
def tune_command(
    source: tuple[str | None, dict[str, Any] | None],
    run_dir: str | None,
    new: bool,
    storage: str | None,
    fidelity: str | None,
    quiet: bool,
    verbose: bool,
    form: str,
    without: tuple[str, ...],
) -> None:
    """Find the fastest configuration for SPEC by running candidates for real.

    Started again, it goes on where it was: a finished trial is never repeated. It may go on at a higher fidelity: what
    was probed is used by the runs.

    With --config-path and --config-name it takes a tree of FlagScale's as it is; OVERRIDES are hydra's (a.b=c,
    action=auto_tune). Keys that mean something else here, or nothing, are told.
    """
    from flagcore import api
    from flagcore.cli.progress import progress
    from flagcore.report.formats import fitted, render
    from flagcore.report.text import candidate_columns

    spec, data = source
    if spec is None:
        raise click.UsageError("Missing argument 'SPEC'.")
    with fitted(None), progress(sys.stderr, quiet, verbose) as on_event:  # what is kept is whole
        found = api.tune(
            spec,
            run_dir=run_dir,
            new=new,
            without=without,
            storage=storage,
            fidelity=fidelity,
            on_event=on_event,
            data=data,
        )
    if form == "table":
        options.show(str(found))
    elif form == "json":
        click.echo(json.dumps(found.data, indent=1, ensure_ascii=False))
    else:
        trials = found.data["trials"]
        figures = SERVED_COLUMNS if any((each["measured"] or {}).get("figures") for each in trials) else TRIAL_COLUMNS
        columns = {"trial": "number", **candidate_columns(trials), **figures}
        options.show(render([found.data] if form == "yaml" else trials, form, columns), form)
    if not quiet:
        start = f"start the best with `flag run {found.run_dir}`" if found.can_start else "best.sh says what it lacks"
        page = f"look at {found.run_dir / api.REPORT}; " if found.reported else ""
        options.say(f"Kept in {found.run_dir}; {page}{start}.")
    if found.run_best:
        api.run_best(found.run_dir, stdout=2, on_ready=_ready)


@click.command("run")
@click.argument("run", type=click.Path())
def run_command(run: str) -> None:
    """Start the best configuration that RUN (a run's folder) found, for real, in the foreground.

    This process becomes it. flagcore's own trial program trains `train_iters` steps on generated tokens; a
    `train.command` of yours is started without the flags that cut a trial short.

    Servers are started beside this process, which says when and where they are ready; they end with it, however it
    ends.
    """
    from flagcore import api

    api.run_best(run, on_ready=_ready)


def _ready(url: str) -> None:
    options.say(f"flag: ready at {url}")


SERVED_COLUMNS = {
    "state": "state",
    "output tok/s": "measured.figures.output_tokens_per_s",
    "req/s": "measured.figures.requests_per_s",
    "TTFT p50 s": "measured.figures.ttft_s.p50",
    "TTFT p99 s": "measured.figures.ttft_s.p99",
    "TPOT p50 s": "measured.figures.tpot_s.p50",
    "TPOT p99 s": "measured.figures.tpot_s.p99",
    "e2e p99 s": "measured.figures.e2e_s.p99",
    "~objective": "predicted.objective.value",
    "reason": "reason",
}
TRIAL_COLUMNS = {
    "state": "state",
    "step s": "measured.step_time_s.median",
    "spread": "measured.step_time_s.spread",
    "~step s": "predicted.step_time_s.value",
    "tok/s/dev": "measured.tokens_per_second_per_device",
    "GiB": "measured.device_used_gib",
    "reason": "reason",
}
