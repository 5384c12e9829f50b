"""The launch of a program, its exit, and the reason of a failure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flagcore.domain.files import open_regular
from flagcore.domain.secrets import redact_text, secrets_in_environment
from flagcore.domain.trial import TimeLimit, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A program to start, usually for one trial. It is started without a shell.

    `argv` may contain `{master_port}`, which is replaced by MASTER_PORT, and `{node_rank}`. `folder` receives
    `stdout.log`, `stderr.log`, `launch.json` and the files of the program. `environment` is added to the launcher's
    environment. `hosts` are the hosts on which it is started; empty: this machine. `on_host` has the launches of hosts
    with other chips; only their `argv` and `environment` are used. `client` is a program that runs in `folder` on this
    machine during the trial. The trial ends when it ends.

    `memory_limit_bytes` limits the memory of the whole process tree on one node (None: no limit), `timeout_seconds` the
    wall-clock time, for the reason `timeout_because`, and `disk_limit_bytes` the size of `folder`. With `warm`, the
    program (`python -m PACKAGE ...`) may be forked from a process that has imported its modules
    (`flagcore.launchers.template`).

    The other fields describe a launch for the user. A server is ready when all URLs of `ready` return status 200; the
    root of the first is its address. With `own_script`, `argv` runs the user's script. If `argv` is a command that the
    user's script starts, `leaves_out` lists the other commands of the script; None otherwise. `missing` describes what
    the user must add to the launch; empty: nothing. `sample` are arguments for it, with which the launch starts on
    generated data.

    A launch on several nodes is started on each with NODE_RANK, MASTER_ADDR and MASTER_PORT, which replace
    `{node_rank}`, `{master_addr}` and `{master_port}`.
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
    sample: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    on_host: Mapping[str, Launch] = field(default_factory=dict)
    client: tuple[str, ...] = ()
    warm: bool = False


HOSTS = "hosts"
"""The name of the folder in a trial's folder that has a folder with files and logs for each host."""


def host_folder(folder: str, hosts: Sequence[str], rank: int) -> str:
    """Return the folder for copies of the files of a host. For the first host it is the trial's folder itself."""
    return os.path.join(folder, HOSTS, hosts[rank]) if rank else folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The exit of a launch. `code` is the exit status, negative for a signal.

    `ended_by` is None if the program ended by itself, else `timeout`, `memory`, `disk` (its folder exceeded the limit),
    `full_disk` (little space is left), `request`, `guard` (the guard process was killed), or `host` (a host was lost,
    `lost_host`; `detail` has the problem). `peak_memory_bytes` is the largest observed memory of all processes on a
    host. `warm` is whether the program was forked from a process that had imported its modules.
    """

    code: int
    ended_by: str | None
    duration_s: float
    peak_memory_bytes: int | None = None
    detail: str = ""
    lost_host: str | None = None
    warm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePattern:
    """A regular expression for a log line, and the state of a trial whose log has such a line.

    The reason of the failure is the line, or the group `reason` of the pattern, followed by `advice`. A `weak` pattern
    describes a consequence of another failure, such as the loss of a peer. It is used only if no other pattern matches.
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
"""Matches the system's messages (strerror) for ENOSPC and EDQUOT."""


def failure(
    ended: Exit, folder: str, patterns: Sequence[FailurePattern], limit: TimeLimit | None = None
) -> tuple[TrialState, str]:
    """Return the state of a failed trial and the reason from its logs in `folder`, with secrets redacted.

    `limit` is the time limit of the trial.
    """
    state, reason = classify(ended, log_tail(folder), patterns, limit.because if limit else "its time limit")
    return state, redact_text(reason, secrets_in_environment(os.environ))


def classify(
    ended: Exit, log: str, patterns: Sequence[FailurePattern], limit: str = "its time limit"
) -> tuple[TrialState, str]:
    """Return the state of a failed trial and its reason in one line. `limit` is the source of its time limit."""
    lines = [shown for line in log.splitlines() if (shown := _printable(line))]
    last = f"last line: {lines[-1][:LONGEST_REASON]}" if lines else "its log is empty"
    if ended.ended_by == "timeout":
        return TrialState.TIMED_OUT, f"still running after {ended.duration_s:.0f} s ({limit}); {last}"
    if ended.ended_by == "memory":
        peak = (ended.peak_memory_bytes or 0) / 2**30
        return TrialState.OUT_OF_MEMORY, f"its processes used {peak:.2f} GiB, more than the memory budget"
    if ended.ended_by == "host":
        return TrialState.FAILED, f"host {ended.detail}"[:LONGEST_REASON]
    if ended.ended_by in _ENDED_BY:
        return _ENDED_BY[ended.ended_by]
    for pattern in sorted(
        (*patterns, _FULL_DISK), key=lambda each: (each.weak, each.state is not TrialState.OUT_OF_MEMORY)
    ):
        for line in lines:
            if match := re.search(pattern.pattern, line):
                reason = _without_state(pattern.state, match.groupdict().get("reason") or line)
                return pattern.state, reason + (f" ({pattern.advice})" if pattern.advice else "")
    if ended.code in (-9, 137):
        return TrialState.OUT_OF_MEMORY, "killed by the system with SIGKILL: probably out of memory"
    ending = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return TrialState.FAILED, f"{ending}; {last}"


def _without_state(state: TrialState, line: str) -> str:
    """Return a line without the name of `state` at its start."""
    name, colon, rest = line[:LONGEST_REASON].partition(": ")
    return rest if colon and rest and name == state.value.replace("_", " ") else line[:LONGEST_REASON]


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line[:LONGEST_LINE]).strip()


def log_tail(folder: str) -> str:
    """Return the last TAIL_BYTES of stdout and of stderr. Bytes that are not UTF-8 are replaced."""
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
