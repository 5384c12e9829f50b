"""Runs or probes a trial after its devices become free."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from flagcore.contracts import Launcher, Platform, Problem
from flagcore.domain.secrets import redact_data
from flagcore.domain.spec import Task
from flagcore.domain.trial import PROBE, RUN, Trial, TrialState, checked
from flagcore.errors import HostLost, LaunchError, UsageError
from flagcore.i18n import N_, Message
from flagcore.tuner.devices import SETTLE_SECONDS, parallel_probe_ranks, wait_for_devices
from flagcore.tuner.parallel import Parallelism, with_hosts
from flagcore.tuner.probe import probe, trial_of_probe
from flagcore.tuner.shorten import SmallerTask
from flagcore.tuner.stages.launch import launch
from flagcore.tuner.stages.measure import measure, stop_above_s

if TYPE_CHECKING:
    from flagcore.tuner.store import OptunaStore  # importing optuna is slow


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""The seconds before the second attempt to start a trial if a host is lost, doubled before each further attempt, and
their maximum."""


def memory_needed(task: Task, trial: Trial) -> float:
    """Return the predicted memory that a trial needs on one node, in bytes. It is 0 if unknown.

    For servers and probes, which may use fewer devices, it is the memory of one device.
    """
    used_bytes = trial.predicted.device_used_bytes if trial.predicted else 0.0
    if not math.isfinite(used_bytes):
        return 0.0
    uses_whole_node = task.spec.work.has_steps and trial.fidelity != PROBE
    return used_bytes * (task.cluster.groups[0].devices_per_node if uses_whole_node else 1)


