"""What trials may run on: groups of devices, on which several run side by side, and hosts, which may be lost."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from queue import SimpleQueue

import numpy as np

from flagcore.contracts import Launcher, Platform, Problem
from flagcore.domain.space import Candidate, IntArray
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.tuner.devices import divide, on_hosts
from flagcore.tuner.search_state import SearchState, measured_alone
from flagcore.tuner.shorten import SmallerTask


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


class Parallelism:
    """How many trials run at a time: one, or one on each group of devices if parallel trials do not disturb each other.

    `groups`: one platform for each group of devices. `pool`: the running trials. `note`: a line for the user.
    """

    def __init__(self, platform: Platform) -> None:
        self.groups, self.note = divide(platform)
        self.pool = TrialPool()
        self._is_decided = len(self.groups) == 1

    @property
    def platform(self) -> Platform:
        """The platform of the next trial."""
        return self.groups[self.pool.free_device_group or 0]

    @property
    def group(self) -> int | None:
        """The group of devices of the next trial. None if it runs alone."""
        return self.pool.free_device_group if self.pool.limit > 1 else None

    @property
    def pending(self) -> list[Trial]:
        """The running trials with the role SEARCH."""
        return [trial for trial in self.pool.trials if trial.role is Role.SEARCH]

    def decide(self, state: SearchState, may_compare: Callable[[], bool]) -> Candidate | None:
        """Allow parallel trials on all groups of devices, unless trials disturb each other.

        To measure the interference, the first candidate that was measured alone runs again while other trials run. It
        is returned when it has to start. `may_compare`: whether a further trial may start, and candidates are left.
        """
        alone, interference = measured_alone(state.trials), state.interference
        is_measuring = any(trial.role is Role.INTERFERENCE for trial in self.pool.trials)
        if self._is_decided or alone is None or is_measuring:
            return None
        if interference:
            self._is_decided, self.note = True, interference.text
            self.pool.limit = len(self.groups) if interference.is_negligible else 1
        elif self.pool.trials:  # the interference trial failed because other programs used its devices
            self.pool.limit = 1
        elif may_compare():
            self.pool.limit = len(self.groups)
            return alone.candidate
        return None


MAX_CONSECUTIVE_BUSY = 3
"""The search stops after this number of consecutive trials whose devices were busy."""


def with_hosts(platform: Platform, launcher: Launcher) -> Platform:
    """Return `platform` with the hosts of the next trial. Raises FlagError if too few usable hosts are left."""
    spec = platform.task.spec
    if not spec.on_each_host:
        return platform
    return on_hosts(platform, launcher.choose_hosts(spec.cluster.hosts, spec.cluster.nodes))


class Hosts:
    """The hosts of a search.

    `consecutive_busy`: consecutive trials that were inconclusive, such as those whose devices were busy or that lost a
    host.
    `loss`: if the last trial lost a host, the host and the reason.
    """

    def __init__(self, problem: Problem, launcher: Launcher, stored: Sequence[Trial], cut_off: Iterable[str]) -> None:
        """Tell the launcher which hosts `stored` trials lost, and the folders of trials that were `cut_off`."""
        self.problem, self.launcher = problem, launcher
        self.consecutive_busy = 0
        self.loss: str | None = None
        launcher.resume(filter(None, (each.lost_host for each in stored)), cut_off)
        known = np.isfinite(problem.predictions.step_time_s)  # steps with fewer replicas are scaled by predictions
        self._can_run_on = cache(
            lambda nodes: known & SmallerTask(problem.platform, nodes).runs(problem.space.columns())
        )

    def rows(self, rows: IntArray, nodes: int | None) -> IntArray:
        """Return those `rows` of the space that can run on `nodes` nodes, with fewer replicas. None means all nodes."""
        return rows[self._can_run_on(nodes)[rows]] if nodes else rows

    def can_run(self, candidate: Candidate, nodes: int | None) -> bool:
        """Return whether a candidate can run on `nodes` nodes. None means all nodes."""
        return nodes is None or bool(self._can_run_on(nodes)[self.problem.row_of(candidate)])

    @property
    def are_busy(self) -> bool:
        """Whether too many consecutive trials were inconclusive for the search to continue."""
        return self.consecutive_busy >= MAX_CONSECUTIVE_BUSY

    def note(self, trial: Trial) -> None:
        """Note the outcome of a trial."""
        self.loss, cluster = trial.reason if trial.lost_host else None, self.problem.task.spec.cluster
        if not (trial.lost_host and (cluster.spares or cluster.min_nodes)):
            self.consecutive_busy = self.consecutive_busy + 1 if trial.inconclusive else 0
