"""Runs a job until all its steps are done: it is started again after failures, with spares in the places of lost hosts.

On one host, torchrun starts its processes again in place (PET_MAX_RESTARTS is its option --max-restarts). On several
hosts, the agents start all torchruns again: with the static rendezvous, which keeps the order of the hosts, a torchrun
does not learn that the processes of another one have failed. A job whose processes hang prints nothing: after a time
without output it is ended on all hosts, and started again.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flagcore.domain.files import read_regular
from flagcore.domain.launch import Exit, Launch
from flagcore.errors import HostLost, UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.script import ALONE
from flagcore_hosts.checks import warn
from flagcore_hosts.connection import LOGS
from flagcore_hosts.launching import HostsRunning, HostTrials

PERIOD_SECONDS = 0.5
WAIT_SECONDS, PAUSE_SECONDS = 300.0, 5.0
"""How long to wait for lost hosts if there is no spare: as by default in a search; and the pause between attempts."""
STALL_SECONDS, SILENCES = 1800.0, 10.0
"""How long a job may print nothing by default: as long as collectives of torch wait (`default_pg_timeout`), and at
least so many times as long as it did before."""
LATE_SECONDS = 2.0
"""Lines of ended processes arrive at most so late; those of new ones come later, because they first import torch."""
STEP = re.compile(rb"(?i)\b(?:iteration|iter|step)s?\b[\s:=#]*(\d+)")
"""A step that is done, in the logs of Megatron-LM, torchtitan, DeepSpeed and most others."""
NO_STEP = re.compile(rb"(?i)checkpoint|ckpt|sav(?:e|ing)|load|resum")
FAILED_RANK = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""torchrun's message, once for each failure of its processes (torch/distributed/elastic/multiprocessing/api.py)."""

SAVES = re.compile(
    r"(?m)--[\w.-]*(?<!async-)(save|output|checkpoint|ckpt)([._-](dir|path|folder|enable|steps))?(?=[\s=]|$)"
    r"|^\s*(output_dir|save_steps|save_strategy)\s*:"
)
"""An option that turns on checkpoints: of Megatron-LM, torchtitan, transformers and most others."""
SCRIPT = re.compile(r"[\w./-]+\.(?:sh|bash|ya?ml)\b")
LONGEST_SCRIPT = 1 << 20
"""Bytes of a script, or of the configuration of a program, that are read."""


def no_checkpoints(launch: Launch) -> str:
    """Return a warning if a command, or a file that it names, does not save and load checkpoints for a restart."""
    text = " ".join((*launch.argv, *launch.sample))
    for name in SCRIPT.findall(text):
        with suppress(OSError, UnicodeDecodeError):
            text += "\n" + read_regular(Path(launch.directory or ".", name), max_bytes=LONGEST_SCRIPT).decode()
    loads = re.search("--(load|resume)", text) or not re.search(r"--save[\s=]", text)
    if loads and SAVES.search(text):
        return ""
    text = N_("a restart begins at step 0 unless the program saves and loads checkpoints by itself; add {options}")
    return _(text, options="--save, --load" if loads else "--load")


