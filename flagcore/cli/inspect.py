"""flag calibrate, completion, devices, doctor and schema."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from flagcore.cli import options
from flagcore.i18n import N_, _


@click.command("devices")
@options.output
@options.plugins
def devices_command(form: str, without: tuple[str, ...]) -> None:
    """List the accelerators of this machine."""
    from flagcore import api

    records = api.devices(without)
    for plugin in sorted({record["plugin"] for record in records}):
        chips = {record["chip"] or record["name"] for record in records if record["plugin"] == plugin}
        if len(chips) > 1:
            text = _("flag: {plugin} has devices of several chips ({chips}); cluster.chip selects one")
            options.say(text.format(plugin=plugin, chips=", ".join(sorted(chips))))
    tables = ("devices",) if options.is_fitted() else ("devices", "device_identity")
    options.show_records(options.joined(records, form, "aliases"), form, options.columns(*tables))


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a spec, for editors and validators."""
    from flagcore.plugins import engines
    from flagcore.spec import json_schema

    click.echo(json.dumps(json_schema(engines()), indent=2))


@click.command("doctor")
@click.option(
    "--hosts", type=click.Path(path_type=Path), help=N_("Check the hosts of this host file instead of this machine.")
)
@click.option("--launcher", default="ssh", show_default=True, help=N_("Launcher that connects to the hosts."))
@options.output
def doctor_command(hosts: Path | None, launcher: str, form: str) -> None:
    """Check the installation: what each engine lacks, and how to fix it."""
    from flagcore import api

    if hosts is not None:
        options.show_records(api.check_hosts(hosts, launcher), form, options.columns("hosts"))
        return
    options.show_records(api.doctor(), form, options.columns("doctor"))


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL.

    Enable it now: eval "$(flag completion bash)". To enable it permanently, add that line to ~/.bashrc.
    """
    from click.shell_completion import get_completion_class

    from flagcore.cli.main import flag

    kind = get_completion_class(shell)
    assert kind is not None, "click supports these shells"
    click.echo(kind(flag, {}, "flag", "_FLAG_COMPLETE").source())


def _finite(context: click.Context, option: click.Parameter, value: float) -> float:
    """Reject nan, which passes the check of every range."""
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

    if listed and forget is not None:
        raise click.UsageError(_("--list and --forget are mutually exclusive"))
    if forget is not None:
        options.say("\n".join(_("deleted {file}", file=file) for file in api.forget(forget)))
        return
    if listed:
        options.show_records(api.calibrations(), form, options.columns("calibrations"))
        return
    calibration, file = api.calibrate(
        seconds=seconds, devices=devices, without=without, on_start=lambda line: options.say(f"flag: {line}")
    )
    options.show_records(
        api.summary(calibration) if form in ("table", "csv") else calibration.rows, form, options.columns("benchmarks")
    )
    options.say(_("Saved to {file}; used by all predictions for {chip}.", file=file, chip=calibration.chip))
