"""Plans trials, runs or probes them after their devices become free, and runs several of them in parallel."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from flagcore.contracts import Launcher, Platform, Problem
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Task, TrainSpec
from flagcore.domain.trial import PROBE, RUN, Role, Shortened, TimeLimit, Trial, TrialState
from flagcore.errors import HostLost, LaunchError, UsageError
from flagcore.i18n import N_, Message
from flagcore.tuner.devices import SETTLE_SECONDS, wait_for_devices
from flagcore.tuner.stages.launch import launch, with_hosts
from flagcore.tuner.stages.limit import time_limit
from flagcore.tuner.stages.measure import measure, stop_above_s
from flagcore.tuner.stages.predict import predict_stage_layers, with_figures
from flagcore.tuner.stages.probe import probe, ranks_to_probe, trial_of_probe
from flagcore.tuner.stages.shorten import SmallerTask, shorten

if TYPE_CHECKING:
    from flagcore.tuner.store.trials import OptunaStore  # importing optuna is slow


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""The seconds before the second attempt to start a trial if a host is lost, doubled before each further attempt, and
their maximum."""


def predicted_trial(problem: Problem, candidate: Candidate, role: Role, fidelity: str) -> Trial:
    """Return a new trial of a candidate, with its prediction."""
    layers = predict_stage_layers(problem.platform, problem.columns_of(candidate))
    return Trial(
        number=0,
        candidate=candidate,
        role=role,
        state=TrialState.RUNNING,
        predicted=with_figures(problem.task, problem.predictions.row(problem.row_of(candidate)), layers.get(0, ())),
        fidelity=fidelity,
    )


def plan_time_limit(problem: Problem, trial: Trial, earlier: Sequence[Trial], ranks: int | None = None) -> TimeLimit:
    """Return the time limit of a trial, given the `earlier` trials of the run.

    `ranks`: the number of ranks of a probe; by default, as many as `ranks_to_probe` returns.
    """
    if trial.fidelity != PROBE:
        return time_limit(problem.platform, trial, earlier)
    launches = ranks or len(ranks_to_probe(problem.platform, trial.candidate))
    return time_limit(problem.platform, trial, (), launches)


def plan_shortened_steps(problem: Problem, trial: Trial, most_nodes: int | None = None) -> Shortened | None:
    """Return how the steps of a trial are shortened, or None if they are whole.

    `most_nodes`: the maximum number of nodes if nodes were lost.
    """
    spec, columns = problem.task.spec, problem.columns_of(trial.candidate)
    nodes = min(spec.trial_nodes, most_nodes or spec.cluster.nodes)
    if spec.control.trial_nodes or nodes < spec.cluster.nodes:
        whole_prediction = problem.predictions.row(problem.row_of(trial.candidate))
        return SmallerTask(problem.platform, nodes).shortened(columns, whole_prediction)
    if trial.role is Role.REPEAT:
        return None
    return shorten(problem.platform, trial.candidate, columns, trial.expected_step_s)