@dataclass
class Progress:
    """What the output says about the steps of a job, and about failures that torchrun handles in place."""

    is_alone: bool = True
    """Whether the job has one host, on which torchrun starts its processes again."""
    in_place: int = 0
    """Restarts by torchrun."""
    last: int | None = None
    """The latest step, of this start or the one before."""
    done: int = 0
    """Lines with a step, of all starts."""
    repeated: int = 0
    """Steps that were done twice or more."""
    failed_at: float | None = None
    """When the last failure was noticed, on the monotonic clock. None if a step has followed it."""
    late_s: float = 0.0
    """How long the output of ended processes may still arrive."""
    parts: dict[int, bytes] = field(default_factory=dict)
    """The incomplete last line of each log."""

    def read(self, log: int, data: bytes) -> Iterator[str]:
        """Take in new output of a log. Yield lines for the user."""
        *lines, self.parts[log] = (self.parts.get(log, b"") + data).split(b"\n")
        for line in lines:
            if self.is_alone and (failed := FAILED_RANK.search(line)):
                self.in_place += 1
                self.fail(LATE_SECONDS)
                text = N_("flag: rank {rank} of the host failed (exit code {code})")
                yield _(text, rank=int(failed[2]), code=int(failed[1]))
            elif (found := STEP.search(line)) and not NO_STEP.search(line):
                yield from self._step(int(found[1]))

    def fail(self, late_s: float = 0.0) -> None:
        """Note that processes of the job have failed, and that their output may still arrive for `late_s` seconds."""
        self.failed_at, self.late_s = time.monotonic(), late_s

    def end(self, code: int) -> None:
        """Note that the command has ended with a status. After its last failure, torchrun started nothing again."""
        if code > 0 and self.failed_at is not None and self.late_s:
            self.in_place -= 1
        self.parts.clear()
        self.fail()

    def _step(self, step: int) -> Iterator[str]:
        since, self.done = math.inf if self.failed_at is None else time.monotonic() - self.failed_at, self.done + 1
        if since < self.late_s:
            self.last = max(step, self.last or 0)
            return
        if self.failed_at is not None and self.last is not None:
            lost = max(0, self.last - step + 1)
            self.repeated += lost
            text = N_("flag: training continues at step {step}, {seconds:.0f} s after the failure; steps lost: {lost}")
            yield _(text, step=step, seconds=since, lost=lost)
        self.last, self.failed_at = step, None


@dataclass
class Silence:
    """Decides whether a job hangs: it prints nothing for longer than `limit_s`."""

    given_s: float | None = None
    """The time that the user set. None: STALL_SECONDS, or SILENCES times `longest_s`."""
    longest_s: float = 0.0
    """The longest time between two outputs."""
    factor: float = 1.0
    """Is doubled when a start hangs before its first step. A start that only takes long is then not ended for ever."""
    heard_at: float = 0.0
    """When the job started or printed something, on the monotonic clock."""

    @property
    def limit_s(self) -> float:
        """Seconds without output after which the job hangs."""
        return self.factor * (self.given_s or max(STALL_SECONDS, SILENCES * self.longest_s))

    def lasts(self, *, heard: bool) -> float:
        """Return the seconds since the last output. `heard`: whether there is new output."""
        seconds = time.monotonic() - self.heard_at
        if heard:
            self.longest_s, self.heard_at = max(self.longest_s, seconds), time.monotonic()
        return 0.0 if heard else seconds


def run_job(
    launcher: HostTrials,
    job: Launch,
    users: Mapping[str, str],
    restarts: int,
    spares: Sequence[str] = (),
    stall_s: float | None = None,
) -> int:
    """Run a job as `Launcher.run_job` describes. Raises UsageError for spares that it cannot use."""
    count, names = len(job.hosts), [each.rpartition("@")[2] for each in spares]
    found = tuple(each for each in launcher.find_hosts(count) if each not in names) or job.hosts
    _check(launcher, found[:count], names, restarts, stall_s)
    users = {**users, **{each.rpartition("@")[2]: each.rpartition("@")[0] for each in spares if "@" in each}}
    hosts = launcher.hold((*found[:count], *names), users)
    if restarts and (advice := no_checkpoints(job)):
        warn([f"flag: {advice}"])
    progress, used, starts = Progress(is_alone=bool(restarts) and count == 1), 0, 0
    silence = Silence(stall_s if restarts else math.inf)
    with launcher.keep_agents():
        while True:
            variables = {"PET_MAX_RESTARTS": str(restarts - used), **ALONE} if progress.is_alone else {}
            printing = {"PYTHONUNBUFFERED": "1"} if restarts else {}
            given = replace(job, environment={**printing, **variables, **job.environment})
            running = _start(launcher, given, hosts, wait=starts > 0)
            hosts = (*running.launch.hosts, *(each for each in hosts if each not in running.launch.hosts))
            ended = _follow(running, progress, silence)
            if not (ended.code or ended.ended_by):
                break
            starts += 1
            progress.end(ended.code)
            used = starts + progress.in_place
            reason = f"host {ended.detail}" if ended.lost_host else _reason(ended)
            if used > restarts:
                if restarts:
                    warn([_("flag: no restart is left of {restarts}: {reason}", restarts=restarts, reason=reason)])
                if ended.lost_host:
                    raise HostLost("", reason)
                return (ended.code if ended.code >= 0 else 128 - ended.code) or 1
            if ended.lost_host:
                launcher.failures[ended.lost_host] = 0  # it may return: only the time of its last failure counts
            warn([_("flag: restart {number} of {restarts}: {reason}", number=used, restarts=restarts, reason=reason)])
    if used := starts + progress.in_place:
        text = N_("flag: the job is complete after {count} restarts; steps that ran again: {lost}")
        warn([_(text, count=used, lost=progress.repeated)])
    return 0


