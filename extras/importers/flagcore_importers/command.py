"""flag import: the specs and trials of other tuners, and the commands of engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flagcore.cli import options
from flagcore.cli.main import translated
from flagcore.errors import FlagError, NoDevice
from flagcore.i18n import N_, _

if TYPE_CHECKING:
    from flagcore.contracts import Commands, Engine, ImportedSpec

HISTORY = "-history"


def command_readers() -> list[str]:
    """Return the names of the engines whose commands can be imported, and of those that cannot be loaded."""
    from flagcore.plugins import ENGINES, find_engine, names  # `flag --help` imports little

    unable = set[str]()
    for name in names(ENGINES):
        with suppress(FlagError):
            unable |= set() if find_engine(name).commands else {name}
    return [name for name in names(ENGINES) if name not in unable]


def commands_of(engine: Engine) -> Commands:
    """Return the reader of an engine's commands. Raises SpecError if it has none."""
    from flagcore.contracts import unsupported

    if engine.commands is None:
        raise unsupported(engine, "the import of commands", "write a spec")
    return engine.commands


class _Importers(options.Group):
    """The commands NAME and NAME-history of each installed importer, and one per engine that reads commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from flagcore.contracts import HistoryReader
        from flagcore.plugins import IMPORTERS, importer, names

        commands = list[str]()
        for name in names(IMPORTERS):
            commands.append(name)
            with suppress(FlagError):
                commands += [name + HISTORY] if isinstance(importer(name), HistoryReader) else []
        return [*commands, *command_readers()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Pass all arguments to the command that detects what they contain, unless the first one names a command."""
        named = {"-h", "--help", *self.list_commands(ctx)}
        return super().parse_args(ctx, ["--", *args] if args and args[0] not in named else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        command = self.get_command(ctx, args[0])
        return (args[0], command, args[1:]) if command else (None, translated(command_command), args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from flagcore.plugins import IMPORTERS, importer, missing_extra, names

        if cmd_name not in self.list_commands(ctx):
            if fix := missing_extra(IMPORTERS, cmd_name.removesuffix(HISTORY)):
                raise click.UsageError(_("{package} is not installed: run `{command}`", package=cmd_name, command=fix))
            return None
        if cmd_name in names(IMPORTERS):
            return translated(config_command if importer(cmd_name).has_trees else recipe_command)
        return translated(history_command if cmd_name.endswith(HISTORY) else command_command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the importers with their summaries, and the engines, whose commands all do the same, in one line."""
        engines = command_readers()
        names = [each for each in self.list_commands(ctx) if each not in engines]
        self.write_commands(ctx, formatter, _("Commands"), names)
        with formatter.section(_("Engines, whose commands are converted to a spec")):
            formatter.write_text(", ".join(engines))

    def summary(self, name: str, command: click.Command) -> str:
        """Return the summary of a command after the name of its tool or engine."""
        from flagcore.plugins import importer

        return f"{importer(name.removesuffix(HISTORY)).title}: {super().summary(name, command)}"


@click.group("import", cls=_Importers)
def import_command() -> None:
    """Convert a launch command or script to a spec: flag import FILE, - for stdin, or -- COMMAND.

    FILE is a script, a batch script of Slurm, a compose file, a manifest of Kubernetes, Helm values, or a systemd unit.
    COMMAND may be docker run or podman run. The commands below read what is named. FILE and COMMAND take the options of
    an engine's command, such as -o, --force, --model and --chip.
    """


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--config-name", required=True, metavar="NAME", help="Top-level file of the config, such as train_auto_tuner."
)
@options.new_file
@click.pass_context
def config_command(context: click.Context, /, directory: Path, config_name: str, **given: Any) -> None:
    """Convert the config of another tuner in DIR to a spec.

    OVERRIDES are those of hydra (a.b=c). Comments, also printed to stderr, mark keys that are dropped or have another
    meaning here. Relative paths start at the working directory.
    """
    _convert(context, directory, config_name, **given)


@click.command()
@click.argument("recipe", metavar="RECIPE", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@options.chip(N_("Chip of the cluster [default: the chip in the name of the recipe, or the detected one]."))
@options.new_file
@click.pass_context
def recipe_command(context: click.Context, /, recipe: Path, **given: Any) -> None:
    """Convert a recipe of another tool to a spec.

    RECIPE is its saved config, a directory of checkpoints with it, or its name if the tool is installed. OVERRIDES
    (a.b=c, or YAML files) change its keys. Comments, also printed to stderr, mark keys that are dropped or have another
    meaning here.
    """
    _convert(context, recipe.parent, recipe.name, **given)


def _convert(
    context: click.Context,
    directory: Path,
    name: str,
    overrides: tuple[str, ...],
    output: Path | None,
    chip: str | None = None,
) -> None:
    from flagcore.api.commands.importing import check_imported, read_tree  # `flag --help` imports little

    config = read_tree(directory, name, overrides, importer=context.info_name)
    if chip is not None:
        config.data["cluster"]["chip"] = chip
    options.print_notes(config.notes)
    check_imported(config)
    options.write_new(config, output)


def _readers() -> dict[str, Commands]:
    """Return the readers of the commands of engines. Engines that cannot be loaded are named on stderr."""
    from flagcore.plugins import find_engine

    found: dict[str, Commands] = {}
    for name in command_readers():
        try:
            found[name] = commands_of(find_engine(name))
        except NoDevice as error:
            options.say(f"flag: {error}")
    return found


def read_command(
    engine: str | None, words: Sequence[str], *, model: str | None = None, chip: str | None = None, text: str = ""
) -> ImportedSpec:
    """Return a spec for a command: one quoted text, the path of a file that starts it, or several words.

    `engine`: None means the engine that the command starts. `model`: the path of the model if the command does not
    contain it. `chip`: the chip of the cluster; if it is None, it is detected later. `text`: the content of the file in
    place of `words`. Raises SpecError, UsageError.
    """
    from flagcore.api.commands.importing import check_imported
    from flagcore.api.inputs import check_chips
    from flagcore.domain.chip import USUAL_DEVICES
    from flagcore.domain.secrets import redact_data
    from flagcore.plugins import find_engine, load_plugins
    from flagcore.spec.models import absolute_model
    from flagcore_importers.reader import convert

    engines = {engine: commands_of(find_engine(engine))} if engine else _readers()
    path = absolute_model(model, Path()) if model is not None else None
    known_chip = load_plugins().find_chip(chip) if chip is not None else None
    usual = known_chip.devices_per_node if known_chip else USUAL_DEVICES
    spec = convert(engines, words, text, path, command_readers, usual)
    if chip is not None:
        spec.data["cluster"]["chip"] = chip
    spec = replace(spec, data=redact_data(spec.data))
    check_imported(spec)
    check_chips(spec.data.get("cluster"))
    return spec


@click.command()
@click.argument("command", nargs=-1, required=True, metavar="COMMAND")
@click.option("--model", metavar="PATH", help="Path of the model if the command does not have it.")
@options.chip(N_("Chip of the cluster [default: detected when the spec is used]."))
@options.new_file
@click.pass_context
def command_command(context: click.Context, /, command: tuple[str, ...], output: Path | None, **given: Any) -> None:
    """Convert a command of the engine to a spec.

    COMMAND is one quoted text, a file or script that starts the engine, - for stdin, or the words of the command after
    `--`. A script is read without running its programs. The arguments are the baseline. Comments, also printed to
    stderr, mark arguments that are dropped or have another meaning in the spec.
    """
    from flagcore.spec.plain_data import read_text

    text = read_text(Path("-"), file="-", key="stdin").replace("\r\n", "\n") if command == ("-",) else ""
    if command == ("-",) and not text.strip():
        raise click.UsageError(_("{file} is empty", file="stdin"))
    imported = read_command(context.info_name, () if text else command, text=text, **given)
    options.print_notes(imported.notes)
    options.write_new(imported, output)


class _Context(click.Context):
    """A context whose command may have no name."""

    @property
    def command_path(self) -> str:
        return super().command_path.rstrip()


command_command.context_class = _Context


@click.command()
@click.argument("csv", metavar="CSV", type=click.Path(path_type=Path))
@click.option("--spec", required=True, metavar="SPEC", help="Spec of the job that was tuned.")
@click.option("--run-dir", type=click.Path(), metavar="DIR", help="Directory of the run [default: runs/NAME-OF-SPEC].")
@click.option("--same-machine", is_flag=True, help="The rows were measured on this machine: do not repeat them.")
@options.output
@options.plugins
@click.pass_context
def history_command(context: click.Context, /, csv: Path, same_machine: bool, form: str, **given: Any) -> None:
    """Import the trials of another tuner from its history.csv as finished trials of a run.

    `flag tune SPEC --run-dir DIR` resumes it. Rows and columns that are skipped are reported on stderr.
    """
    from flagcore.report.formats import table_columns
    from flagcore.report.result import TrialResult
    from flagcore.report.text import candidate_columns
    from flagcore_importers.history import import_history

    importer = str(context.info_name).removesuffix(HISTORY)
    imported = import_history(csv, same_machine=same_machine, importer=importer, **given)
    for note in imported.notes:
        options.say(f"flag: {note}")
    records = [TrialResult.write(trial) for trial in imported.trials]
    columns = {"trial": "number", **candidate_columns(records, imported.knobs), **table_columns("imported")}
    options.show_records(records, form, columns)
    text = N_("Saved {count} trials of another machine to {folder}.")
    if same_machine:
        text = N_("Saved {count} trials of this machine to {folder}.")
    options.say(_(text, count=len(imported.trials), folder=imported.run_dir))
