"""flag calibrate."""

import math

import click

from flagcore.cli import options
from flagcore.errors import UsageError
from flagcore.i18n import N_, _


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Reject nan, which every range check accepts."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(_("{value} is not a number of seconds", value=value), context, option)
    return value


@click.command("calibrate")
@click.option(
    "--seconds",
    type=options.Seconds(5.0, 3600.0),
    callback=_finite,
    help=N_("Approximate duration [default: 90, or 600 with --collectives]."),
)
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Number of devices [default: all].")
@click.option(
    "--collectives",
    "spec",
    metavar="SPEC",
    type=click.Path(),
    help=N_("Instead, compare variables of the collective library at the sizes of this job."),
)
@click.option("--rounding", is_flag=True, help=N_("Also use values with which sums are rounded differently."))
@click.option("--list", "listed", is_flag=True, help="List saved calibrations and exit.")
@options.output
@options.plugins
def calibrate_command(
    seconds: float | None,
    devices: int | None,
    spec: str | None,
    rounding: bool,
    listed: bool,
    form: str,
    without: tuple[str, ...],
) -> None:
    """Measure the devices of this machine to improve predictions.

    Measures matrix products, attention, memory, kernel launches, copies to the host and, with several devices,
    collectives. The result is saved per chip, driver and version of torch, and used by all later predictions.

    With --collectives, the fastest right values of the variables that the chip's plugin lists are saved; the knob
    `collectives` compares them with the library's defaults.
    """
    from flagcore_vendorkit.calibration import measuring  # `flag --help` imports little

    if spec and devices:
        raise UsageError(_("--collectives uses the devices of SPEC: leave --devices out"))
    if rounding and not spec:
        raise UsageError(_("--rounding needs --collectives"))
    if listed:
        options.show_records(measuring.calibrations(), form, "calibrations")
    elif spec is not None:
        _compare(spec, seconds, rounding, form, without)
    else:
        calibration, file = measuring.calibrate(
            seconds=seconds or measuring.SECONDS,
            devices=devices,
            without=without,
            on_start=lambda line: options.say(f"flag: {line}"),
        )
        records = measuring.summary(calibration) if form in ("table", "csv") else calibration.rows
        options.show_records(records, form, "benchmarks")
        options.say(_("Saved to {file}; used by all predictions for {chip}.", file=file, chip=calibration.chip))


def _compare(spec: str, seconds: float | None, rounding: bool, form: str, without: tuple[str, ...]) -> None:
    from flagcore_vendorkit.calibration import collectives

    choice, file = collectives.calibrate_collectives(
        spec,
        seconds=seconds or collectives.SECONDS,
        rounding=rounding,
        without=without,
        on_start=lambda line: options.say(f"flag: {line}"),
    )
    options.show_records(choice.rows, form, {name: name for name in ("setting", "time", "excluded")})
    if not choice.environment:
        options.say(_("The defaults are the fastest; saved to {file}.", file=file))
        return
    text = N_(
        "Collectives take {percent:.1f}% less time. Saved to {file}. "
        "Compare it in trials: flag tune {spec} --set {setting}"
    )
    setting = f"auto_tuner.space.{choice.knob}=auto"
    options.say(_(text, percent=100.0 * (1.0 - choice.time[0]), file=file, spec=spec, setting=setting))
