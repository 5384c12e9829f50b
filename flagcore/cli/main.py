"""The entry point `flag`: the group of commands, and the conversion of errors to messages and exit codes."""

import errno
import gc
import io
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint
from threading import active_count
from typing import Any, NoReturn

import click
from click import core, decorators, exceptions, formatting, parser, types

from flagcore import __version__
from flagcore.cli import options
from flagcore.cli.options import say
from flagcore.errors import FlagError, NoDevice
from flagcore.i18n import LANGUAGES, N_, VARIABLE, _, choose, choose_by_locale, did_you_mean, language, wrapped
from flagcore.loading.entry_points import installed, instance_of, load_checked
from flagcore.loading.limits import end_despite_threads

GROUPS = {
    N_("Start"): {"init": "specs", "import": "", "tune": "tune"},
    N_("Plan"): {"models": "", "estimate": "plan", "probe": "plan", "compare": "plan", "size": "", "goodput": ""},
    N_("Inspect"): {"explain": "plan", "report": "tune", "runs": "tune"},
    N_("Use the result"): {"run": "tune", "export": "tune", "manifest": ""},
    N_("Hardware"): {"devices": "machine", "doctor": "machine", "calibrate": "", "operators": ""},
    N_("Extend"): {"plugins": "machine", "schema": "machine", "completion": "machine", "mcp": ""},
}
"""The commands by what they are for, in the order of `flag --help`. The values are their modules in `flagcore.cli`,
or empty for commands of other distributions."""
OWN = {name: f"flagcore.cli.{module}" for group in GROUPS.values() for name, module in group.items() if module}
EXTRAS = {"manifest": "kubernetes", "mcp": "mcp", "goodput": "goodput"}
"""The commands that are not installed with flagcore, with their extra."""
SYNONYMS = {
    "plan": "estimate",
    "predict": "estimate",
    "optimize": "tune",
    "serve": "run",
    "start": "run",
    "list": "runs",
}
"""Names that users try, with the command that they mean."""


