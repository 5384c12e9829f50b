"""flag devices, plugins, schema and doctor."""

from __future__ import annotations

import json
from typing import Any

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
    click.echo(render(_in_one(api.devices(without), form, "aliases"), form, columns))


@click.group("plugins")
def plugins_command() -> None:
    """Look at the installed plugins, and at the chips that they know."""


@plugins_command.command("list")
@options.output
@options.plugins
def plugins_list(form: str, without: tuple[str, ...]) -> None:
    """List every plugin with its chips; one that failed with the reason.

    Maturity is the best that a plugin's word stands on: hardware that it was run on, transcripts of tools, documents.
    """
    from flagcore import api
    from flagcore.report.formats import render

    records = api.plugin_table(without)
    columns = {
        "plugin": "name",
        "distribution": "distribution",
        "version": "version",
        "status": "status",
        "maturity": "maturity.word",
        "chips": "chips",
        "problem": "problem",
    }
    click.echo(render(_in_one(records, form, "chips", " "), form, columns))


@plugins_command.command("chips")
@options.output
@options.plugins
def plugins_chips(form: str, without: tuple[str, ...]) -> None:
    """List every chip that can be planned for, with its aliases and figures."""
    from flagcore import api
    from flagcore.report.formats import render

    columns = {
        "chip": "chip",
        "plugin": "plugin",
        "memory GiB": "memory_gib",
        "GB/s": "memory_gbytes_per_second",
        "peak TFLOP/s": "peak_tflops",
        "precision": "peak_precision",
        "devices/node": "devices_per_node",
        "devices/card": "devices_per_card",
        "link": "link",
        "link GB/s": "link_gbytes_per_second",
        "host GB/s": "host_gbytes_per_second",
        "nic GB/s": "nic_gbytes_per_second",
        "aliases": "aliases",
    }
    click.echo(render(_in_one(api.chip_table(without), form, "aliases"), form, columns))


def _in_one(records: list[dict[str, Any]], form: str, key: str, between: str = ", ") -> list[dict[str, Any]]:
    """Return records whose list under `key` is one text, if they are to have columns."""
    if form not in ("table", "csv"):
        return records
    return [{**record, key: between.join(record[key])} for record in records]


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a spec, for editors and checkers."""
    from flagcore.spec import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


@click.command("doctor")
@options.output
def doctor_command(form: str) -> None:
    """Tell what is installed, what is missing for which engine, and what mends it."""
    from flagcore import api
    from flagcore.report.formats import render

    columns = {"what": "name", "for": "for", "version": "version", "ok": "ok", "to mend it": "mend"}
    click.echo(render(api.doctor(), form, columns))
