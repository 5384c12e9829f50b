"""Options that several commands share."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flagcore import api
from flagcore.errors import NoDevice, SpecError
from flagcore.i18n import N_, _, in_english, printable, wrapped

if TYPE_CHECKING:
    from flagcore.contracts import ImportedSpec
    from flagcore.domain.spec import ImportNote

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "json", "jsonl", "yaml", "csv")


def _adding(call: Callable[..., Any], *parameters: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds parameters to a command, in the order of its help.

    `call` receives the command and the values of all parameters, and calls the command.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def called(*arguments: Any, **values: Any) -> Any:
            return call(command, *arguments, **values)

        decorated: Any = called
        for add in reversed(parameters):
            decorated = add(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def _formatted(command: Callable[..., Any], /, *arguments: Any, wide: bool, quiet: bool, **others: Any) -> Any:
    with on_terminal(wide):
        return command(*arguments, **others)


QUIET = click.option("-q", "--quiet", is_flag=True, help=N_("Hide progress and notes."))


quiet = _adding(lambda command, /, *arguments, quiet, **others: command(*arguments, **others), QUIET)
"""Adds `--quiet` to a command without `--format`."""


def job_words(changes: Sequence[str] = (), **own: object) -> list[str]:
    """Return the words of the current command that describe its job. `changes` replace the `--set` of the same keys,
    and `own` the options of the same names and the `--set` of their keys."""
    given = {**click.get_current_context().params, **own}
    words = [given["spec"]] if given["spec"] else []
    for name in ("model", "engine", "nodes", "devices", "chip", "ttft_p99", "tpot_p99", "rate"):
        words += [f"--{name.replace('_', '-')}", str(given[name])] if given.get(name) else []
    chosen = [f"auto_tuner.objective={given['objective']}"] if given.get("objective") else []
    settings = {each.partition("=")[0]: each for each in (*given["settings"], *chosen, *changes)}
    settings = {key: each for key, each in settings.items() if OPTION_OF.get(key) not in own}
    pairs = {"--slo": given["slo"], "--set": settings.values(), "--no-plugin": given.get("without", ())}
    return words + [word for option, values in pairs.items() for each in values for word in (option, each)]


OPTION_OF = {"cluster.chip": "chip", "cluster.nodes": "nodes", "cluster.devices_per_node": "devices"}
"""The options that set keys of a spec."""


def is_quiet() -> bool:
    """Return whether the current command has `--quiet`, so that `say` prints nothing."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.params.get("quiet"))


def _output(command: Callable[..., Any], /, *arguments: Any, form: str, **others: Any) -> Any:
    with language_of(form):
        return _formatted(command, *arguments, form=form, **others)


FORMAT_OPTIONS = (
    click.option(
        "--format", "form", type=click.Choice(FORMATS), default="table", help="Output format [default: table]."
    ),
    click.option("--json", "form", flag_value="json", help="Same as --format json."),
    click.option("--wide", is_flag=True, help="Do not wrap tables to the width of the terminal."),
    QUIET,
)
output = _adding(_output, *FORMAT_OPTIONS)
"""Adds `--format`, `--json`, `--wide`, `--quiet`. The command gets `form`. Only tables are in the user's language."""
formats = _adding(_formatted, *FORMAT_OPTIONS)
"""Adds the same options as `output`, for a command that also writes files in the user's language."""


def language_of(form: str) -> AbstractContextManager[None]:
    """Return the language context of an output format. Tables are in the user's language, other formats in English."""
    return nullcontext() if form == "table" else in_english()


@contextmanager
def on_terminal(wide: bool = False) -> Iterator[None]:
    """Fit tables to the width of the terminal, unless `wide` is set."""
    from flagcore.report.formats import fitted

    fits_terminal = sys.stdout.isatty() and not wide
    with fitted(shutil.get_terminal_size().columns if fits_terminal else None):
        yield


def chip(text: str = N_("Plan for this chip instead of the one in the spec.")) -> Callable[[F], F]:
    """Add `--chip`."""
    complete = completing(lambda: [each["chip"] for each in api.chip_table()])
    return click.option("--chip", metavar="NAME", help=text, shell_complete=complete)


raw_settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help=N_("Change a key of the spec, such as cluster.nodes=2 (repeatable)."),
)
"""Adds `--set`. The command receives `settings`, a tuple of the words."""


def settings(argument: str = "spec", *, waits: bool = True) -> Callable[[F], F]:
    """Add `--set`, which changes keys of the spec that the command receives as `argument`.

    `waits`: whether a line is shown while the command works for long (see `patience`).
    """

    def call(command: Callable[..., Any], /, settings: tuple[str, ...], **others: Any) -> Any:
        if settings and others[argument] is not None:
            others[argument] = api.with_settings(others[argument], settings)
        with patience(_("flag: predicting the candidates")) if waits else nullcontext():
            return command(**others)

    return _adding(call, raw_settings)


