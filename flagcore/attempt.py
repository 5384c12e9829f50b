"""One trial: wait for its devices, then run or probe it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from flagcore.contracts import Launcher, Platform, TrialStore, Workload, require_prober
from flagcore.domain.trial import PROBE, RUN, Trial, TrialState
from flagcore.errors import LaunchError, UsageError
from flagcore.in_flight import InFlight
from flagcore.problem import Problem
from flagcore.stages.combine import combine, trial_of_probe
from flagcore.stages.launch import launch, with_hosts
from flagcore.stages.measure import measure
from flagcore.stages.probe import probe
from flagcore.stages.wait import SETTLE_SECONDS, wait_for_devices
from flagcore.trial_plan import candidate_to_run, memory_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """How trials are run or probed.

    A trial runs on the platform of its group of devices, alone on that of the first; `probe_devices` ranks are probed
    at once. `running` tells trials to end.
    """

    problem: Problem
    workload: Workload
    launcher: Launcher
    store: TrialStore
    groups: Sequence[Platform]
    probe_devices: int
    running: InFlight

    def run(self, trial: Trial, best: Trial | None, cold: bool, on_wait: Callable[[Trial], object]) -> Trial:
        """Return a trial with its outcome. It is stopped early if it is clearly slower than `best`.

        A `cold` one starts as a new program. `on_wait` is called with the reason if it waits for its devices. A plugin
        that fails to prepare it costs only this trial. Raises LaunchError if trials cannot be started.
        """
        try:
            return self._once_free(trial, best, cold, on_wait)
        except LaunchError:
            raise
        except UsageError as error:
            return replace(trial, state=TrialState.FAILED, reason=str(error))

    def _once_free(self, trial: Trial, best: Trial | None, cold: bool, on_wait: Callable[[Trial], object]) -> Trial:
        """Run or probe a candidate once its devices are free.

        If they stay busy, the trial fails and is inconclusive, as is one that ran out of memory beside other programs.
        """
        platform, began, pause = self.groups[trial.group or 0], time.monotonic(), self.running.pause
        if trial.fidelity == RUN:
            platform = with_hosts(_on_nodes(platform, trial), self.launcher)
        need, most = memory_needed(platform.task, trial), platform.task.spec.control.device_wait
        done = replace(trial, state=TrialState.FAILED, reason="")
        busy = wait_for_devices(platform, need, most, lambda why: on_wait(replace(trial, reason=why)), pause)
        if not busy:
            done = self._measure(platform, trial, best, cold) if trial.fidelity == RUN else self._probe(trial)
            if done.state is not TrialState.OUT_OF_MEMORY:
                return done
            busy = wait_for_devices(platform, need, SETTLE_SECONDS, pause=pause)
            if not busy:
                return done
            busy = f"out of memory, and {busy}"
        seconds = time.monotonic() - began
        return replace(
            done, state=TrialState.FAILED, reason=f"device busy: {busy}", inconclusive=True, duration_s=seconds
        )

    def _measure(self, platform: Platform, trial: Trial, best: Trial | None, cold: bool) -> Trial:
        """Run a candidate."""
        assert trial.time_limit is not None
        folder = self.store.folder(trial)
        if trial.shortened:
            platform = replace(platform, task=platform.task.with_batch(trial.shortened.global_batch_size))
        ran = replace(trial, candidate=candidate_to_run(self.problem, self.workload, trial))
        with _pinned(platform.cores):
            limit, launcher = trial.time_limit, self.launcher
            running = launch(platform, self.workload, launcher, ran.candidate, folder, limit, cold=cold)
            done = measure(self.running.watched(running), platform, self.workload, ran, folder, best)
        return replace(done, candidate=trial.candidate)

    def _probe(self, trial: Trial) -> Trial:
        """Probe a candidate rank by rank. Ranks that an interrupted probe of it finished are not probed again."""
        assert trial.time_limit is not None
        platform, row = self.problem.platform, self.problem.space.find(trial.candidate)
        assert row is not None, "every candidate that is probed is in the space"
        probes = [each for each in self.store.trials() if (each.candidate, each.fidelity) == (trial.candidate, PROBE)]
        probed = probe(
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
        combined = combine(self.problem.predictions.row(row), probed, platform.costs.memory, work_parts)
        return trial_of_probe(platform.task, trial, probed, combined)


def _on_nodes(platform: Platform, trial: Trial) -> Platform:
    """Return the platform of the nodes that a trial uses."""
    nodes = trial.shortened.nodes if trial.shortened else 0
    return replace(platform, task=platform.task.on_nodes(nodes)) if nodes else platform


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread, and the processes that it starts, on some CPU cores; on all that it has if there are none."""
    if not cores:
        yield
        return
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)
