"""flag operators."""

import click

from flagcore.cli import options
from flagcore.errors import UsageError
from flagcore.i18n import N_, _

COLUMNS = {
    "operator": "operator",
    "calls": "calls",
    "default": "default",
    "default s": "default_s",
    "fastest": "chosen",
    "fastest s": "chosen_s",
    "excluded": "excluded",
}
"""The columns of the table: headings, and fields of `Chosen`. Times are those of all calls of the recorded run."""


@click.command("operators")
@click.argument("spec", required=False, type=click.Path())
@options.settings(waits=False)
@click.option("--library", metavar="NAME", help=N_("Library of operators [default: the one that the job can use]."))
@click.option(
    "--seconds",
    type=options.Seconds(10.0, 3600.0),
    default=600.0,
    show_default=True,
    help=N_("Time limit of the benchmark of operators."),
)
@click.option("--list", "listed", is_flag=True, help=N_("List saved choices and exit."))
@options.output
@options.plugins
def operators_command(
    spec: str | None, library: str | None, seconds: float, listed: bool, form: str, without: tuple[str, ...]
) -> None:
    """Find the fastest implementation of each operator that the job of SPEC calls.

    Runs the baseline of SPEC to record its operators, compares the results of their implementations with a reference,
    and times them. The choice is saved; the knob LIBRARY_operators compares it with the library's defaults.
    """
    from flagcore_vendorkit.choices import choices

    from flagcore_operators.measuring import calibrate_operators  # `flag --help` imports little

    if listed:
        names = ("knob", "chip", "engine", "job", "date")
        saved = choices(options.say)
        records = [{**{name: getattr(each, name) for name in names}, "file": str(path)} for path, each in saved]
        options.show_records(records, form, {name: name for name in (*names, "file")})
        return
    if spec is None:
        raise UsageError(_("give SPEC, whose job calls the operators"))
    choice, file = calibrate_operators(
        spec, library=library, seconds=seconds, without=without, on_start=lambda line: options.say(f"flag: {line}")
    )
    rows = [dict(row) for row in choice.rows]
    for row in rows if form in ("table", "csv") else ():
        row["excluded"] = "; ".join(f"{name}: {why}" for name, why in row["excluded"].items())
    options.show_records(rows, form, COLUMNS)
    if not choice.environment:
        options.say(_("The defaults are the fastest; saved to {file}.", file=file))
        return
    text = N_("About {percent:.1f}% less time. Saved to {file}. Compare it in trials: flag tune {spec} --set {setting}")
    setting = f"auto_tuner.space.{choice.knob}=auto"
    options.say(_(text, percent=100.0 * (1.0 - choice.time[0]), file=file, spec=choice.job, setting=setting))