class Seconds(click.FloatRange):
    """A number of seconds, or a duration with a unit, such as 2min."""

    name = "duration, such as 90 or 5min"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the duration in seconds."""
        from flagcore.domain.units import SECONDS, parse_amount  # late, as below

        seconds = parse_amount(value, SECONDS) if isinstance(value, str) else None
        number = super().convert(value if seconds is None else seconds, param, ctx)
        return number if number == number else self.fail(_("{value} is not a number", value=value), param, ctx)


SILENT_S, AGAIN_S = 2.0, 10
"""The time in seconds after which a line shows that a command is working, and the time between further lines."""


@contextmanager
def patience(text: str) -> Iterator[Callable[[], None]]:
    """Print `text` to stderr if the block takes more than `SILENT_S` seconds, and every `AGAIN_S` with the time passed.

    Yields a function that ends this.
    """
    timer = _Repeated(SILENT_S, lambda passed_s: say(f"{text} ..." + f" {SILENT_S + passed_s:g} s" * bool(passed_s)))
    timer.daemon = True
    if not is_quiet():
        timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


class _Repeated(threading.Timer):
    """A timer, beside which `predict` may fork, that repeats until cancelled. Calls with seconds since its first."""

    def run(self) -> None:
        for passed_s in itertools.count(0, AGAIN_S):
            if self.finished.wait(AGAIN_S if passed_s else self.interval):
                return
            self.function(passed_s)


class Group(click.Group):
    """A group of commands whose help shows the whole summary of each command. Alone, its command `list` is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `list` before the options of a group without a command, if the group has this command."""
        is_alone = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        return super().parse_args(ctx, ["list", *args] if is_alone and "list" in self.commands else args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their summaries, which click would cut to one line."""
        self.write_commands(ctx, formatter, _("Commands"), self.list_commands(ctx))

    def write_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter, title: str, names: Sequence[str]
    ) -> None:
        """Write a section with the given commands, if there are any."""
        rows = list[tuple[str, str]]()
        for name in names:
            try:
                if command := self.get_command(ctx, name):
                    rows.append((name, self.summary(name, command)))
            except NoDevice as error:
                rows.append((name, str(error)))
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)

    def summary(self, name: str, command: click.Command) -> str:
        """Return the whole summary of a command."""
        return command.get_short_help_str(limit=1000)


objective = click.option(
    "--objective", metavar="NAME", help=N_("Optimize this metric, such as cost, instead of the objective in the spec.")
)


