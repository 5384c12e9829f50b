"""Everything flagcore raises on purpose, one exit code a family.

FlagError                     1  (a bug of ours; the only family that shows a traceback)
├── UsageError                2  wrong usage, or a run directory that cannot be used
│   ├── SpecError             2  a key, its value, the rule it breaks and the fix
│   ├── NotModelled           2  something that flagcore knows no formula for
│   ├── RunError              2  the run directory is held, changed, unreadable or full
│   └── LaunchError           2  a trial cannot be started: no such program, no free port, no disk
├── NothingFits               3  every candidate was ruled out for a stated reason
├── NoDevice                  4  no usable device or plugin
├── EveryTrialFailed          5  trials ran, none gave a measurement
└── Interrupted             130  the user or the system asked to stop
"""

from __future__ import annotations


class FlagError(Exception):
    """The root. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(FlagError):
    """The command or its input is wrong in a way that the user can mend."""

    exit_code = 2


class SpecError(UsageError):
    """One key of a spec breaks one rule. The fields are kept so that tests and tools can read them."""

    def __init__(self, *, key: str, problem: str, value: object = None, fix: str = "", file: str = "") -> None:
        self.key, self.value, self.problem, self.fix, self.file = key, value, problem, fix, file
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        shown = "" if self.value is None else f" = {_short(self.value)}"
        fix = f"; {self.fix}" if self.fix else ""
        return f"{where}{self.key}{shown} {self.problem}{fix}".strip()


class NotModelled(UsageError):
    """Something that is legal, but that flagcore knows no formula for: it is said, not guessed."""


class RunError(UsageError):
    """A run directory is held by another tuner, belongs to another spec, or cannot be written."""


class LaunchError(UsageError):
    """A trial cannot be started: its program, environment or folder is wrong, or the machine lacks something."""


class NothingFits(FlagError):
    """Every candidate was ruled out for a stated reason. A result, not a bug."""

    exit_code = 3


class NoDevice(FlagError):
    """No usable device, or no plugin that knows the chip."""

    exit_code = 4


class EveryTrialFailed(FlagError):
    """Trials ran, but none of them gave a measurement."""

    exit_code = 5


class Interrupted(FlagError):
    """Ctrl-C or a request to end. What was measured is kept."""

    exit_code = 130


def _short(value: object, limit: int = 80) -> str:
    """Return `value` as one line of at most `limit` characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return "..."
    return text if len(text) <= limit else text[: limit - 3] + "..."
