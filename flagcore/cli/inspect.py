"""flag completion, devices, schema and doctor."""

from __future__ import annotations

import json

import click

from flagcore.cli import options

DEVICE_COLUMNS = {
    "index": "index",
    "name": "name",
    "chip": "chip",
    "plugin": "plugin",
    "memory GiB": "memory_gib",
    "peak TFLOP/s": "peak_tflops",
    "precision": "peak_precision",
    "source": "peak_source",
    "driver": "driver",
    "aliases": "aliases",
}
DOCTOR_COLUMNS = {"name": "name", "needed for": "for", "version": "version", "ok": "ok", "fix": "mend"}


@click.command("devices")
@options.output
@options.plugins
def devices_command(form: str, without: tuple[str, ...]) -> None:
    """List the accelerators of this machine."""
    from flagcore import api
    from flagcore.report.formats import render

    options.show(render(options.joined(api.devices(without), form, "aliases"), form, DEVICE_COLUMNS), form)


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a spec, for editors and validators."""
    from flagcore.plugins import engines
    from flagcore.spec import json_schema

    click.echo(json.dumps(json_schema(engines()), indent=2))


@click.command("doctor")
@options.output
def doctor_command(form: str) -> None:
    """Check the installation: what is missing for which engine, and how to fix it."""
    from flagcore import api
    from flagcore.report.formats import render

    options.show(render(api.doctor(), form, DOCTOR_COLUMNS), form)


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
