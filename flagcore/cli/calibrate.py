"""flag calibrate."""

from __future__ import annotations

import math

import click

from flagcore.cli import options


def _finite(context: click.Context, option: click.Parameter, value: float) -> float:
    """Return a number that is one: a range does not stop nan."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no length of time", context, option)
    return value


@click.command("calibrate")
@click.option(
    "--seconds",
    type=click.FloatRange(5.0, 3600.0),
    default=90.0,
    show_default=True,
    callback=_finite,
    help="How long to measure, about.",
)
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Measure on N devices only [default: all].")
@click.option("--list", "listed", is_flag=True, help="List what is kept; measure nothing.")
@click.option(
    "--forget", metavar="CHIP", help="Delete what is kept for CHIP, experience of its trials too; measure nothing."
)
@options.output
@options.plugins
def calibrate_command(
    seconds: float, devices: int | None, listed: bool, forget: str | None, form: str, without: tuple[str, ...]
) -> None:
    """Measure the devices of this machine, so that predictions fit them.

    Matrix products, attention, memory, launches, copies to the host and, with several devices, collectives. What was
    measured is kept for the chip, its driver and the version of torch, and used by every later prediction.
    """
    from flagcore import api
    from flagcore.report.formats import render

    if listed and forget is not None:
        raise click.UsageError("give either --list or --forget")
    if forget is not None:
        options.say("\n".join(f"deleted {file}" for file in api.forget(forget)))
        return
    if listed:
        options.show(render(api.calibrations(), form, KEPT_COLUMNS), form)
        return
    made, file = api.calibrate(
        seconds=seconds, devices=devices, without=without, on_start=lambda line: options.say(f"flag: {line}")
    )
    short = form in ("table", "csv")
    options.show(render(api.summary(made) if short else [dict(row) for row in made.rows], form, SUMMARY_COLUMNS), form)
    options.say(f"Kept in {file}; predictions for {made.chip} use it from now on.")


KEPT_COLUMNS = {
    "chip": "chip",
    "devices": "devices",
    "torch": "torch",
    "driver": "driver",
    "date": "date",
    "kernels": "kernels",
    "collectives": "collectives",
    "file": "file",
}
SUMMARY_COLUMNS = {"what": "what", "measured": "measured", "best": "best", "unit": "unit", "spread %": "spread_percent"}
