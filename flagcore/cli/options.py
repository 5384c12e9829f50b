"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "json", "jsonl", "yaml", "csv")


def output(command: F) -> F:
    """Add `--format` and `--json`; the command receives `form`."""
    command = click.option("--json", "form", flag_value="json", help="Short for --format json.")(command)
    choice = click.Choice(FORMATS)
    return click.option("--format", "form", type=choice, default="table", help="How to print [default: table].")(
        command
    )


def plugins(command: F) -> F:
    """Add `--no-plugin`; the command receives `without`, a tuple of names."""
    return click.option(
        "--no-plugin", "without", multiple=True, metavar="NAME", help="Leave this plugin out (may be repeated)."
    )(command)


def spec(command: F) -> F:
    """Add the argument SPEC."""
    return click.argument("spec", type=click.Path(path_type=str))(command)


def say(text: str) -> None:
    """Tell something on stderr; that nobody can hear it ends nothing."""
    with suppress(OSError, ValueError):
        click.echo(text, err=True)
