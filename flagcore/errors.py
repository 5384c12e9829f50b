"""The exceptions of flagcore and the exit code of each.

FlagError                     1  internal error, the only one that shows a traceback
├── UsageError                2  wrong usage, or a run directory that cannot be used
│   ├── SpecError             2  a key, its value, the rule it breaks and the fix
│   │   └── SpecErrors        2  several problems of one file
│   ├── NotModelled           2  a setup that flagcore cannot predict
│   ├── RunError              2  the run directory is locked, changed, unreadable or full
│   └── LaunchError           2  a trial cannot be started: no such program, no free port, no disk
│       └── HostLost          6  a host of the trials was lost, so the search is not finished
├── NothingFits               3  no candidate fits the devices and the rules
├── NoDevice                  4  no usable device or plugin
├── EveryTrialFailed          5  trials ran, none succeeded
└── Interrupted             130  interrupted by the user or the system
"""

from __future__ import annotations

from collections.abc import Sequence


class FlagError(Exception):
    """The base class. `exit_code` is the exit status of the command line."""

    exit_code = 1


class UsageError(FlagError):
    """The command line or its input is invalid."""

    exit_code = 2


class SpecError(UsageError):
    """An invalid key of a spec, with the fields `file`, `key`, `value`, `problem` and `fix`."""

    def __init__(self, *, key: str, problem: str, value: object = None, fix: str = "", file: str = "") -> None:
        self.key, self.value, self.problem, self.fix, self.file = key, value, problem, fix, file
        super().__init__(str(self))

    @property
    def problems(self) -> tuple[SpecError, ...]:
        """All problems of the file. A single SpecError contains only itself."""
        return (self,)

    def __str__(self) -> str:
        prefix = f"{self.file}: " if self.file else ""
        return f"{prefix}{self._text()}"

    def _text(self) -> str:
        value = "" if self.value is None else f" = {_short_repr(self.value)}"
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.key}{value} {self.problem}{fix}".strip()


class SpecErrors(SpecError):
    """Several invalid keys of one file. `problems` contains a SpecError for each key. Other fields are the first's."""

    def __init__(self, problems: Sequence[SpecError]) -> None:
        self._problems = tuple(each for problem in problems for each in problem.problems)
        first = self._problems[0]
        super().__init__(key=first.key, problem=first.problem, value=first.value, fix=first.fix, file=first.file)

    @property
    def problems(self) -> tuple[SpecError, ...]:
        """All problems of the file, in the order of its keys."""
        return self._problems

    def __str__(self) -> str:
        if len(self._problems) == 1:
            return super().__str__()
        prefix = f"{self.file}: " if self.file else ""
        lines = [f"  - {each._text() if each.file == self.file else each}" for each in self._problems]
        return "\n".join([f"{prefix}{len(lines)} problems", *lines])


def join_errors(problems: Sequence[SpecError]) -> SpecError:
    """Return one error that contains all `problems`, of which there must be at least one."""
    return problems[0] if len(problems) == 1 else SpecErrors(problems)


class NotModelled(UsageError):
    """A legal configuration that flagcore cannot predict."""


class RunError(UsageError):
    """A run directory is locked by another process, belongs to another spec, or cannot be written."""


class LaunchError(UsageError):
    """A trial cannot be started: a program, a port, disk space or a setting of the environment is missing."""


class HostLost(LaunchError):
    """A host was lost, and neither it nor another host could be used in time. Finished trials are saved."""

    exit_code = 6

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"host {host}: {problem}" if host else problem)
        self.host = host
        """The lost host. Empty if too few hosts are left."""


class NothingFits(FlagError):
    """Every candidate was removed. The message states how many candidates each rule removed."""

    exit_code = 3


class NoDevice(FlagError):
    """There is no usable device, or no usable plugin for the chip."""

    exit_code = 4


class EveryTrialFailed(FlagError):
    """Trials ran, but none succeeded."""

    exit_code = 5


class Interrupted(FlagError):
    """The user pressed Ctrl-C, or a signal ended the run. Finished trials are saved."""

    exit_code = 130


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return "..."
    return text if len(text) <= 80 else text[:77] + "..."
