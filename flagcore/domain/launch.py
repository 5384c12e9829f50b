"""The launch of a program, how it ended, and why it failed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flagcore.domain.chip import USUAL_DEVICES
from flagcore.domain.files import open_regular
from flagcore.domain.secrets import redact_text
from flagcore.domain.trial import TimeLimit, TrialState
from flagcore.i18n import N_


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A program to start, usually for one trial. It is started without a shell.

    `argv`: the command. On several nodes, the launcher starts it on each node with the variables NODE_RANK, MASTER_ADDR
    and MASTER_PORT. Their values replace the placeholders `{node_rank}`, `{master_addr}` and `{master_port}`.
    `folder`: the folder for `stdout.log`, `stderr.log`, `launch.json` and the files of the program.
    `environment`: variables that are added to the launcher's environment.
    `directory`: the working directory.
    `hosts`: the hosts on which the program is started. Empty means this machine.
    `on_host`: the launch of each host, if hosts differ in command or variables. Only `argv` and `environment` are used.
    `client`: a program that runs in `folder` on this machine during the trial. The trial ends when the client ends.
    `timeout_seconds`: the limit of the wall-clock time.
    `timeout_because`: how this limit was derived, in words.
    `memory_limit_bytes`: the memory limit of the whole process tree on one node. None means no limit.
    `disk_limit_bytes`: the size limit of `folder`.
    `warm`: whether the program (`python -m PACKAGE ...`) may be forked from a process that has already imported its
    modules (`flagcore.launchers.template`).

    The other fields describe the launch for the user:

    `script`: the text of the shell script that `argv` runs, if flagcore wrote it. Exports contain the text itself.
    `ready`: a server is ready when all these URLs return status 200. Its address is the root of the first URL.
    `own_script`: whether `argv` runs the user's script.
    `leaves_out`: the other commands of the user's script, if `argv` is one command of it. None otherwise.
    `missing`: what the user must add to the command. Empty if nothing is missing.
    `sample`: arguments with which the command runs on generated data, to be added instead of what is missing.
    """

    argv: tuple[str, ...]
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    timeout_seconds: float = 300.0
    timeout_because: str = ""
    memory_limit_bytes: int | None = None
    disk_limit_bytes: int = 2 << 30
    script: str = ""
    ready: tuple[str, ...] = ()
    own_script: bool = False
    leaves_out: tuple[str, ...] | None = None
    missing: str = ""
    sample: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    on_host: Mapping[str, Launch] = field(default_factory=dict)
    client: tuple[str, ...] = ()
    warm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A program that a user's command or file starts.

    `words`: the command.
    `image`: the container image if its entry point is not known. `words` are its arguments then.
    `envs`: the environment variables whose values are known. `unset`: those that are read, but are not set.
    `devices`: the number of devices per host. None if it is unknown; `usual_devices` is that of most hosts of the chip.
    `hosts`, `instances`: the number of hosts, and of copies of the program.
    `version`: the engine release in the tag of the container image.
    `script`: the script that contains the command.
    `job`: the environment variables that the batch system sets for the script.
    `left_out`: the options and keys beside the command that are not read, with their values. `absent`: those of these
    that name objects outside of the input, which set variables.
    `files`: the text of files that are mounted into the program's container, by path.
    `role`: `prefill` or `decode` if the program does only that; `prefill`: the program that prefills for this one.
    """

    words: tuple[str, ...] = ()
    image: str = ""
    envs: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    devices: int | None = None
    usual_devices: int = USUAL_DEVICES
    hosts: int = 1
    instances: int = 1
    version: str = ""
    script: tuple[str, ...] = ()
    job: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    role: str = ""
    prefill: Start | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """Identical servers of a candidate that has several kinds of servers.

    `launch`: starts one server. Its environment may contain the placeholder `{own_address}`.
    `devices`: the number of devices of one server on each of its hosts.
    `replicas`: the number of servers.
    `hosts`: the number of hosts of one server.
    `others`: the command on the hosts of a server except the first, with the placeholders `{own_address}` for the
    address of the first one, and `{node_rank}`.
    """

    name: str
    launch: Launch
    devices: int
    replicas: int
    hosts: int = 1
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroups:
    """All kinds of servers of a candidate that one launch cannot describe.

    The host name of server N of a group is JOB-GROUP-N.JOB-GROUP.

    `front`: starts the router in front of the servers. None if they need no router.
    """

    groups: tuple[ServerGroup, ...]
    front: Launch | None


PORT = "{port}"
"""Placeholder for the port of a server in its command. In scripts, PORT_VARIABLE has it."""
PORT_VARIABLE = "PORT"
HOSTS = "hosts"
"""The subfolder of a trial's folder that contains one folder per host, with the host's files and logs."""


def host_folder(folder: str, hosts: Sequence[str], rank: int) -> str:
    """Return the folder for the files of the host with this `rank`. For rank 0, it is the trial's folder itself."""
    return os.path.join(folder, HOSTS, hosts[rank]) if rank else folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the processes of a launch ended.

    `code`: the exit status. It is negative if a signal ended the program.
    `ended_by`: None if the program ended by itself. Otherwise `timeout`, `memory`, `disk` (its folder exceeded the
    limit), `full_disk` (little space was left), `stopped` (a process was stopped by a signal for too long), `request`,
    `guard` (the guard process was killed), or `host` (a host was lost).
    `peak_memory_bytes`: the largest observed memory of all processes on one host.
    `detail`: what happened to the lost host, `lost_host`. Otherwise, the host that failed, and the stopped process.
    `warm`: whether the program was forked from a process that had already imported its modules.
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
    """A regular expression for log lines, and the state of a failed trial whose log has a matching line.

    The reported reason is the line, or the group `reason` of the pattern if it has one, followed by `advice`.

    `weak`: whether the line may be a consequence of another failure, such as the loss of a peer. A weak pattern is used
    only if no other pattern matches.
    `general`: whether the pattern matches any error. It ignores lines that a weak pattern matches.
    """

    pattern: str
    state: TrialState
    advice: str = ""
    weak: bool = False
    general: bool = False


