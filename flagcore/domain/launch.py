"""What a launcher is asked to start, how it ended, and why it failed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flagcore.domain.secrets import redact_text, secrets_in_environment
from flagcore.domain.trial import TimeLimit, TrialState
from flagcore.files import open_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One trial, ready to start without a shell.

    `folder` receives `stdout.log`, `stderr.log`, `launch.json` and the files of the program.
    `environment` is added to the launcher's own. `memory_limit_bytes` bounds the whole tree of
    processes on one node (None: no limit), `timeout_seconds` its wall-clock time, with the reason `timeout_because`,
    `disk_limit_bytes` the size of `folder`. `ready` are URLs of a server that is started for users: it is ready when
    all of them answer 200, and is reached at the root of the first. `{master_port}` in a word of a trial's `argv` is
    replaced by its MASTER_PORT. `own_script` is whether the user's own script is run, `leaves_out` what else a script
    runs of which this is only what it starts; None without one. `missing` says what the user must add before it can be
    started for real, empty for nothing. `hosts` are those on which it is started, each with its own `{node_rank}`; none
    for this machine. `client` is a program that runs here meanwhile, in `folder`: the trial ends with it. `warm` is
    whether the program, `python -m PACKAGE ...`, may be forked from a process that has imported its modules
    (`flagcore.launchers.template`).
    """

    argv: tuple[str, ...]
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    timeout_seconds: float = 300.0
    timeout_because: str = ""
    memory_limit_bytes: int | None = None
    disk_limit_bytes: int = 2 << 30
    ready: tuple[str, ...] = ()
    own_script: bool = False
    leaves_out: tuple[str, ...] | None = None
    missing: str = ""
    hosts: tuple[str, ...] = ()
    client: tuple[str, ...] = ()
    warm: bool = False


HOSTS = "hosts"
"""In a trial's folder: a folder of each host, with its files and logs."""


def host_folder(folder: str, hosts: Sequence[str], rank: int) -> str:
    """Return where the files of a host are mirrored: those of the first one in the trial's folder itself."""
    return os.path.join(folder, HOSTS, hosts[rank]) if rank else folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a launch ended. `code` is the exit status, negative for a signal.

    `ended_by` is None (the program itself), `timeout`, `memory`, `disk` (its folder exceeds the limit), `full_disk`
    (little space is left), `request`, `guard` if the guard process was killed, or `host` if a host was lost.
    `peak_memory_bytes` is the largest observed memory of all processes on a host. `detail` names the host that ended
    it, and its problem. `warm` is whether it was forked from a process that had imported its modules.
    """

    code: int
    ended_by: str | None
    duration_s: float
    peak_memory_bytes: int | None = None
    detail: str = ""
    warm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePattern:
    """A regular expression for one log line and what it means.

    The line is the trial's reason, or its group `reason` where there is one; `advice` is added to it. A `weak` pattern
    counts only if no other has a line: it is the consequence of another failure, such as the loss of a peer.
    """

    pattern: str
    state: TrialState
    advice: str = ""
    weak: bool = False


TAIL_BYTES = 256 * 1024
LONGEST_LINE, LONGEST_REASON = 4096, 300


_ENDED_BY = {
    "disk": (TrialState.FAILED, "its folder exceeded the disk limit; set auto_tuner.control.disk_limit to raise that"),
    "full_disk": (TrialState.FAILED, "the disk of its folder is full"),
    "guard": (TrialState.FAILED, "its guard process was killed"),
    "request": (TrialState.INTERRUPTED, "ended on request"),
}


_FULL_DISK = FailurePattern(pattern=r"No space left on device|Disk quota exceeded", state=TrialState.FAILED)
"""What the system says to any program (strerror of ENOSPC and EDQUOT)."""


def failure(
    ended: Exit, folder: str, patterns: Sequence[FailurePattern], limit: TimeLimit | None = None
) -> tuple[TrialState, str]:
    """Return the state of a failed trial and the reason from its logs in `folder`, with secrets redacted.

    `limit` is the time that it was given.
    """
    state, reason = classify(ended, log_tail(folder), patterns, limit.because if limit else "its time limit")
    return state, redact_text(reason, secrets_in_environment(os.environ))


def classify(
    ended: Exit, log: str, patterns: Sequence[FailurePattern], limit: str = "its time limit"
) -> tuple[TrialState, str]:
    """Return the state of a failed trial and its reason in one line. `limit` says where its time limit is from."""
    lines = [shown for line in log.splitlines() if (shown := _printable(line))]
    last = lines[-1][:LONGEST_REASON] if lines else "(none)"
    if ended.ended_by == "timeout":
        return TrialState.TIMED_OUT, f"still running after {ended.duration_s:.0f} s ({limit}); last line: {last}"
    if ended.ended_by == "memory":
        peak = (ended.peak_memory_bytes or 0) / 2**30
        return TrialState.OUT_OF_MEMORY, f"its processes grew to {peak:.2f} GiB, over the memory budget"
    if ended.ended_by == "host":
        return TrialState.FAILED, f"host {ended.detail}"[:LONGEST_REASON]
    if ended.ended_by in _ENDED_BY:
        return _ENDED_BY[ended.ended_by]
    for known in sorted(
        (*patterns, _FULL_DISK), key=lambda each: (each.weak, each.state is not TrialState.OUT_OF_MEMORY)
    ):
        for line in lines:
            if found := re.search(known.pattern, line):
                reason = _without(known.state, found.groupdict().get("reason") or line)
                return known.state, reason + (f" ({known.advice})" if known.advice else "")
    if ended.code in (-9, 137):
        return TrialState.OUT_OF_MEMORY, "killed by the system with SIGKILL: probably out of memory"
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return TrialState.FAILED, f"{how}; last line: {last}"


def _without(state: TrialState, line: str) -> str:
    """Return a line as a reason, without the name of the state that it starts with."""
    name, colon, rest = line[:LONGEST_REASON].partition(": ")
    return rest if colon and rest and name == state.value.replace("_", " ") else line[:LONGEST_REASON]


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line[:LONGEST_LINE]).strip()


def log_tail(folder: str) -> str:
    """Return the ends of stdout and stderr; bytes that are not UTF-8 are replaced."""
    parts = []
    for name in ("stdout.log", "stderr.log"):
        try:
            with open_regular(os.path.join(folder, name)) as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - TAIL_BYTES))
                parts.append(file.read().decode("utf-8", errors="replace"))
        except OSError:
            continue
    return "\n".join(parts)