class TrialRunner(NamedTuple):
    """Runs and probes trials.

    `parallel`: its groups of devices run one trial at a time each. A trial without a group runs on the first one. Its
    pool interrupts trials when the search ends.
    """

    problem: Problem
    launcher: Launcher
    store: OptunaStore
    parallel: Parallelism

    def run(self, trial: Trial, best: Trial | None, on_wait: Callable[[Trial], object]) -> Trial:
        """Wait for the hosts and the devices of a trial, then run or probe it, and return it with its outcome.

        The trial is stopped early if it is clearly slower than `best`. `on_wait` is called with the reason whenever the
        trial has to wait. The trial fails and is inconclusive if its devices stay busy, if it runs out of memory while
        other programs use them, or if a host does not return within `cluster.wait_for_hosts` and the search can
        continue without it. Otherwise, raises HostLost. If a plugin fails to prepare the launch, only this trial fails.
        Raises LaunchError if no trial can be started.
        """
        spec, start, pause = self.parallel.groups[trial.group or 0].task.spec, time.monotonic(), FIRST_PAUSE
        max_time = math.inf if spec.control.max_time is None else spec.control.max_time - (trial.began_s or 0.0)
        longest = min(spec.cluster.wait_for_hosts, max_time)
        while True:
            try:
                trial = self._run(trial, best, on_wait)
                return replace(trial, reason=redact_data(trial.reason, spec.secrets)) if trial.reason else trial
            except HostLost as lost:
                seconds, reason = time.monotonic() - start, str(lost)
                if not lost.host:
                    raise
                if seconds >= longest:
                    self.launcher.give_up(lost.host)
                    usable_hosts = self.launcher.usable_hosts(spec.cluster.hosts)
                    if len(usable_hosts) < (spec.cluster.min_nodes or spec.trial_nodes):
                        raise
                    failed = replace(trial, state=TrialState.FAILED, reason=reason, duration_s=seconds)
                    return replace(failed, inconclusive=True, lost_host=lost.host)
                pause = min(pause, longest - seconds, LONGEST_PAUSE)
                text = N_("{reason}; next attempt in {seconds:.0f} s")
                on_wait(replace(trial, reason=Message(text, reason=reason, seconds=pause)))
                self.parallel.pool.pause(pause)
                pause *= 2

    def _run(self, trial: Trial, best: Trial | None, on_wait: Callable[[Trial], object]) -> Trial:
        """Wait for the devices of a trial, then run or probe it. Raises HostLost if it cannot be started on a host."""
        platform, start, pause = self.parallel.groups[trial.group or 0], time.monotonic(), self.parallel.pool.pause
        if trial.fidelity == RUN:
            if trial.fewer_nodes:
                platform = replace(platform, task=platform.task.on_nodes(trial.fewer_nodes))
            platform = with_hosts(platform, self.launcher)
        need_bytes, max_wait = memory_needed(platform.task, trial), platform.task.spec.control.device_wait
        outcome = replace(trial, state=TrialState.FAILED, reason="")
        busy = wait_for_devices(platform, need_bytes, max_wait, lambda why: on_wait(replace(trial, reason=why)), pause)
        if not busy:
            try:
                outcome = checked(self._measure(platform, trial, best) if trial.fidelity == RUN else self._probe(trial))
            except LaunchError:
                raise
            except UsageError as error:
                return replace(trial, state=TrialState.FAILED, reason=str(error))
            if outcome.state is not TrialState.OUT_OF_MEMORY:
                return outcome
            busy = wait_for_devices(platform, need_bytes, SETTLE_SECONDS, pause=pause)
            if not busy:
                return outcome
            busy = f"out of memory, and {busy}"
        seconds = time.monotonic() - start
        return replace(
            outcome, state=TrialState.FAILED, reason=f"device busy: {busy}", inconclusive=True, duration_s=seconds
        )

    def _measure(self, platform: Platform, trial: Trial, best: Trial | None) -> Trial:
        """Run a trial. If it fails after it was forked, run it once more as a new process."""
        assert trial.time_limit is not None
        folder, limit = self.store.folder(trial), trial.time_limit
        if trial.shortened:
            platform = replace(platform, task=platform.task.with_batch(trial.shortened.global_batch_size))
        trial_to_run = trial
        if trial.fewer_nodes:  # on fewer nodes, the candidate has fewer replicas
            smaller = SmallerTask(self.problem.platform, trial.fewer_nodes)
            columns = self.problem.columns_of(trial.candidate)
            trial_to_run = replace(trial, candidate=smaller.candidate(columns, self.problem.legality.axes))

        def started(*, cold: bool) -> Trial:
            with _pinned_to(platform.cores):
                candidate, stop_s = trial_to_run.candidate, stop_above_s(best)
                running = launch(platform, self.launcher, candidate, folder, limit, cold=cold, stop_above_s=stop_s)
                return measure(
                    running, platform, trial_to_run, folder, best, on_poll=partial(self.parallel.pool.pause, 0.0)
                )

        # Parallel trials start as new processes: a template process is forked for one trial at a time.
        outcome = started(cold=trial.group is not None)
        if outcome.state is TrialState.FAILED and outcome.warm and not outcome.inconclusive:
            forked, outcome = outcome, started(cold=True)  # the failure may be due to the fork
            reason = outcome.reason or f"it was started again, because its forked process failed: {forked.reason}"
            outcome = replace(
                outcome, reason=reason, duration_s=(forked.duration_s or 0.0) + (outcome.duration_s or 0.0)
            )
        return replace(outcome, candidate=trial.candidate)

    def _probe(self, trial: Trial) -> Trial:
        """Probe the ranks of a candidate."""
        assert trial.time_limit is not None
        platform = with_hosts(self.problem.platform, self.launcher)
        result = probe(
            platform,
            self.launcher,
            trial.candidate,
            self.store.folder(trial),
            trial.time_limit,
            finish=False,
            devices=parallel_probe_ranks(self.problem.platform),
        )
        predicted = self.problem.predictions.row(self.problem.row_of(trial.candidate))
        return trial_of_probe(platform, trial, result, predicted)


@contextmanager
def _pinned_to(cores: Sequence[int]) -> Iterator[None]:
    """Restrict this thread, and the processes that it starts, to `cores`. An empty sequence changes nothing."""
    if not cores:
        yield
        return
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)