INCONCLUSIVE = ("host", "guard", "stopped")
"""The values of `Exit.ended_by` that say nothing about the candidate, which is tried again."""
TAIL_BYTES = 256 * 1024
LONGEST_LINE, LONGEST_REASON = 4096, 300


_FULL_DISK = FailurePattern(pattern=r"No space left on device|Disk quota exceeded", state=TrialState.FAILED)
"""Matches the system's messages (strerror) for ENOSPC and EDQUOT."""


def failure(
    ended: Exit, folder: str, patterns: Sequence[FailurePattern], secrets: Sequence[str], limit: TimeLimit | None = None
) -> tuple[TrialState, str]:
    """Return the state of a failed trial, and the reason from its logs in `folder` with secrets redacted.

    `secrets`: values that the reason must not contain, the longest first.
    `limit`: the time limit of the trial. The reason for a timeout states where the limit comes from.
    """
    return classify(ended, log_tail(folder), patterns, limit.because if limit else "its time limit", secrets)


def classify(
    ended: Exit, log: str, patterns: Sequence[FailurePattern], limit: str = "its time limit", known: Sequence[str] = ()
) -> tuple[TrialState, str]:
    """Return the state of a failed trial, and the reason in one line with secrets redacted.

    `limit`: where the trial's time limit comes from, in words. `known`: secrets, as for `failure`.
    """
    printable = (
        "".join(each if each.isprintable() else " " for each in line[:LONGEST_LINE]) for line in log.splitlines()
    )
    lines = [line.strip() for line in printable if line.strip()]
    last = f"last line: {redact_text(lines[-1], known)[:LONGEST_REASON]}" if lines else "its log is empty"
    peak = (ended.peak_memory_bytes or 0) / 2**30
    causes = {
        "timeout": (TrialState.TIMED_OUT, f"still running after {ended.duration_s:.0f} s ({limit}); {last}"),
        "memory": (TrialState.OUT_OF_MEMORY, f"its processes used {peak:.2f} GiB, more than the memory budget"),
        "host": (TrialState.FAILED, redact_text(f"host {ended.detail}", known)[:LONGEST_REASON]),
        "stopped": (TrialState.FAILED, f"{ended.detail} was stopped by a signal (SIGSTOP) and did not continue"),
        "disk": (
            TrialState.FAILED,
            N_("its folder exceeded the disk limit; set auto_tuner.control.disk_limit to raise that"),
        ),
        "full_disk": (TrialState.FAILED, N_("the disk of its folder is full")),
        "guard": (TrialState.FAILED, N_("its guard process was killed")),
        "request": (TrialState.INTERRUPTED, N_("ended on request")),
    }
    if ended.ended_by in causes:
        return causes[ended.ended_by]
    if found := first_match(lines, (*patterns, _FULL_DISK)):
        pattern, match = found
        line = redact_text(match.groupdict().get("reason") or match.string, known)[:LONGEST_REASON]
        reason = line.removeprefix(f"{pattern.state.value.replace('_', ' ')}: ") or line
        return pattern.state, reason + (f" ({pattern.advice})" if pattern.advice else "")
    if ended.code in (-9, 137):
        return TrialState.OUT_OF_MEMORY, N_("killed by the system with SIGKILL: probably out of memory")
    ending = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return TrialState.FAILED, f"{ending}; {last}"


def first_match(
    lines: Sequence[str], patterns: Sequence[FailurePattern]
) -> tuple[FailurePattern, re.Match[str]] | None:
    """Return the pattern that explains a failure with its match in `lines`, or None if no pattern matches.

    Patterns for out of memory are tried first, and weak ones last.
    """
    weak_patterns = [each.pattern for each in patterns if each.weak]
    for each in sorted(
        patterns, key=lambda each: (each.weak, each.general, each.state is not TrialState.OUT_OF_MEMORY)
    ):
        for line in lines:
            is_consequence = each.general and any(re.search(weak, line) for weak in weak_patterns)
            if not is_consequence and (match := re.search(each.pattern, line)):
                return each, match
    return None


def log_tail(folder: str) -> str:
    """Return the last TAIL_BYTES bytes of the stdout log and of the stderr log. Invalid UTF-8 is replaced."""
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
