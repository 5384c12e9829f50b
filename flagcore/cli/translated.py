"""Help and usage errors of click in another language than English."""

from __future__ import annotations

import re
from copy import copy
from typing import Any

import click
from click import core, decorators, exceptions, formatting, parser, types

from flagcore.i18n import N_, _, language
from flagcore.i18n.width import wrapped

CLICK = (
    N_("Usage:"),
    N_("Options"),
    N_("Commands"),
    N_("Missing command."),
    N_("Missing argument"),
    N_("Missing option"),
    N_("Missing parameter"),
    N_("Error: {message}"),
    N_("Try '{command} {option}' for help."),
    N_("No such option {name!r}."),
    N_("Option {name!r} requires an argument."),
    N_("Invalid value: {message}"),
    N_("Invalid value for {param_hint}: {message}"),
    N_("{value!r} is not a valid {number_type}."),
    N_("{value} is not in the range {range}."),
    N_("Show the version and exit."),
    N_("Show this message and exit."),
    N_("default: {default}"),
    N_("required"),
)
"""Messages of click itself."""
SENTENCE = re.compile(r"[^。.]*[。.]")


def translated(command: click.Command) -> click.Command:
    """Return a command with its help in the selected language."""
    if language() == "en":
        return command
    for module in (core, decorators, exceptions, formatting, parser, types):
        vars(module)["_"] = _
    formatting.wrap_text = _wrap_text
    return _command(command)


def _command(command: click.Command) -> click.Command:
    made = copy(command)
    paragraphs = map(_one_line, (command.help or "").split("\n\n"))
    made.help = "\n\n".join(map(_, paragraphs))
    first = SENTENCE.match(made.help)
    made.short_help = first[0].rstrip("。.") if first else None
    made.params = [_parameter(each) for each in command.params]
    if isinstance(made, click.Group):
        made.commands = {name: _command(each) for name, each in made.commands.items()}
    return made


def _parameter(parameter: click.Parameter) -> click.Parameter:
    made = copy(parameter)
    if isinstance(made, click.Option) and made.help:
        made.help = _(made.help)
    return made


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _wrap_text(
    text: str, width: int = 78, initial_indent: str = "", subsequent_indent: str = "", preserve_paragraphs: Any = False
) -> str:
    paragraphs = text.split("\n\n") if preserve_paragraphs else [text]
    lines = [wrapped(initial_indent + _one_line(each), width, subsequent_indent) for each in paragraphs]
    return "\n\n".join("\n".join(each) for each in lines)
