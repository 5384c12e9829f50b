"""The synopsis and the options of every command, from click."""

import re
from collections.abc import Iterator
from functools import cache

import click

from flagcore.cli.main import flag

MARK = re.compile(r"^<!-- (flag(?: [\w-]+)*|common options) -->$", re.MULTILINE)
"""The first line of a block of this module."""
COMMON = ("format", "json", "wide", "no-plugin", "quiet", "chip", "config-path", "config-name")
"""Options of several commands, which the page describes once."""
SHARED_FROM = ("tune", "estimate")
"""Commands whose help describes the shared options; the first one that has the option is used."""


def render(mark: str) -> str:
    """Return the synopsis, the help and the options of the command `flag ...`, or the table of `common options`."""
    if mark == "common options":
        return _table(_shared_options().values())
    path = tuple(mark.split()[1:])
    return "\n".join(_command(path, _commands()[path]))


@cache
def _commands() -> dict[tuple[str, ...], click.Command]:
    return dict(commands(flag))


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its path, groups first. A command with several names has its last one."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        found = {command.get_command(context, name): name for name in command.list_commands(context)}
        for subcommand, name in found.items():
            assert subcommand is not None
            yield from commands(subcommand, (*path, name))


def _command(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = _context(command, " ".join(("flag", *path)))
    usage = command.collect_usage_pieces(context)
    yield f"```text\n{context.info_name} {' '.join(usage)}\n```\n"
    yield _prose(command.help or "")
    if isinstance(command, click.Group):
        subcommands = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        rows = [(f"`{name}`", _first_sentence(below)) for name, below in subcommands if below]
        yield f"\n{_table(rows, ('command', 'what it does'))}"
    shared_options = _shared_options()
    records = _records(command, context)
    own_options = [
        (spelling, text) for key, (spelling, text) in records.items() if shared_options.get(key) != (spelling, text)
    ]
    common = [f"`{key}`" for key in records if key in shared_options and shared_options[key] == records[key]]
    if own_options:
        yield f"\n{_table(own_options)}"
    if common:
        yield f"\n[Common options](#common-options): {', '.join(common)}."


def _context(command: click.Command, name: str) -> click.Context:
    return click.Context(command, info_name=name, parent=click.Context(flag, info_name="flag", **flag.context_settings))


def _records(command: click.Command, context: click.Context) -> dict[str, tuple[str, str]]:
    """Return the spelling and the help of each option, by its longest name."""
    records = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        name = max(parameter.opts, key=len)
        if record is not None and record[1] and name != "--help":
            records[name] = (f"`{_cell(record[0])}`", _cell(" ".join(record[1].split())))
    return records


def _shared_options() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    all_commands = _commands()
    for name in SHARED_FROM:
        command = all_commands[(name,)]
        for key, record in _records(command, _context(command, name)).items():
            if key.removeprefix("--") in COMMON:
                found.setdefault(key, record)
    return found


def _first_sentence(command: click.Command) -> str:
    text = " ".join((command.help or "").split())
    return _cell(text.partition(". ")[0].rstrip(".") + ".")


def _prose(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.replace("\b", "").strip())
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _table(rows: object, heads: tuple[str, str] = ("option", "meaning")) -> str:
    lines = [heads, ("---", "---"), *rows]  # type: ignore[misc]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "&#124;") if "`" in text else text.replace("|", "\\|")