def _check(
    launcher: HostTrials, hosts: Sequence[str], spares: Sequence[str], restarts: int, stall_s: float | None
) -> None:
    """Raise UsageError for spares without restarts, of a job on this machine, or that are hosts of the job."""
    names = ",".join(spares)
    if stall_s and not restarts:
        raise UsageError(_("--stall: a job that hangs is ended to start it again; add --restarts N"))
    if spares and not restarts:
        raise UsageError(_("--spares = {names}: a spare needs a restart; add --restarts N", names=names))
    if spares and launcher.replaces_hosts:
        text = N_("--spares = {names}: {launcher} replaces lost hosts itself; omit it")
        raise UsageError(_(text, names=names, launcher=launcher.name))
    if spares and not launcher.starts_elsewhere:
        raise UsageError(_("--spares = {names}: the job runs on this machine alone; omit it", names=names))
    if twice := [each for each in spares if each in hosts or spares.count(each) > 1]:
        raise UsageError(_("--spares = {name}: is a host of the job already; name another one", name=twice[0]))


def _reason(ended: Exit) -> str:
    what = _("exit code {code}", code=ended.code) if ended.code >= 0 else _("signal {number}", number=-ended.code)
    return ": ".join(filter(None, (ended.detail, ended.ended_by or what)))


def _start(launcher: HostTrials, job: Launch, hosts: Sequence[str], *, wait: bool) -> HostsRunning:
    """Start a job on the first hosts that are usable. With `wait`, wait for lost ones. Raises HostLost, LaunchError."""
    count, deadline = len(job.hosts), time.monotonic() + WAIT_SECONDS
    while True:
        chosen = launcher.choose_hosts(hosts, count)
        moves = [f"{old} -> {new}" for old, new in zip(hosts, chosen, strict=False) if old != new]
        if moves:
            warn([_("flag: a spare replaces a lost host: {moves}", moves=", ".join(moves))])
        hosts = (*chosen, *(each for each in hosts if each not in chosen))
        try:
            return launcher.start(replace(job, hosts=chosen))
        except HostLost as lost:
            if not lost.host or not wait or time.monotonic() > deadline:
                raise
            launcher.failures[lost.host] = 0
            warn([_("flag: {reason}; next attempt in {seconds:.0f} s", reason=lost, seconds=PAUSE_SECONDS)])
            time.sleep(PAUSE_SECONDS)


def _follow(running: HostsRunning, progress: Progress, silence: Silence) -> Exit:
    """Print the output of a job until it ends or hangs, and return how it ended.

    A job that hangs is ended, and so is one in which this is interrupted.
    """
    out, err = (os.path.join(running.launch.folder, name) for name in LOGS)
    silence.heard_at = time.monotonic()
    try:
        with open(out, "rb") as output, open(err, "rb") as errors:
            ended, done = None, progress.done
            while ended is None:
                ended = running.wait(PERIOD_SECONDS)
                heard = False
                for number, (log, stream) in enumerate(((output, sys.stdout), (errors, sys.stderr))):
                    data = log.read()
                    heard = heard or bool(data)
                    stream.buffer.write(data)
                    stream.flush()
                    warn(progress.read(number, data))
                if ended is None and (seconds := silence.lasts(heard=heard)) > silence.limit_s:
                    silence.factor *= 1.0 if progress.done > done else 2.0
                    ended = _end_hung(running, seconds)
        return ended
    finally:
        running.stop()


def _end_hung(running: HostsRunning, seconds: float) -> Exit:
    """End a job that has printed nothing for some seconds, and return how it ended."""
    text = N_("flag: nothing was printed for {seconds:.0f} s; the job hangs, and is ended (--stall)")
    warn([_(text, seconds=seconds)])
    ended = running.stop()
    has_failed = (ended.code or ended.ended_by) and not ended.lost_host
    return replace(ended, code=-signal.SIGTERM, ended_by="stall", detail="") if has_failed else ended
