"""flag calibrate."""

from __future__ import annotations

import math

import click

from flagcore.cli import options
from flagcore.i18n import _


def _finite(context: click.Context, option: click.Parameter, value: float) -> float:
    """Refuse nan, which is in every range."""
    if not math.isfinite(value):
        raise click.BadParameter(_("{value} is not a number of seconds", value=value), context, option)
    return value


@click.command("calibrate")
@click.option(
    "--seconds",
    type=click.FloatRange(5.0, 3600.0),
    default=90.0,
    show_default=True,
    callback=_finite,
    help="Approximate duration.",
)
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Number of devices [default: all].")
@click.option("--list", "listed", is_flag=True, help="List saved calibrations and exit.")
@click.option("--forget", metavar="CHIP", help="Delete calibrations and trial history of CHIP and exit.")
@options.output
@options.plugins
def calibrate_command(
    seconds: float, devices: int | None, listed: bool, forget: str | None, form: str, without: tuple[str, ...]
) -> None:
    """Measure the devices of this machine to improve predictions.

    Measures matrix products, attention, memory, kernel launches, copies to the host and, with several devices,
    collectives. The result is saved per chip, driver and version of torch, and used by all later predictions.
    """
    from flagcore import api
    from flagcore.report.formats import render

    if listed and forget is not None:
        raise click.UsageError(_("--list and --forget are mutually exclusive"))
    if forget is not None:
        options.say("\n".join(_("deleted {file}", file=file) for file in api.forget(forget)))
        return
    if listed:
        options.show(render(api.calibrations(), form, SAVED_COLUMNS), form)
        return
    made, file = api.calibrate(
        seconds=seconds, devices=devices, without=without, on_start=lambda line: options.say(f"flag: {line}")
    )
    short = form in ("table", "csv")
    options.show(render(api.summary(made) if short else [dict(row) for row in made.rows], form, SUMMARY_COLUMNS), form)
    options.say(_("Saved to {file}; used by all predictions for {chip}.", file=file, chip=made.chip))


SAVED_COLUMNS = {
    "chip": "chip",
    "devices": "devices",
    "torch": "torch",
    "driver": "driver",
    "date": "date",
    "kernels": "kernels",
    "collectives": "collectives",
    "file": "file",
}
SUMMARY_COLUMNS = {
    "benchmark": "what",
    "measured": "measured",
    "best": "best",
    "unit": "unit",
    "spread %": "spread_percent",
}
