"""flag plugins: what is installed, whether it keeps to its promises, and the start of a new one."""

from __future__ import annotations

import json
from typing import Any

import click

from flagcore.cli import options


@click.group("plugins")
def plugins_command() -> None:
    """Look at the installed plugins and their chips, check them, and start a new one."""


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
    if any(record["warnings"] for record in records):
        columns["warnings"] = "warnings"
    told = options.in_one(options.in_one(records, form, "chips", " "), form, "warnings", "; ")
    options.show(render(told, form, columns), form)


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
    options.show(render(options.in_one(api.chip_table(without), form, "aliases"), form, columns), form)


@plugins_command.command("check")
@click.argument("targets", nargs=-1, metavar="[NAME|PATH]...")
@click.option("--all", "everything", is_flag=True, help="All installed plugins, as without a name.")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", help="How to print.")
def plugins_check(targets: tuple[str, ...], everything: bool, form: str) -> None:
    """Ask of plugins all that flagcore relies on: installed ones by name, others by the folder of their pyproject.

    Each runs in a process of its own. Exit status: 0 if no check failed, 4 otherwise.
    """
    if everything and targets:
        raise click.UsageError("give names or folders, or --all")
    from flagcore import api
    from flagcore.errors import NoDevice
    from flagcore.report.plugin_checks import as_text

    checked = api.check_plugins(targets)
    records: list[dict[str, Any]] = [plugin.record for plugin in checked]
    with options.on_terminal():
        options.show(json.dumps({"plugins": records}, indent=2) if form == "json" else as_text(checked), form)
    failed = {record["name"]: record["failed"] for record in records if record["failed"]}
    if failed:
        told = ", ".join(f"{count} of {name}" for name, count in failed.items())
        raise NoDevice(f"checks failed: {told}")


@plugins_command.command("new")
@click.argument("name")
@click.option("--vendor", metavar="TEXT", help="The vendor, as it is written [default: NAME, capitalized].")
@click.option("--chip", metavar="TEXT", help="The first chip [default: the letter of NAME and 1].")
@click.option("--directory", metavar="DIR", default=".", help="Where to make the folder [default: here].")
def plugins_new(name: str, vendor: str | None, chip: str | None, directory: str) -> None:
    """Write the distribution of a plugin for a new vendor: complete, with TODO where a fact is to be filled in.

    NAME is what users will see in `flag plugins list`: small letters, digits and underscores.
    """
    from flagcore import api

    folder = api.new_plugin(name, vendor=vendor, chip=chip, directory=directory)
    options.say(f"flag: wrote {folder}; next: pip install -e {folder} && flag plugins check {name}")
    click.echo(folder)
