"""The commands flag init and import: new specs, and the specs and trials of other tuners."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from flagcore import api
from flagcore.cli import options
from flagcore.cli.main import translated
from flagcore.errors import FlagError
from flagcore.i18n import N_, _


@click.command("init")
@click.option("--model", metavar="MODEL", help=options.MODEL_HELP)
@click.option("--engine", metavar="NAME", help="Engine that trains or serves the model.")
@options.chip(N_("Chip of the cluster [default: detected when the spec is used]."))
@click.option("--nodes", type=click.IntRange(1), help="Number of hosts [default: 1].")
@click.option("--devices", type=click.IntRange(1), help="Devices per host [default: all].")
@click.option("--seq-length", type=click.IntRange(1), help="Training: tokens per sample.")
@click.option("--global-batch-size", type=click.IntRange(1), help="Training: samples per step.")
@click.option("--precision", metavar="NAME", help="Training: number format, such as bf16 or fp8.")
@click.option("--input-len", type=click.IntRange(1), help="Serving: tokens of a prompt.")
@click.option("--output-len", type=click.IntRange(1), help="Serving: tokens of an answer.")
@click.option("--concurrency", type=click.IntRange(1), help="Serving: requests in flight.")
@click.option("--slo", multiple=True, metavar="LIMIT", help="Serving: latency limit, such as p99 ttft 1s (repeatable).")
@options.new_file
def init_command(
    model: str | None,
    engine: str | None,
    chip: str | None,
    nodes: int | None,
    devices: int | None,
    slo: tuple[str, ...],
    output: Path | None,
    **given: Any,
) -> None:
    """Write a new spec with comments.

    On a terminal, missing values are asked for, again after an invalid answer. Otherwise --model and --engine are
    required, and the other values have their defaults.
    """
    from flagcore.plugins import ENGINES, names

    text = _("Directory with a config.json, GGUF file, or name of a public model")
    model = model or _ask(text, "--model", check=partial(api.model_from, base=Path()))
    engine = engine or _ask(_("Engine ({names})", names=", ".join(names(ENGINES))), "--engine", check=api.defaults_of)
    values = api.defaults_of(engine)
    if foreign := [name for name, value in given.items() if value is not None and name not in values]:
        option = "--" + foreign[0].replace("_", "-")
        raise click.UsageError(_("{option} does not apply to the engine {engine}", option=option, engine=engine))
    defaults = {**CLUSTER, **values}
    answers = {"chip": chip, "nodes": nodes, "devices_per_node": devices} | given

    def made(**more: Any) -> Any:
        every = {**defaults, **{key: value for key, value in {**answers, **more}.items() if value is not None}}
        return api.new_spec(engine, model, {key: every[key] for key in CLUSTER}, {key: every[key] for key in values})

    made()  # what is given must be valid before anything is asked
    for name in (name for name in defaults if answers.get(name) is None):
        check = partial(lambda name, answer: made(**{name: answer}), name)
        answers[name] = _ask(_(CLUSTER_TEXTS.get(name, name)), "", defaults[name], check)
    spec = made()
    data = api.LoadedSpec("spec", spec.data)
    if "serve" in spec.data and not slo:
        text = _("Latency limits, such as p99 ttft 1s, p99 tpot 50ms; none: no limits")
        answer = _ask(text, "", NONE, lambda answer: answer == NONE or api.with_limits(data, [answer]))
        slo = () if answer == NONE else (answer,)
    options.write_new(replace(spec, data=api.with_limits(data, slo).data) if slo else spec, output)
    if output is not None:
        options.say(_("flag: next: flag estimate {file}", file=output))


CLUSTER = {"chip": "auto", "nodes": 1, "devices_per_node": "auto"}
CLUSTER_TEXTS = {
    "chip": N_("Chip; auto: detected when the spec is used"),
    "nodes": N_("Number of hosts"),
    "devices_per_node": N_("Devices per host; auto: all"),
}
NONE = "none"


def _ask(text: str, option: str, default: Any = None, check: Callable[[Any], object] = str) -> Any:
    """Return the user's answer, or the default without a terminal. Raises UsageError if there is neither.

    `check`: raises FlagError for an invalid answer, which is then asked for again.
    """

    def valid(answer: Any) -> Any:
        answer = int(answer) if str(answer).isdecimal() else answer
        try:
            check(answer)
        except FlagError as error:
            raise click.UsageError(str(error)) from None
        return answer

    if sys.stdin.isatty():
        return click.prompt(text, default=default, err=True, value_proc=valid)
    if default is None:
        raise click.UsageError(_("{option} is required: stdin is not a terminal", option=option))
    return default


@click.command("models")
@click.argument("words", nargs=-1)
@options.output
def models_command(words: tuple[str, ...], form: str) -> None:
    """List public models whose names contain all WORDS.

    `flag estimate --model NAME` and the key `model` of a spec accept these names, and those of fine-tuned and quantized
    variants, without a download.
    """
    records = api.public_model_table(words)
    if form == "table" and not records:
        near = ", ".join(api.similar_models("-".join(words)))
        hint = _("did you mean {name}?", name=near) if near else _("`flag models` lists all names")
        options.say(_("no public model has {words} in its name; {hint}", words=" ".join(words), hint=hint))
        return
    options.show_records(records, form, "models")


HISTORY = "-history"


class _Importers(options.Group):
    """The commands NAME and NAME-history of each installed importer, and one per engine that reads commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from flagcore.contracts import HistoryReader
        from flagcore.plugins import IMPORTERS, command_readers, importer, names

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

    def summary(self, name: str, command: click.Command) -> str:
        """Return the summary of a command after the name of its tool or engine."""
        from flagcore.plugins import IMPORTERS, importer, names

        tool = name.removesuffix(HISTORY)
        return f"{importer(tool).title if tool in names(IMPORTERS) else name}: {super().summary(name, command)}"


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
    config = api.read_tree(directory, name, overrides, importer=context.info_name)
    if chip is not None:
        config.data["cluster"]["chip"] = chip
    options.print_notes(config.notes)
    api.check_imported(config)
    options.write_new(config, output)


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
    text = sys.stdin.read().replace("\r\n", "\n") if command == ("-",) else ""
    imported = api.read_command(context.info_name, () if text else command, text=text, **given)
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

    importer = str(context.info_name).removesuffix(HISTORY)
    imported = api.import_history(csv, same_machine=same_machine, importer=importer, **given)
    for note in imported.notes:
        options.say(f"flag: {note}")
    records = [TrialResult.write(trial) for trial in imported.trials]
    columns = {"trial": "number", **candidate_columns(records, imported.knobs), **table_columns("imported")}
    options.show_records(records, form, columns)
    text = N_("Saved {count} trials of another machine to {folder}.")
    if same_machine:
        text = N_("Saved {count} trials of this machine to {folder}.")
    options.say(_(text, count=len(imported.trials), folder=imported.run_dir))
