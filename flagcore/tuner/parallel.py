"""Trials side by side: groups of devices, the pool of running trials, and whether they disturb each other."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from flagcore.contracts import Platform
from flagcore.domain.space import Candidate
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.tuner.devices import divide
from flagcore.tuner.search_state import SearchState, measured_alone


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
