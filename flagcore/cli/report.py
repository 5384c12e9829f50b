"""flag report."""

from __future__ import annotations

from pathlib import Path

import click

from flagcore.cli import options


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(("html", "markdown")), default="html", help="[default: html]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write there, - for stdout [default: report.html in RUN; Markdown to stdout].",
)
@options.plugins
def report_command(run: Path, form: str, output: str | None, without: tuple[str, ...]) -> None:
    """Tell all of a run: one page that opens offline, from RUN (a run's folder).

    The answer with its uncertainty, where all combinations went, how the search went, predicted against measured,
    memory, time, what limits the best and which knob would help, every trial with the end of its logs, and what is
    known of the chip. Works while the run goes on.
    """
    from flagcore import api

    text = api.report(run, form, without=without)
    where = output or (str(run / api.REPORT) if form == "html" else "-")
    if where == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(where).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise click.UsageError(f"{where} cannot be written: {error.strerror or error}") from None
    click.echo(where)