def memory_needed(task: Task, trial: Trial) -> float:
    """Return the predicted memory that a trial needs on one node, in bytes. It is 0 if unknown.

    For servers and probes, which may use fewer devices, it is the memory of one device.
    """
    used_bytes = trial.predicted.device_used_bytes if trial.predicted else 0.0
    if not math.isfinite(used_bytes):
        return 0.0
    uses_whole_node = isinstance(task.spec.work, TrainSpec) and trial.fidelity != PROBE
    return used_bytes * (task.cluster.groups[0].devices_per_node if uses_whole_node else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs and probes trials.

    - `device_groups`: one platform for each group of devices that runs one trial at a time. A trial without a group
      runs on the first one.
    - `probe_devices`: the number of ranks that a probe runs in parallel.
    - `pool`: interrupts trials when the search ends.
    """

    problem: Problem
    launcher: Launcher
    store: OptunaStore
    device_groups: Sequence[Platform]
    probe_devices: int
    pool: TrialPool

    def run(self, trial: Trial, best: Trial | None, on_wait: Callable[[Trial], object]) -> Trial:
        """Wait for the hosts and the devices of a trial, then run or probe it, and return it with its outcome.

        The trial is stopped early if it is clearly slower than `best`. `on_wait` is called with the reason whenever the
        trial has to wait. The trial fails and is inconclusive if its devices stay busy, if it runs out of memory while
        other programs use them, or if a host does not return within `cluster.wait_for_hosts` and the search can
        continue without it. Otherwise, raises HostLost. If a plugin fails to prepare the launch, only this trial fails.
        Raises LaunchError if no trial can be started.
        """
        spec, start, pause = self.device_groups[trial.group or 0].task.spec, time.monotonic(), FIRST_PAUSE
        max_time = math.inf if spec.control.max_time is None else spec.control.max_time - (trial.began_s or 0.0)
        longest = min(spec.cluster.wait_for_hosts, max_time)
        while True:
            try:
                return self._run(trial, best, on_wait)
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
                self.pool.pause(pause)
                pause *= 2

    def _run(self, trial: Trial, best: Trial | None, on_wait: Callable[[Trial], object]) -> Trial:
        """Wait for the devices of a trial, then run or probe it. Raises HostLost if it cannot be started on a host."""
        platform, start, pause = self.device_groups[trial.group or 0], time.monotonic(), self.pool.pause
        if trial.fidelity == RUN:
            if trial.fewer_nodes:
                platform = replace(platform, task=platform.task.on_nodes(trial.fewer_nodes))
            platform = with_hosts(platform, self.launcher)
        need_bytes, max_wait = memory_needed(platform.task, trial), platform.task.spec.control.device_wait
        outcome = replace(trial, state=TrialState.FAILED, reason="")
        busy = wait_for_devices(platform, need_bytes, max_wait, lambda why: on_wait(replace(trial, reason=why)), pause)
        if not busy:
            try:
                outcome = self._measure(platform, trial, best) if trial.fidelity == RUN else self._probe(trial)
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
                return measure(running, platform, trial_to_run, folder, best, on_poll=partial(self.pool.pause, 0.0))

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
            devices=self.probe_devices,
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


@dataclass(frozen=True, slots=True)
class _Running:
    """A trial in the pool, which remains there until its outcome is returned."""

    trial: Trial
    start: float
    outcome: Future[Trial] = field(default_factory=Future)


class TrialPool:
    """Starts trials and returns their outcomes.

    Up to `limit` trials run in parallel. With a limit of 1, `start` runs the trial in the calling thread. The search
    calls all methods from one thread, except `pause`, which the threads of trials call.
    """

    def __init__(self) -> None:
        self.limit = 1
        self._running: list[_Running] = []
        self._ended: SimpleQueue[_Running] = SimpleQueue()
        self._stopping = threading.Event()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials that run, and those whose outcome has not been returned yet."""
        return tuple(each.trial for each in self._running)

    @property
    def free_device_group(self) -> int | None:
        """The first group of devices without a trial, or None if `limit` trials run."""
        used = {trial.group or 0 for trial in self.trials}
        free = (group for group in range(self.limit) if group not in used)
        return next(free, None) if len(used) < self.limit else None

    def start(self, trial: Trial, run: Callable[[Trial], Trial]) -> None:
        """Start a trial. `run` returns the trial with its outcome."""
        running = _Running(trial, time.monotonic())
        self._running.append(running)
        running.outcome.add_done_callback(lambda _: self._ended.put(running))

        def work() -> None:
            if not running.outcome.set_running_or_notify_cancel():
                return
            try:
                running.outcome.set_result(run(trial))
            except BaseException as error:  # next_finished raises it
                running.outcome.set_exception(error)

        if self.limit == 1:
            work()
        else:  # daemon threads, because those of an executor would delay the exit of the process
            threading.Thread(target=work, name=f"trial {trial.number}", daemon=True).start()

    def next_finished(self) -> Trial:
        """Wait for the next trial to end, and return its outcome. Raises the exception of a trial that failed."""
        ended = self._ended.get()
        outcome = ended.outcome.result()
        self._running.remove(ended)
        return outcome

    def stop(self, reason: str) -> Iterator[Trial]:
        """End all trials and yield their outcomes. Trials without an outcome are interrupted for `reason`."""
        self._stopping.set()
        while self._running:
            running = self._running.pop(0)
            seconds = time.monotonic() - running.start
            interrupted = replace(running.trial, state=TrialState.INTERRUPTED, reason=reason, duration_s=seconds)
            # a trial that was interrupted before its start is cancelled
            yield interrupted if running.outcome.cancel() or running.outcome.exception() else running.outcome.result()

    def pause(self, seconds: float) -> None:
        """Sleep in the thread of a trial. Raises KeyboardInterrupt if `stop` was called."""
        if self._stopping.wait(seconds):
            raise KeyboardInterrupt
