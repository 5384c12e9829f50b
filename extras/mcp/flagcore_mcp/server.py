"""The server: each call of a tool runs a command of `flag` in a process of its own.

So an answer is what the command prints, and a call that is cancelled ends as the command does after Ctrl-C.

A tool is a schema of its input for each command, and the words of a call. Both are made from the parameters of the
commands, so a tool takes what `flag` takes, with the same limits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from io import TextIOWrapper
from typing import Any

import anyio
import click
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.text import TextReceiveStream
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, TextContent, ToolAnnotations
from mcp_types import Tool as ToolRecord

from flagcore import __version__
from flagcore.cli.main import flag
from flagcore.cli.options import Rate, Seconds
from flagcore.errors import UsageError
from flagcore.i18n import _

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
    if isinstance(kind, Seconds | Rate):
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


Progress = Callable[[float, float | None, str], Awaitable[None]]
ENDING_SECONDS = 60.0
"""Seconds that a command has to end after its call was cancelled, before it is killed."""
SEARCH = anyio.Lock()
"""Held by a search, also by a cancelled one until it has ended: the next one begins after it."""
START = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG: the command is interrupted if the server is killed
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(130)
from flagcore.cli import main
main()
"""
INSTRUCTIONS = (
    "Plans and tunes the training and serving of large language models. `estimate` and `size` predict without running "
    "anything; `tune` runs trials, often for hours, and can be cancelled and resumed; `export` writes start files."
)


MOST_LINE = 4 << 20


class _Lines(TextIOWrapper):
    """Standard input, which ends before a line of MOST_LINE characters."""

    ended = False
    """Whether it ended before such a line."""

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        line = super().readline(MOST_LINE)
        self.ended = len(line) >= MOST_LINE
        return "" if self.ended else line


def serve() -> None:
    """Answer the messages on stdin until it ends. Calls that still run are cancelled.

    Raises UsageError at a message of MOST_LINE characters.
    """
    lines = _Lines(sys.stdin.buffer, "utf-8", errors="replace")
    anyio.run(_serve, lines)
    if lines.ended:
        raise UsageError(_("a message has {most} characters or more; send less in one message", most=MOST_LINE))


async def _serve(lines: _Lines) -> None:
    server = Server[Any](
        "flagcore", version=__version__, instructions=INSTRUCTIONS, on_list_tools=_list, on_call_tool=_call
    )
    async with stdio_server(anyio.wrap_file(lines)) as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def _list(context: Any, request: Any) -> ListToolsResult:
    return ListToolsResult(
        tools=[
            ToolRecord(
                name=each.name,
                description=each.command.help,
                input_schema=each.input_schema(),
                output_schema=each.output_schema(),
                annotations=ToolAnnotations(read_only_hint=not each.writes, destructive_hint=False),
            )
            for each in TOOLS
        ]
    )


async def _call(context: Any, request: Any) -> CallToolResult:
    tool = next((each for each in TOOLS if each.name == request.name), None)
    if tool is None:
        return _failed(f"there is no tool {request.name!r}; use {', '.join(each.name for each in TOOLS)}")
    try:
        words = tool.command_line(request.arguments or {})
    except ValueError as error:
        return _failed(str(error))
    async with SEARCH if tool.name == "tune" else nullcontext():
        status, output, messages = await run(words, context.session.report_progress)
    result = output.splitlines() if tool.prints_paths else json.loads(output or "null")
    answer = {"result": result, "messages": messages}
    if status:
        return _failed("\n".join(messages) or f"`flag {tool.name}` ended with status {status}", result)
    return CallToolResult(content=[_text(answer)], structured_content=answer)


def _failed(message: str, result: Any = None) -> CallToolResult:
    """Return the result of a call that failed, with the command's message and what it printed before."""
    text = [TextContent(type="text", text=message), *([_text(result)] if result else [])]
    return CallToolResult(content=[*text], is_error=True)


def _text(data: Mapping[str, Any]) -> TextContent:
    return TextContent(type="text", text=json.dumps(data, ensure_ascii=False))


async def run(words: Sequence[str], progress: Progress) -> tuple[int, str, list[str]]:
    """Run `flag` with these words. Return its exit status, stdout, and the lines of stderr.

    `progress` is called with the number and the text of each line of stderr, as it comes. If the call is cancelled, the
    command is interrupted as by Ctrl-C, and this waits for its end.
    """
    output, lines = list[str](), list[str]()

    async def read(stream: ByteReceiveStream | None, take: Callable[[str], Awaitable[None]]) -> None:
        assert stream is not None
        with anyio.CancelScope(shield=True), suppress(anyio.ClosedResourceError):
            async for text in TextReceiveStream(stream, errors="replace"):
                await take(text)

    async def keep(text: str) -> None:
        output.append(text)

    async def tell(text: str) -> None:
        *new, last = (unended.pop() + text).split("\n")
        unended.append(last)
        for line in filter(str.strip, new):
            lines.append(line)
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                await progress(len(lines), None, line)

    unended = [""]
    argv = [sys.executable, "-c", START, str(os.getpid()), *words]
    async with (
        await anyio.open_process(argv, stdin=subprocess.DEVNULL, start_new_session=True) as process,
        anyio.create_task_group() as group,
    ):
        group.start_soon(read, process.stdout, keep)
        group.start_soon(read, process.stderr, tell)
        try:
            await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
    return process.returncode or 0, "".join(output), [*lines, *filter(str.strip, unended)]


async def _end(process: Process) -> None:
    """Interrupt a command that still runs, and wait for its end."""
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        with anyio.move_on_after(ENDING_SECONDS):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
