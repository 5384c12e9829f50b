"""flag import: specs and trials out of other tuners' files."""

from __future__ import annotations

from pathlib import Path

import click

from flagcore.cli import options


@click.group("import")
def import_command() -> None:
    """Take over another tuner's files: its spec, or what it measured."""


@import_command.command("flagscale")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--config-name", required=True, metavar="NAME", help="The tree's top file, such as train_auto_tuner.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there [default: stdout].")
def flagscale_command(directory: Path, overrides: tuple[str, ...], config_name: str, output: Path | None) -> None:
    """Write the spec of a hydra tree of FlagScale's, its folder of conf files in DIR.

    OVERRIDES are hydra's (a.b=c). A comment stands at every key that means something else here, or is gone; the same is
    told on stderr. Relative paths in the tree start at the working directory, as for FlagScale.
    """
    from flagcore import api

    found = api.read_tree(directory, config_name, overrides)
    options.tell_notes(found.notes)
    if output is None:
        click.echo(found.as_yaml(), nl=False)
        return
    if output.exists():
        raise click.UsageError(f"{output} exists; give another file, or remove it")
    try:
        output.write_text(found.as_yaml(), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror}") from None


@import_command.command("flagscale-history")
@click.argument("csv", metavar="CSV", type=click.Path(path_type=Path))
@click.option("--spec", required=True, metavar="SPEC", help="The job that FlagScale tuned.")
@click.option("--run-dir", type=click.Path(), metavar="DIR", help="Where the run is kept [default: runs/NAME-OF-SPEC].")
@click.option("--same-machine", is_flag=True, help="The rows ran where `flag tune` will go on: do not repeat them.")
@options.output
@options.plugins
def history_command(
    csv: Path, spec: str, run_dir: str | None, same_machine: bool, form: str, without: tuple[str, ...]
) -> None:
    """Take the rows of FlagScale's history.csv as finished trials into a run.

    `flag tune SPEC --run-dir DIR` goes on from there. Rows that cannot be taken, and columns that mean nothing here,
    are told on stderr.
    """
    from flagcore import api
    from flagcore.report.formats import render
    from flagcore.report.result import trial as trial_record
    from flagcore.report.text import candidate_columns

    found = api.import_history(csv, spec, run_dir=run_dir, same_machine=same_machine, without=without)
    for note in found.notes:
        options.say(f"flag: {note}")
    records = [trial_record(trial) for trial in found.trials]
    columns = {"trial": "number", **candidate_columns(records), **HISTORY_COLUMNS}
    options.show(render(records, form, columns), form)
    how = "as trials of this machine" if same_machine else "as experience of another run"
    options.say(f"{len(found.trials)} rows are kept in {found.run_dir}, {how}.")


HISTORY_COLUMNS = {
    "state": "state",
    "step s": "measured.step_time_s.median",
    "~step s": "predicted.step_time_s.value",
    "output tok/s": "measured.figures.output_tokens_per_s",
    "reserved GiB": "measured.peak_reserved_gib",
    "reason": "reason",
}
