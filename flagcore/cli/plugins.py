"""flag plugins: list, check and create plugins."""

from __future__ import annotations

import json
from typing import Any

import click

from flagcore.cli import options
from flagcore.i18n import _


@click.group("plugins")
def plugins_command() -> None:
    """List installed plugins and their chips, check them, or create a new one."""


@plugins_command.command("list")
@options.output
@options.plugins
def plugins_list(form: str, without: tuple[str, ...]) -> None:
    """List plugins with their chips and load errors.

    Maturity is the strongest evidence of a plugin: runs on hardware, recorded output of tools, or documents.
    """
    from flagcore import api

    records = api.plugin_table(without)
    has_warnings = any(record["warnings"] for record in records)
    columns = options.columns("plugins", *(["plugin_warnings"] if has_warnings else []))
    rows = options.joined(options.joined(records, form, "chips", " "), form, "warnings", "; ")
    options.show_records(rows, form, columns)


@plugins_command.command("chips")
@options.output
@options.plugins
def plugins_chips(form: str, without: tuple[str, ...]) -> None:
    """List supported chips with their specifications and aliases."""
    from flagcore import api

    options.show_records(options.joined(api.chip_table(without), form, "aliases"), form, options.columns("chips"))


@plugins_command.command("check")
@click.argument("targets", nargs=-1, metavar="[NAME|PATH]...")
@click.option("--all", "everything", is_flag=True, help="Check all installed plugins (the default).")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", help="Output format.")
def plugins_check(targets: tuple[str, ...], everything: bool, form: str) -> None:
    """Run the conformance checks: of installed plugins by name, of others by the directory of their pyproject.toml.

    Each plugin runs in its own process. Exit status: 0 if all checks passed, 4 otherwise.
    """
    if everything and targets:
        raise click.UsageError(_("--all and names are mutually exclusive"))
    from flagcore import api
    from flagcore.errors import NoDevice
    from flagcore.testing.runner import as_text

    checked_plugins = api.check_plugins(targets)
    records: list[dict[str, Any]] = [plugin.record for plugin in checked_plugins]
    with options.on_terminal():
        options.show(json.dumps({"plugins": records}, indent=2) if form == "json" else as_text(checked_plugins), form)
    failed_checks = {record["name"]: record["failed"] for record in records if record["failed"]}
    if failed_checks:
        counts = ", ".join(f"{name} ({count})" for name, count in failed_checks.items())
        raise NoDevice(_("checks failed: {counts}", counts=counts))


@plugins_command.command("new")
@click.argument("name")
@click.option("--vendor", metavar="TEXT", help="Display name of the vendor [default: NAME, capitalized].")
@click.option(
    "--chip",
    "chips",
    multiple=True,
    metavar="TEXT",
    help="Name of a chip (repeatable) [default: first letter of NAME and 1].",
)
@click.option("--tool", metavar="COMMAND", help="Command that lists the devices [default: NAME-smi].")
@click.option(
    "--visible", metavar="VARIABLE", help="Variable that selects visible devices [default: NAME_VISIBLE_DEVICES]."
)
@click.option("--torch-device", metavar="TEXT", default="cuda", help="Device type in torch [default: cuda].")
@click.option("--preload", metavar="TEXT", multiple=True, help="Module to import before the first tensor. Repeatable.")
@click.option(
    "--backend", metavar="TEXT", default="nccl", help="Collective backend in torch.distributed [default: nccl]."
)
@click.option("--directory", metavar="DIR", default=".", help="Parent directory [default: current].")
def plugins_new(name: str, **values: Any) -> None:
    """Create a plugin for a new vendor, with TODO where a fact is missing.

    NAME is the name in `flag plugins list`: lower-case letters, digits and underscores.
    """
    from flagcore import api

    folder = api.new_plugin(name, **values)
    command = f"pip install -e {folder} && flag plugins check {folder}"
    options.say(_("flag: created {folder}; next: {command}", folder=folder, command=command))
    click.echo(folder)
