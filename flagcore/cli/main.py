"""The group of commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

from flagcore import __version__
from flagcore.cli.options import say
from flagcore.errors import FlagError, SpecError
from flagcore.i18n import LANGUAGES, VARIABLE, choose, foreign, keep, said

COMMANDS = {
    "calibrate": "flagcore.cli.calibrate",
    "compare": "flagcore.cli.compare",
    "completion": "flagcore.cli.inspect",
    "devices": "flagcore.cli.inspect",
    "doctor": "flagcore.cli.inspect",
    "estimate": "flagcore.cli.estimate",
    "explain": "flagcore.cli.compare",
    "import": "flagcore.cli.import_",
    "plugins": "flagcore.cli.plugins",
    "probe": "flagcore.cli.probe",
    "report": "flagcore.cli.report",
    "run": "flagcore.cli.tune",
    "schema": "flagcore.cli.inspect",
    "tune": "flagcore.cli.tune",
}


class Commands(click.Group):
    """Imports a command's module only when the command, or the list of all, is wanted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is meant. Raises UsageError with the nearest for one that is none."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. A reader that has seen enough (`flag schema | head`) is no failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _forget_stdout()
            raise click.exceptions.Exit(0) from None


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="flag")
def flag() -> None:
    """Find the fastest way to train or serve a large language model on any AI chip.

    Data goes to stdout, talk to stderr. Exit status: 0 done, 1 a bug of flagcore, 2 wrong usage or spec,
    3 nothing fits, 4 no usable device or plugin, 5 every trial failed, 130 interrupted.
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup
            signal.signal(ending, _interrupt)
    _use_streams()
    _speak()
    try:
        status = flag.main(args=list(argv) if argv is not None else None, prog_name="flag", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()
    except FlagError as error:
        say(f"flag: {_told(error)}")
        status = error.exit_code
        if type(error).exit_code == 1:
            raise
    except click.exceptions.Exit as error:
        status = error.exit_code
    except click.ClickException as error:
        _show(error)
        status = 2
    except (KeyboardInterrupt, click.Abort):
        say("flag: interrupted")
        status = 130
    except BrokenPipeError:
        _forget_stdout()
        status = 0
    except OSError as error:
        if error.errno == errno.ENOENT and not error.filename:  # the working directory is gone
            say("flag: the working directory does not exist any more; start from another one")
            sys.exit(2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _forget_stdout()
        say(f"flag: the output cannot be written: {error.strerror}")
        status = 2
    except RecursionError:
        say("flag: the input is nested too deeply")
        status = 2
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)  # the verdict stands, however often Ctrl-C is pressed
    sys.exit(status or 0)


def _use_streams() -> None:
    """Let what a closed stream is told go nowhere, and show letters that the terminal lacks as their codes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the life of the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _speak() -> None:
    """Speak the language that the environment asks for; English where the streams lack its letters."""
    asked = os.environ.get(VARIABLE, "")
    if not choose(asked):
        say(f"flag: {VARIABLE} = {asked!r} is no language that flagcore speaks; use {' or '.join(LANGUAGES)}")
        sys.exit(2)
    click.Context.formatter_class = click.HelpFormatter
    if foreign():
        if not all(map(_has_chinese, (sys.stdout, sys.stderr))):
            choose("")
            return
        from flagcore.cli import help_text

        help_text.use()


def _has_chinese(stream: Any) -> bool:
    try:
        "中文".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError, AttributeError):
        return False
    return True


def _show(error: click.ClickException) -> None:
    """Tell a usage error."""
    if foreign():
        from flagcore.cli import help_text

        say(help_text.error_text(error))
    else:
        error.show()


def _forget_stdout() -> None:
    """Let what is still to be printed go nowhere: Python would complain of it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _told(error: FlagError) -> str:
    """Return an error in the user's language; what is wrong with a key is told part by part, its value as it is."""
    if not isinstance(error, SpecError) or not foreign():
        return str(error)
    place = said(error.key) if " " in error.key else error.key
    told = SpecError(key=place, value=error.value, problem=said(error.problem), file=error.file)
    text = f"{told}；{said(error.fix)}" if error.fix else str(told)
    keep([f"flag: {line}" if not number else line for number, line in enumerate(text.split("\n"))])
    return text
