"""flag completion, devices, doctor, plugins and schema."""

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from flagcore import api
from flagcore.cli import options
from flagcore.errors import NoDevice, UsageError
from flagcore.i18n import N_, _


@click.command("devices")
@options.output
@options.plugins
def devices_command(form: str, without: tuple[str, ...]) -> None:
    """List the accelerators of this machine."""
    records = api.devices(without)
    for plugin in sorted({record["plugin"] for record in records}):
        chips = {record["chip"] or record["name"] for record in records if record["plugin"] == plugin}
        if len(chips) > 1:
            text = _("flag: {plugin} has devices of several chips ({chips}); cluster.chip selects one")
            options.say(text.format(plugin=plugin, chips=", ".join(sorted(chips))))
    options.show_records(options.joined(records, form, "aliases"), form, "devices")


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a spec, for editors and validators."""
    from flagcore.plugins import engines, usable
    from flagcore.spec.convert import json_schema

    installed_engines = usable(engines(), lambda error: options.say(f"flag: {error}"))
    click.echo(json.dumps(json_schema(installed_engines), indent=2))


@click.command("doctor")
@click.option(
    "--hosts", type=click.Path(path_type=Path), help=N_("Check the hosts of this host file instead of this machine.")
)
@click.option("--launcher", default="ssh", show_default=True, help=N_("Launcher that connects to the hosts."))
@options.output
def doctor_command(hosts: Path | None, launcher: str, form: str) -> None:
    """Check the installation: what each engine lacks, and how to fix it."""
    if hosts is not None:
        records = api.check_hosts(hosts, launcher)
        options.show_records(records, form, "hosts")
        if unusable_hosts := [record["host"] for record in records if not record["ok"]]:
            raise NoDevice(_("hosts cannot be used: {hosts}", hosts=", ".join(unusable_hosts)))
        return
    records = api.doctor()
    if form == "table":
        options.show(api.verdict(records) + "\n")
    options.show_records(records, form, "doctor")


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


@click.group("plugins", cls=options.Group)
def plugins_command() -> None:
    """List installed plugins and their chips, check them, or create a new one. Without a command, list them."""


@plugins_command.command("list")
@options.output
@options.plugins
def plugins_list(form: str, without: tuple[str, ...]) -> None:
    """List plugins with their chips and load errors.

    Maturity is the strongest evidence of a plugin: runs on hardware, recorded output of tools, or documents.
    """
    options.show_records(options.joined(api.plugin_table(without), form, "chips", " "), form, "plugins")


@plugins_command.command("chips")
@options.output
@options.plugins
def plugins_chips(form: str, without: tuple[str, ...]) -> None:
    """List supported chips with their specifications and aliases."""
    options.show_records(options.joined(api.chip_table(without), form, "aliases"), form, "chips")


def _kit(command: str) -> Any:
    """Return the module of the conformance kit, a separate distribution, for a command.

    Raises UsageError with the extra to install if the kit is missing.
    """
    from flagcore.loading.entry_points import installed, instance_of, load_checked
    from flagcore.plugins.entry_points import KIT

    points, package = installed(KIT).get(command), "flagcore_testing"
    try:
        if points:
            return load_checked("module of the conformance kit", points, partial(instance_of, ModuleType))
    except NoDevice as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        package = error.__cause__.name or package
    install = 'pip install "flagcore[testing]"'
    raise UsageError(_("{package} is not installed: run `{command}`", package=package, command=install))


@plugins_command.command("check")
@click.argument("targets", nargs=-1, metavar="[NAME|PATH]...")
@click.option("--all", "everything", is_flag=True, help="Check all installed plugins (the default).")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", help="Output format.")
def plugins_check(targets: tuple[str, ...], everything: bool, form: str) -> None:
    """Run the conformance checks: of installed plugins by name, of others by the directory of their pyproject.toml.

    Each plugin runs in its own process. Exit status: 0 if all checks passed, 4 otherwise.
    """
    if everything and targets:
        raise click.UsageError(_("--all and names of plugins are mutually exclusive"))
    kit = _kit("check")
    checked_plugins = kit.check_plugins(targets)
    records: list[dict[str, Any]] = [plugin.record for plugin in checked_plugins]
    with options.on_terminal():
        options.show(
            json.dumps({"plugins": records}, indent=2) if form == "json" else kit.as_text(checked_plugins), form
        )
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
@click.option("--torch-device", metavar="TEXT", help="Device type in torch [default: that of most builds].")
@click.option("--preload", metavar="TEXT", multiple=True, help="Module to import before the first tensor. Repeatable.")
@click.option(
    "--backend", metavar="TEXT", help="Collective backend in torch.distributed [default: that of most builds]."
)
@click.option("--directory", metavar="DIR", default=".", help="Parent directory [default: current].")
def plugins_new(name: str, **values: Any) -> None:
    """Create a plugin for a new vendor, with TODO where a fact is missing.

    NAME is the name in `flag plugins list`: lower-case letters, digits and underscores.
    """
    folder = _kit("new").new_plugin(name, **values)
    command = f"pip install -e {folder} && flag plugins check {folder}"
    options.say(_("flag: created {folder}; next: {command}", folder=folder, command=command))
    click.echo(folder)
