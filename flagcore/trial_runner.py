"""Runs or probes one trial after its devices become free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from flagcore.contracts import Launcher, Platform, TrialStore, Workload, require_prober
from flagcore.domain.trial import PROBE, RUN, Trial, TrialState
from flagcore.errors import LaunchError, UsageError
from flagcore.problem import Problem
from flagcore.stages.combine import combine, trial_of_probe
from flagcore.stages.launch import launch, with_hosts
from flagcore.stages.measure import measure
from flagcore.stages.probe import probe
from flagcore.stages.wait import SETTLE_SECONDS, wait_for_devices
from flagcore.trial_plan import candidate_to_run, memory_needed
from flagcore.trial_pool import TrialPool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs and probes trials.

    `groups` has one platform for each group of devices. A trial without a group runs on the first. A probe runs up to
    `probe_devices` ranks in parallel. `pool` interrupts trials when the search ends.
    """

    problem: Problem
    workload: Workload
    launcher: Launcher
    store: TrialStore
    groups: Sequence[Platform]
    probe_devices: int
    pool: TrialPool

    def run(self, trial: Trial, best: Trial | None, cold: bool, on_wait: Callable[[Trial], object]) -> Trial:
        """Return a trial with its outcome. It is stopped early if it is clearly slower than `best`.

        A `cold` trial starts as a new process instead of a fork. `on_wait` is called with the reason if the trial waits
        for its devices. If a plugin fails to prepare the launch, only this trial fails. Raises LaunchError if no trial
        can be started.
        """
        try:
            return self._run_when_free(trial, best, cold, on_wait)
        except LaunchError:
            raise
        except UsageError as error:
            return replace(trial, state=TrialState.FAILED, reason=str(error))

    def _run_when_free(self, trial: Trial, best: Trial | None, cold: bool, on_wait: Callable[[Trial], object]) -> Trial:
        """Wait for the devices of a trial, then run or probe it.

        The trial fails and is inconclusive if its devices stay busy, or if it runs out of memory while other programs
        use them.
        """
        platform, start, pause = self.groups[trial.group or 0], time.monotonic(), self.pool.pause
        if trial.fidelity == RUN:
            platform = with_hosts(_on_nodes(platform, trial), self.launcher)
        need_bytes, max_wait = memory_needed(platform.task, trial), platform.task.spec.control.device_wait
        outcome = replace(trial, state=TrialState.FAILED, reason="")
        busy = wait_for_devices(platform, need_bytes, max_wait, lambda why: on_wait(replace(trial, reason=why)), pause)
        if not busy:
            outcome = self._measure(platform, trial, best, cold) if trial.fidelity == RUN else self._probe(trial)
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

    def _measure(self, platform: Platform, trial: Trial, best: Trial | None, cold: bool) -> Trial:
        """Run a trial. If it fails after a fork, it starts once more as a new process."""
        assert trial.time_limit is not None
        folder, limit = self.store.folder(trial), trial.time_limit
        if trial.shortened:
            platform = replace(platform, task=platform.task.with_batch(trial.shortened.global_batch_size))
        ran = replace(trial, candidate=candidate_to_run(self.problem, self.workload, trial))

        def started(*, cold: bool) -> Trial:
            with _pinned_to(platform.cores):
                running = launch(platform, self.workload, self.launcher, ran.candidate, folder, limit, cold=cold)
                return measure(self.pool.interruptible(running), platform, self.workload, ran, folder, best)

        outcome = started(cold=cold)
        if outcome.state is TrialState.FAILED and outcome.warm and not outcome.inconclusive:
            forked, outcome = outcome, started(cold=True)  # the fork may have failed, and not the candidate
            reason = outcome.reason or f"it was started again, because its forked process failed: {forked.reason}"
            outcome = replace(
                outcome, reason=reason, duration_s=(forked.duration_s or 0.0) + (outcome.duration_s or 0.0)
            )
        return replace(outcome, candidate=trial.candidate)

    def _probe(self, trial: Trial) -> Trial:
        """Probe the ranks of a candidate. Results of an earlier, interrupted probe of the candidate are reused."""
        assert trial.time_limit is not None
        platform, row = with_hosts(self.problem.platform, self.launcher), self.problem.space.find(trial.candidate)
        assert row is not None, "every candidate that is probed is in the space"
        probes = [each for each in self.store.trials() if (each.candidate, each.fidelity) == (trial.candidate, PROBE)]
        result = probe(
            platform,
            self.workload,
            self.launcher,
            trial.candidate,
            self.store.folder(trial),
            trial.time_limit,
            earlier=[self.store.folder(each) for each in probes if each.state is TrialState.INTERRUPTED],
            finish=False,
            devices=self.probe_devices,
        )
        work_parts = require_prober(self.workload).work_parts
        combined = combine(self.problem.predictions.row(row), result, platform.costs.memory, work_parts)
        return trial_of_probe(platform.task, trial, result, combined)


def _on_nodes(platform: Platform, trial: Trial) -> Platform:
    """Return the platform of the nodes that a trial uses."""
    nodes = trial.shortened.nodes if trial.shortened else 0
    return replace(platform, task=platform.task.on_nodes(nodes)) if nodes else platform


@contextmanager
def _pinned_to(cores: Sequence[int]) -> Iterator[None]:
    """Restrict this thread, and the processes that it starts, to `cores`. Without cores, change nothing."""
    if not cores:
        yield
        return
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)
