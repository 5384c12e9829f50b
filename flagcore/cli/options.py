"""Options that several commands share."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flagcore.i18n import foreign, keep, said
from flagcore.i18n.width import columns, wrapped

if TYPE_CHECKING:
    from flagcore.contracts import ImportNote

F = TypeVar("F", bound=Callable[..., Any])

LEAD = re.compile(r" *(?P<mark>[-*] )?")
"""What stands before the text of a line."""
FORMATS = ("table", "json", "jsonl", "yaml", "csv")


def output(command: F) -> F:
    """Add `--format`, `--json` and `--wide`; the command receives `form`, and its tables fit the terminal."""

    @wraps(command)
    def fitting(*arguments: Any, wide: bool, **others: Any) -> Any:
        with on_terminal(wide):
            return command(*arguments, **others)

    made: Any = fitting
    choice = click.Choice(FORMATS)
    for add in (
        click.option("--wide", is_flag=True, help="Do not wrap tables to the width of the terminal."),
        click.option("--json", "form", flag_value="json", help="Short for --format json."),
        click.option("--format", "form", type=choice, default="table", help="How to print [default: table]."),
    ):
        made = add(made)
    return made  # type: ignore[no-any-return]


@contextmanager
def on_terminal(wide: bool = False) -> Iterator[None]:
    """Make what is shown meanwhile fit the terminal, unless it is to be `wide`, and speak its user's language."""
    from flagcore.report.formats import fitted

    with fitted(None if wide else _terminal_width(), told=True):
        yield


def _terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is, None if it is none; COLUMNS goes before."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def plugins(command: F) -> F:
    """Add `--no-plugin`; the command receives `without`, a tuple of names."""
    text = "Leave this plugin out (may be repeated)."
    return click.option("--no-plugin", "without", multiple=True, metavar="NAME", help=text, shell_complete=_plugins)(
        command
    )


def chip(text: str = "Plan for this chip instead of the spec's.") -> Callable[[F], F]:
    """Add `--chip`."""
    return click.option("--chip", metavar="NAME", help=text, shell_complete=_chips)


def _chips(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Return the chips whose name, or an alias, begins as what was `typed`, for a shell to complete."""
    from flagcore import api

    known = ((each["chip"], *each["aliases"]) for each in api.chip_table())
    return [names[0] for names in known if any(name.lower().startswith(typed.lower()) for name in names)]


def _plugins(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Return the plugins whose name begins as what was `typed`."""
    from flagcore import api

    return [each["name"] for each in api.plugin_table() if each["name"].startswith(typed)]


def spec(command: F) -> F:
    """Add the argument SPEC."""
    return click.argument("spec", type=click.Path(path_type=str))(command)


def tree(command: F) -> F:
    """Add SPEC, which may be left out, OVERRIDES and FlagScale's options; the command receives `source`."""

    @wraps(command)
    def with_source(
        spec: str | None, overrides: tuple[str, ...], config_path: str | None, config_name: str | None, **others: Any
    ) -> Any:
        if config_path is None and config_name is None:
            if overrides:
                raise click.UsageError(
                    f"Got unexpected extra argument ({overrides[0]}); overrides go with --config-path"
                )
            return command(source=(spec, None), **others)
        if config_path is None or config_name is None:
            raise click.UsageError("--config-path and --config-name go together")
        if spec and "=" not in spec and not spec.startswith("~"):
            raise click.UsageError(f"{spec} is no override (a.b=c), and --config-path takes the place of SPEC")
        return _with_tree(command, config_path, config_name, [*filter(None, [spec]), *overrides], others)

    made: Any = with_source
    for add in (
        click.option("--config-name", metavar="NAME", help="With it: the tree's top file."),
        click.option("--config-path", metavar="DIR", help="A tree of FlagScale's instead of SPEC."),
        click.argument("overrides", nargs=-1),
        click.argument("spec", required=False, type=click.Path(path_type=str)),
    ):
        made = add(made)
    return made  # type: ignore[no-any-return]


def _with_tree(command: F, path: str, name: str, overrides: list[str], others: dict[str, Any]) -> Any:
    """Call a command with a tree's data; what the import changed is told, and errors name the tree's own keys."""
    from flagcore import api
    from flagcore.errors import SpecError

    found = api.read_tree(Path(path), name, overrides)
    tell_notes(found.notes)
    try:
        return command(source=(found.file, found.data), **others)
    except SpecError as error:
        raise found.in_its_words(error) from None


def tell_notes(notes: Iterable[ImportNote]) -> None:
    """Tell what became of a tree's keys; a key is never put into another language."""
    for note in notes:
        key = said("FlagScale's {0}").replace("{0}", note.key)
        (line,) = keep([f"{key}：{said(note.text)}" if foreign() else f"{key}: {note.text}"])
        say(line)


def in_one(records: list[dict[str, Any]], form: str, key: str, between: str = ", ") -> list[dict[str, Any]]:
    """Return records whose list under `key` is one text, if they are to have columns."""
    if form not in ("table", "csv"):
        return records
    return [{**record, key: between.join(record[key])} for record in records]


def say(text: str) -> None:
    """Tell something on stderr, in the user's language; that nobody can hear it ends nothing."""
    with suppress(OSError, ValueError):
        click.echo(said(text), err=True)


def show(text: str, form: str = "table") -> None:
    """Print on stdout what was asked for: text in the user's language, data in another form as it is."""
    click.echo(_fitted(said(text)) if form in ("table", "text") else text)


def _fitted(text: str) -> str:
    """Return a text whose sentences fit the terminal as its tables do, wrapped between words."""
    from flagcore.report.formats import WIDTH

    most = WIDTH.get()
    if most is None:
        return text
    return "\n".join(each for line in text.split("\n") for each in _wrapped(line, most))


def _wrapped(line: str, most: int) -> list[str]:
    """Return a line as it is if it fits, else as several, those after the first with an indent; a path is never cut."""
    if columns(line) <= most:
        return [line]
    lead = LEAD.match(line)
    start = len(lead[0]) if lead else 0
    indent = " " * (start if lead and lead["mark"] else start + 2 if start else 4)
    return wrapped(line, max(most, 2 * len(indent)), indent, cut=False)
