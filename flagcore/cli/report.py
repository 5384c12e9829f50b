"""flag report."""

from __future__ import annotations

from pathlib import Path

import click

from flagcore.cli import options
from flagcore.i18n import _


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(("html", "markdown")), default="html", help="[default: html]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Output file, - for stdout [default: report.html in RUN; stdout for Markdown].",
)
@options.plugins
def report_command(run: Path, form: str, output: str | None, without: tuple[str, ...]) -> None:
    """Write the report of RUN (the directory of a run) as one page that opens offline.

    It shows the best configuration and its uncertainty, the search space, the search, predicted against measured,
    memory, time, the bottleneck and the knobs that help, every trial with the end of its logs, and the facts of the
    chip. Works during a run, too.
    """
    from flagcore import api

    text = api.report(run, form, without=without)
    file = output or (str(run / api.REPORT) if form == "html" else "-")
    if file == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(file).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise click.UsageError(_("cannot write {file}: {reason}", file=file, reason=error.strerror or error)) from None
    click.echo(file)