def completing(known: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Return a function for `shell_complete` that completes one of the known names."""
    return lambda context, parameter, typed: [name for name in known() if name.lower().startswith(typed.lower())]


plugins = click.option(
    "--no-plugin",
    "without",
    multiple=True,
    metavar="NAME",
    help=N_("Disable a plugin (repeatable)."),
    shell_complete=completing(lambda: [each["name"] for each in api.plugin_table()]),
)
"""Adds `--no-plugin`. The command receives `without`, a tuple of plugin names."""


def _with_tree(
    command: Callable[..., Any],
    /,
    spec: str | None,
    overrides: tuple[str, ...],
    config_path: str | None,
    config_name: str | None,
    **others: Any,
) -> Any:
    """Call a command with `spec`, or with another tuner's config. Errors name the keys of that config."""
    if config_path is None and config_name is None:
        if overrides:
            raise click.UsageError(_("unexpected argument {name!r}: overrides need --config-path", name=overrides[0]))
        return command(spec=spec, **others)
    if config_path is None or config_name is None:
        raise click.UsageError(_("--config-path and --config-name must be used together"))
    if spec and "=" not in spec and not spec.startswith("~"):
        raise click.UsageError(_("{name!r} is not an override such as a.b=c; --config-path replaces SPEC", name=spec))
    config = api.read_tree(Path(config_path), config_name, [*filter(None, [spec]), *overrides])
    print_notes(config.notes)
    try:
        return command(spec=api.LoadedSpec(config.file, config.data), **others)
    except SpecError as error:
        raise config.translate_error(error) from None


tree = _adding(
    _with_tree,
    click.argument("spec", required=False, type=click.Path(path_type=str)),
    click.argument("overrides", nargs=-1),
    click.option("--config-path", metavar="DIR", help="Read a config of another tuner instead of SPEC."),
    click.option("--config-name", metavar="NAME", help="Top-level file of the config."),
)
"""Adds SPEC, or another tuner's config (`--config-path`, `--config-name`, OVERRIDES). The command receives `spec`."""


def pods(command: F) -> F:
    """Add the options for the pods of Kubernetes to a command."""
    for name, text in (
        ("pods FILE", N_("YAML file with fields of a pod's spec, such as tolerations, that are merged into all pods.")),
        ("user NUMBER", N_("Run as this user, with the rights that the Pod Security Standard restricted allows.")),
        ("rdma RESOURCE", N_("Request this resource of network adapters, for RDMA, in each pod.")),
        ("resource NAME", N_("Name of the devices in Slurm or Kubernetes, such as npu [default: the vendor's].")),
        ("queue NAME", N_("Queue of Kueue or Volcano, or partition of Slurm.")),
        ("volume CLAIM:PATH", N_("Persistent volume claim and its mount point, for kubernetes and dynamo.")),
    ):
        command = click.option(f"--{name.split()[0]}", metavar=name.split()[1], help=text)(command)
    return command


MODEL_HELP = N_("Directory with a config.json, GGUF file, or name of a public model (`flag models`).")


def _with_model(
    command: Callable[..., Any],
    /,
    spec: Any,
    model: str | None,
    engine: str | None,
    nodes: int | None,
    devices: int | None,
    slo: tuple[str, ...],
    ttft_p99: str | None,
    tpot_p99: str | None,
    rate: float | str | None = None,
    **others: Any,
) -> Any:
    from flagcore.domain.units import SECONDS, parse_amount  # late, because its types are slow to import

    for name, limit in (("ttft", ttft_p99), ("tpot", tpot_p99)):
        if limit and parse_amount(limit, SECONDS) is None:
            text = N_("--{name}-p99 {limit}: expected digits with a unit, such as 500ms or 1s")
            raise click.UsageError(_(text, name=name, limit=limit))
        slo += (f"p99 {name} {limit}",) if limit else ()
    if model is None:
        if engine is not None:
            raise click.UsageError(_("--engine requires --model; with SPEC, use --set"))
        values = {"nodes": nodes, "devices": devices}
        sizes = [f"{key}={values[name]}" for key, name in OPTION_OF.items() if values.get(name)]
        spec = api.with_settings(spec, sizes) if sizes and spec is not None else spec
    elif (spec is not None and "candidate" not in others) or others.get("jobs") is not None:
        raise click.UsageError(_("--model replaces SPEC"))
    else:
        others |= {"candidate": (spec, *others["candidate"])} if spec is not None else {}
        spec = api.spec_of_model(model, engine=engine, chip=others.get("chip"), nodes=nodes, devices=devices)
        if "run_dir" in others:
            others["run_dir"] = others["run_dir"] or api.RUNS / Path(model).name
    return command(spec=api.with_limits(spec, slo, rate) if (slo or rate) and spec is not None else spec, **others)


model = _adding(
    _with_model,
    click.option("--model", metavar="MODEL", help=N_("This model instead of SPEC: a path or public name.")),
    click.option("--engine", metavar="NAME", help=N_("With --model: engine [default: a serving engine].")),
    click.option("--nodes", type=click.IntRange(1), help=N_("Number of hosts [default: of SPEC, else 1].")),
    click.option("--devices", type=click.IntRange(1), help=N_("Devices per host [default: of SPEC, all, or usual].")),
    click.option("--slo", multiple=True, metavar="LIMIT", help=N_("Latency limit, such as p99 ttft 1s (repeatable).")),
    click.option("--ttft-p99", metavar="TIME", help=N_("Short for --slo 'p99 ttft TIME'.")),
    click.option("--tpot-p99", metavar="TIME", help=N_("Short for --slo 'p99 tpot TIME'.")),
)
"""Adds `--model`, `--engine`, `--nodes`, `--devices`, which replace SPEC, and `--slo`. The command receives `spec`."""


class Rate(click.FloatRange):
    """`auto`, or a number in the range, which may end in `/s`."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number: Any = str(value).removesuffix("/s")
        number = value if value == "auto" else super().convert(number, param, ctx)
        is_nan = number != number  # which is in each range
        return self.fail(_("{value} is not a number", value=value), param, ctx) if is_nan else number


_RATE = N_("Servers: requests per second that arrive, instead of the load of the spec; auto: the most within limits.")
rate = click.option("--rate", type=Rate(0, 1_000_000, min_open=True), metavar="N", help=_RATE)


def _with_new_file(
    command: Callable[..., Any], /, *arguments: Any, output: Path | None, force: bool, **others: Any
) -> Any:
    output = None if output == Path("-") else output
    if output is not None and output.exists() and not force:
        raise click.UsageError(_("{file} exists; use --force to replace it, or choose another file", file=output))
    return command(*arguments, output=output, **others)


new_file = _adding(
    _with_new_file,
    click.option(
        "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help=N_("Output file [default: stdout].")
    ),
    click.option("--force", is_flag=True, help=N_("Replace the output file if it exists.")),
)
"""Adds `-o` and `--force`. The command receives `output`, which it passes to `write_new`.

Without `--force`, a file that exists is a UsageError before the command begins.
"""


def write_new(spec: ImportedSpec, output: Path | None) -> None:
    """Print a spec as YAML with comments, or write it to a file."""
    from flagcore.spec.plain_data import commented_yaml

    text = commented_yaml(spec)
    if output is None:
        show(text.removesuffix("\n"), "yaml")
        return
    write_file(output, text)


def write_file(file: Path, text: str) -> None:
    """Write an output file. Raises UsageError, also for a file that is an argument of the command."""
    given = click.get_current_context().params.values()
    words = [word for each in given for word in (each if isinstance(each, tuple) else (each,)) if word is not file]
    files = [each for each in words if isinstance(each, (str, Path)) and os.path.isfile(each)]
    if file.is_file() and any(map(file.samefile, files)):
        raise click.UsageError(_("{file} is an input of this command: choose another file", file=file))
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise click.UsageError(_("cannot write {file}: {reason}", file=file, reason=error.strerror or error)) from None


def print_notes(notes: Iterable[ImportNote]) -> None:
    """Print how the keys of an imported config were converted."""
    for note in notes:
        say(f"{note.key}: {note.text}")


def joined(records: list[dict[str, Any]], form: str, key: str, separator: str = ", ") -> list[dict[str, Any]]:
    """Return `records`. If the format has columns, the list under `key` in each record becomes one string."""
    if form not in ("table", "csv"):
        return records
    return [{**record, key: separator.join(record[key])} for record in records]


def say(text: str) -> None:
    """Print a message without secrets to stderr, in lines that fit the terminal. Does nothing if stderr is closed, and
    in a command with `--quiet`."""
    from flagcore.domain.secrets import redact_text  # late, because its patterns are slow

    with suppress(OSError, ValueError):
        if not is_quiet():
            click.echo(printable(_wrapped(redact_text(text), _message_width())), err=True)


def show_records(records: Sequence[Mapping[str, Any]], form: str, columns: str | Mapping[str, str]) -> None:
    """Print records in a format.

    `columns`: the name of a table in `names.yaml`, or the headings of its columns with dotted keys.
    """
    from flagcore.report.formats import render, table_columns

    show(render(records, form, table_columns(columns) if isinstance(columns, str) else columns), form)


def show_record(record: Mapping[str, Any], form: str) -> None:
    """Print one record with all its fields. In JSON, it is an object instead of a list."""
    if form == "json":
        show(json.dumps(record, indent=2, ensure_ascii=False), form)
    else:
        show_records([record], form, {})


def show(text: str, form: str = "table") -> None:
    """Print a result to stdout, without characters that command a terminal. Text and tables fit the terminal, and have
    colours where it has them."""
    from flagcore.report.formats import WIDTH

    if form not in ("table", "text"):
        click.echo(printable(text))
        return
    lines = printable(_wrapped(text, WIDTH.get())).split("\n")
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    click.echo("\n".join(map(_coloured, lines) if has_colours else lines))


def _coloured(line: str) -> str:
    """Return a line of a result with the best row of a table in green, failed trials in red and predictions dimmed."""
    first, *cells = line.strip().split("  ")
    if re.fullmatch(rf"\d+(\*| .*\b{_('best')}\b.*)", first):
        return click.style(line, fg="green")
    if first[:1].isdigit() and {_(name) for name in FAILED} & {cell.strip() for cell in cells}:
        return click.style(line, fg="red")
    return re.sub(r"~[\d.,]+", lambda found: click.style(found[0], dim=True), line)


FAILED = ("failed", "out of memory", "timed out", "invalid", "interrupted")
"""States of trials without a measurement, as tables show them."""


def _message_width() -> int | None:
    """Return the width of the terminal that shows stderr. It is None if stderr is no terminal, and with `--wide`."""
    context = click.get_current_context(silent=True)
    is_wide = context is not None and context.params.get("wide")
    return shutil.get_terminal_size().columns if sys.stderr.isatty() and not is_wide else None


def _wrapped(text: str, width: int | None) -> str:
    """Wrap lines that are longer than `width`. Paths are not broken."""
    if width is None:
        return text
    return "\n".join(each for line in text.split("\n") for each in wrapped(line, max(width, 8), "    ", cut=False))
