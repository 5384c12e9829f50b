"""flag completion, devices, schema and doctor."""

from __future__ import annotations

import json

import click

from flagcore.cli import options


@click.command("devices")
@options.output
@options.plugins
def devices_command(form: str, without: tuple[str, ...]) -> None:
    """List the accelerators of this machine and what plugins know of them."""
    from flagcore import api
    from flagcore.report.formats import render

    columns = {
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
    options.show(render(options.in_one(api.devices(without), form, "aliases"), form, columns), form)


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a spec, for editors and checkers."""
    from flagcore.plugins import ENGINES
    from flagcore.spec import json_schema

    click.echo(json.dumps(json_schema(ENGINES), indent=2))


@click.command("doctor")
@options.output
def doctor_command(form: str) -> None:
    """Tell what is installed, what is missing for which engine, and what mends it."""
    from flagcore import api
    from flagcore.report.formats import render

    columns = {"what": "name", "for": "for", "version": "version", "ok": "ok", "to mend it": "mend"}
    options.show(render(api.doctor(), form, columns), form)


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion_command(shell: str) -> None:
    """Print what makes SHELL complete flag's commands, options and files.

    For this shell: eval "$(flag completion bash)"; for all to come, put that line into ~/.bashrc, or the output into a
    file that the shell reads.
    """
    from click.shell_completion import get_completion_class

    from flagcore.cli.main import flag

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    click.echo(kind(flag, {}, "flag", "_FLAG_COMPLETE").source())
