"""What a launcher starts, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flagcore.domain.trial import TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One trial, ready to start without a shell.

    `folder` receives `stdout.log`, `stderr.log`, `launch.json` and the files of the program.
    `environment` is added to the launcher's own. `memory_limit_bytes` bounds the whole tree of
    processes on one node (None: no limit), `timeout_seconds` its wall-clock time. `ready` are URLs of a server that is
    started for users: it is ready when all of them answer 200, and is reached at the root of the first.
    """

    argv: tuple[str, ...]
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    timeout_seconds: float = 300.0
    memory_limit_bytes: int | None = None
    disk_limit_bytes: int = 2 << 30
    ready: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a launch ended. `code` is the exit status, negative for a signal.

    `ended_by` is None (the program itself), `timeout`, `memory`, `disk`, `request`, or `guard` if the guard process was
    killed. `peak_memory_bytes` is the largest observed memory of all processes.
    """

    code: int
    ended_by: str | None
    duration_s: float
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePattern:
    """A regular expression for one log line and what it means. `advice` is added to the trial's reason."""

    pattern: str
    state: TrialState
    advice: str = ""
