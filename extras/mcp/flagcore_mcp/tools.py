"""The tools: a schema of its input for each command, and the words of a call.

Both are made from the parameters of the commands, so a tool takes what `flag` takes, with the same limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import click

from flagcore.cli.main import flag
from flagcore.cli.options import Seconds

LEFT_OUT = frozenset({"format", "wide", "quiet", "verbose", "jobs", "config_path", "config_name", "overrides"})
"""Arguments that choose what a terminal shows, or that replace a spec by the files of another tool."""


@dataclass(frozen=True)
class Tool:
    """A command of `flag` that an agent may call.

    `words` name the command, `without` the arguments that the tool does not have. `result` is the JSON Schema of what
    the command prints to stdout: JSON, or with `prints_paths` the paths of the files that it wrote.
    """

    name: str
    words: tuple[str, ...]
    result: Mapping[str, Any]
    without: frozenset[str] = frozenset()
    prints_paths: bool = False
    writes: bool = False

    @cached_property
    def command(self) -> click.Command:
        """The command of `flag`."""
        command: Any = flag
        for word in self.words:
            command = command.get_command(click.Context(flag), word)
        return command  # type: ignore[no-any-return]

    @cached_property
    def parameters(self) -> Mapping[str, click.Parameter]:
        """The parameters of the command that the tool has, by the name of the argument."""
        named = {_argument(each): each for each in self.command.params}
        return {name: each for name, each in named.items() if name not in LEFT_OUT | self.without}

    def input_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments."""
        properties = {name: _schema(each) for name, each in self.parameters.items()}
        required = [name for name, each in self.parameters.items() if each.required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def output_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of an answer: the result, and the messages that the command prints to stderr."""
        messages = {"type": "array", "items": {"type": "string"}}
        properties = {"result": self.result, "messages": messages}
        return {"type": "object", "properties": properties, "required": [*properties]}

    def command_line(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the words after `flag` for a call. The command itself checks the values.

        Raises ValueError for an argument that the tool does not have, or a value that is no word of a command line.
        """
        if unknown := sorted(arguments.keys() - self.parameters.keys()):
            raise ValueError(f"{self.name} has no argument {unknown[0]!r}; use {', '.join(self.parameters)}")
        if self.prints_paths and arguments.get("output") == "-":
            raise ValueError("output = '-': expected a folder")
        named, placed = list[str](), list[str]()
        for name, parameter in self.parameters.items():
            value = arguments.get(name)
            if getattr(parameter, "is_flag", False):
                if not isinstance(value, bool | None):
                    raise ValueError(f"{name} = {value!r}: expected true or false")
                named += [f"--{name.replace('_', '-')}"] if value else []
                continue
            values = value if isinstance(value, list) else [] if value is None else [value]
            words = [_word(name, each) for each in values]
            is_placed = isinstance(parameter, click.Argument)
            placed += words if is_placed else []
            named += [] if is_placed else [f"--{name.replace('_', '-')}={each}" for each in words]
        return [*self.words, *([] if self.prints_paths else ["--json"]), *named, "--", *placed]


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
        raise ValueError(f"{name} = {value!r}: expected text or a number")
    return str(value)


def _argument(parameter: click.Parameter) -> str:
    """Return the name of an argument: that of the option, with underscores."""
    return max(parameter.opts, key=len).lstrip("-").replace("-", "_")


def _schema(parameter: click.Parameter) -> dict[str, Any]:
    """Return the JSON Schema of a parameter's values."""
    schema = {"type": "boolean"} if getattr(parameter, "is_flag", False) else _schema_of_type(parameter.type)
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        schema = {"type": "array", "items": schema}
    text = getattr(parameter, "help", None) or parameter.metavar
    return {**schema, **({"description": text} if text else {})}


def _schema_of_type(kind: click.ParamType[Any]) -> dict[str, Any]:
    if isinstance(kind, click.Choice):
        return {"type": "string", "enum": [*kind.choices]}
    if isinstance(kind, Seconds):
        return {"type": ["number", "string"]}
    if isinstance(kind, click.IntRange | click.FloatRange):
        bounds = {"exclusiveMinimum" if kind.min_open else "minimum": kind.min}
        bounds |= {"exclusiveMaximum" if kind.max_open else "maximum": kind.max}
        number = "integer" if isinstance(kind, click.IntRange) else "number"
        return {"type": number, **{name: bound for name, bound in bounds.items() if bound is not None}}
    return {"type": "string"}


RECORD = {"type": "object"}
RECORDS = {"type": "array", "items": RECORD}
PATHS = {"type": "array", "items": {"type": "string"}, "description": "Paths of the files that were written."}
TOOLS = (
    Tool("estimate", ("estimate",), {"anyOf": [RECORDS, RECORD]}, frozenset({"report"})),
    Tool("size", ("size",), RECORD, frozenset({"to", "name"})),
    Tool("explain", ("explain",), RECORD),
    Tool("compare", ("compare",), RECORD),
    Tool("runs", ("runs", "list"), RECORDS),
    Tool("show_run", ("runs", "show"), RECORD),
    Tool("export", ("export",), PATHS, prints_paths=True, writes=True),
    Tool("tune", ("tune",), RECORD, frozenset({"set", "storage", "watch"}), writes=True),
)
"""`tune` starts programs, so it has no `set`: all that it starts stands in a spec, which a person can read."""