@cache
def others() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the commands of other distributions by name."""
    return {name: points for name, points in installed("flagcore.commands").items() if name not in OWN}


class Commands(options.Group):
    """A group that imports the module of a command only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in alphabetical order."""
        return sorted({*OWN, *others()})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups."""
        listed = {name for group in GROUPS.values() for name in group}
        for title, group in GROUPS.items():
            further = () if title != "Extend" else (name for name in others() if name not in listed)
            self.write_commands(ctx, formatter, _(title), [*group, *further])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with this name, or None if the name is unknown."""
        if cmd_name in OWN:
            return translated(getattr(import_module(OWN[cmd_name]), f"{cmd_name}_command"))
        if cmd_name not in others():
            return None
        try:
            return translated(load_checked("command", others()[cmd_name], partial(instance_of, click.Command)))
        except NoDevice:
            if ctx.resilient_parsing:  # the completion of other commands goes on
                return None
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. For an unknown name, raises UsageError with a close match."""
        if args and args[0] not in OWN and not args[0].startswith("-") and args[0] not in others():
            if extra := EXTRAS.get(args[0]):
                command = f'pip install "flagcore[{extra}]"'
                ctx.fail(_("{package} is not installed: run `{command}`", package=args[0], command=command))
            hint = did_you_mean(SYNONYMS.get(args[0], args[0]), self.list_commands(ctx))
            ctx.fail("; ".join(filter(None, [_("no such command {name!r}", name=args[0]), hint])))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. A closed pipe, as in `flag schema | head`, is not an error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _discard_stdout()
            raise click.exceptions.Exit(0) from None


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="flag")
def flag() -> None:
    """Find the fastest way to train or serve a large language model on any AI chip.

    Results go to stdout, logs go to stderr. Exit status: 0 success, 1 internal error, 2 invalid usage or spec,
    3 nothing fits, 4 no usable device or plugin, 5 every trial failed, 6 a host was lost, 130 interrupted.
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored by nohup, so it stays ignored
            signal.signal(number, signal.default_int_handler)
    gc.set_threshold(300_000, 20, 20)  # modules and plans have few cycles: looking for them takes a tenth of a plan
    _configure_streams()
    _choose_language()
    status = _run(list(sys.argv[1:] if argv is None else argv))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a late Ctrl-C does not change the exit status
    if argv is None:  # a caller in this process goes on
        gc.freeze()  # at its end, a process looks for cycles among all objects, which takes another tenth of a plan
        if active_count() > 1:
            end_despite_threads(status)
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """Run a command, and print its error, if any. Return the exit status. Bugs keep their traceback."""
    try:
        status = translated(flag).main(args=arguments, prog_name="flag", standalone_mode=False, obj=arguments)
        if sys.stdout:
            sys.stdout.flush()
        return status or 0
    except FlagError as error:
        say(f"flag: {error}")
        if type(error).exit_code == 1:
            raise
        return error.exit_code
    except click.ClickException as error:
        error.show()
    except (KeyboardInterrupt, click.Abort):
        say(_("flag: interrupted"))
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 0
    except OSError as error:
        if error.errno == errno.ENOENT and not error.filename:  # raised if the working directory was deleted
            say(_("flag: the working directory does not exist; change to another one"))
            return 2
        if error.errno == errno.ENAMETOOLONG:
            say(_("flag: {file} is too long for the path of a file", file=str(error.filename)[:60]))
            return 2
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _discard_stdout()
        say(_("flag: cannot write the output: {reason}", reason=error.strerror))
    except RecursionError:
        say(_("flag: the input is nested too deeply"))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "new thread" not in str(error):
            raise
        say(_("flag: out of memory or threads; free some, or raise the limits (`ulimit -v`, `ulimit -u`)"))
    return 2


def _configure_streams() -> None:
    """Redirect closed streams to /dev/null. Print characters outside a stream's encoding as escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the life of the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _choose_language() -> None:
    """Select the language of the environment. It is English if a stream cannot encode that language."""
    requested = os.environ.get(VARIABLE, "")
    if not requested:
        choose_by_locale()
    elif not choose(requested):
        say(f"flag: {VARIABLE} = {requested!r} is not a supported language; use {' or '.join(LANGUAGES)}")
        sys.exit(2)
    if language() != "en" and not all(map(_encodes_chinese, (sys.stdout, sys.stderr))):
        choose("en")


def _encodes_chinese(stream: Any) -> bool:
    try:
        "中文".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError, AttributeError):
        return False
    return True


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, because Python would otherwise report a failed flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


SENTENCE = re.compile(r"[^。.]*[。.]")


def translated(command: click.Command) -> click.Command:
    """Return a command whose help is in the selected language."""
    if language() == "en":
        return command
    for module in (core, decorators, exceptions, formatting, parser, types):
        vars(module)["_"] = _
    formatting.wrap_text = _wrap_text
    return _command(command)


def _command(command: click.Command) -> click.Command:
    translated_command = copy(command)
    paragraphs = map(_one_line, (command.help or "").split("\n\n"))
    translated_command.help = "\n\n".join(map(_, paragraphs))
    first = SENTENCE.match(translated_command.help)
    translated_command.short_help = first[0].rstrip("。.") if first else None
    translated_command.params = [_parameter(each) for each in command.params]
    if isinstance(translated_command, click.Group):
        translated_command.commands = {name: _command(each) for name, each in translated_command.commands.items()}
    return translated_command


def _parameter(parameter: click.Parameter) -> click.Parameter:
    translated_parameter = copy(parameter)
    if isinstance(translated_parameter, click.Option) and translated_parameter.help:
        translated_parameter.help = _(translated_parameter.help)
    return translated_parameter


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _wrap_text(
    text: str, width: int = 78, initial_indent: str = "", subsequent_indent: str = "", preserve_paragraphs: Any = False
) -> str:
    paragraphs = text.split("\n\n") if preserve_paragraphs else [text]
    lines = [wrapped(initial_indent + _one_line(each), width, subsequent_indent) for each in paragraphs]
    return "\n\n".join("\n".join(each) for each in lines)
