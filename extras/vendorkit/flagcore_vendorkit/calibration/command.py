"""flag calibrate."""

import math

import click

from flagcore.cli import options
from flagcore.i18n import _


def _finite(context: click.Context, option: click.Parameter, value: float) -> float:
    """Reject nan, which every range check accepts."""
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
@options.output
@options.plugins
def calibrate_command(seconds: float, devices: int | None, listed: bool, form: str, without: tuple[str, ...]) -> None:
    """Measure the devices of this machine to improve predictions.

    Measures matrix products, attention, memory, kernel launches, copies to the host and, with several devices,
    collectives. The result is saved per chip, driver and version of torch, and used by all later predictions.
    """
    from flagcore_vendorkit.calibration.measuring import (  # `flag --help` imports little
        calibrate,
        calibrations,
        summary,
    )

    if listed:
        options.show_records(calibrations(), form, "calibrations")
        return
    calibration, file = calibrate(
        seconds=seconds, devices=devices, without=without, on_start=lambda line: options.say(f"flag: {line}")
    )
    options.show_records(summary(calibration) if form in ("table", "csv") else calibration.rows, form, "benchmarks")
    options.say(_("Saved to {file}; used by all predictions for {chip}.", file=file, chip=calibration.chip))
