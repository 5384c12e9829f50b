"""Runs trials in parallel, each in a thread on its own group of devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from flagcore.contracts import RunningLaunch
from flagcore.domain.launch import Exit
from flagcore.domain.trial import Trial, TrialState


@dataclass(slots=True)
class _Entry:
    """A trial in the pool, until its `outcome` is returned.

    The thread that acquires `claim` runs the trial. `done` is set when that thread ends.
    """

    trial: Trial
    start: float
    outcome: Trial | BaseException | None = None
    claim: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)


class TrialPool:
    """Starts trials and returns their outcomes.

    Up to `limit` trials run in parallel. With a limit of 1, `start` runs the trial in the calling thread. The search
    calls all methods from one thread, except `pause` and `interruptible`, which the threads of trials call.
    """

    def __init__(self) -> None:
        self.limit = 1
        self._entries: dict[int, _Entry] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._stopping = threading.Event()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Trials that run, and those whose outcome has not been returned yet."""
        return tuple(entry.trial for entry in self._entries.values())

    @property
    def free_group(self) -> int | None:
        """The first group of devices without a trial; None if `limit` trials run."""
        used = {trial.group or 0 for trial in self.trials}
        free = (group for group in range(self.limit) if group not in used)
        return next(free, None) if len(used) < self.limit else None

    def start(self, trial: Trial, run: Callable[[Trial], Trial]) -> None:
        """Start a trial. `run` returns the trial with its outcome."""
        entry = self._entries[trial.number] = _Entry(trial, time.monotonic())

        def work() -> None:
            if not entry.claim.acquire(blocking=False):
                return
            try:
                entry.outcome = run(trial)
            except BaseException as error:  # next_finished raises it
                entry.outcome = error
            self._ended.put(trial.number)
            entry.done.set()

        if self.limit == 1:
            entry.done.set()
            work()
        else:
            threading.Thread(target=work, name=f"trial {trial.number}", daemon=True).start()

    def next_finished(self) -> Trial:
        """Wait for the next trial to end, and return its outcome. Raises the exception of a trial that failed."""
        number = self._ended.get()
        outcome = self._entries[number].outcome
        if not isinstance(outcome, Trial):
            assert outcome
            raise outcome
        del self._entries[number]
        return outcome

    def stop(self, reason: str) -> Iterator[Trial]:
        """End all trials and yield their outcomes. Trials without an outcome are interrupted for `reason`."""
        self._stopping.set()
        for number, entry in sorted(self._entries.items()):
            if entry.claim.acquire(blocking=False):  # it was interrupted before it ran
                entry.done.set()
            entry.done.wait()
            del self._entries[number]
            seconds = time.monotonic() - entry.start
            interrupted = replace(entry.trial, state=TrialState.INTERRUPTED, reason=reason, duration_s=seconds)
            yield entry.outcome if isinstance(entry.outcome, Trial) else interrupted

    def pause(self, seconds: float) -> None:
        """Sleep in the thread of a trial. Raises KeyboardInterrupt if `stop` was called."""
        if self._stopping.wait(seconds):
            raise KeyboardInterrupt

    def interruptible(self, running: RunningLaunch) -> RunningLaunch:
        """Return `running` with a `wait` that raises KeyboardInterrupt if `stop` was called."""
        return _Interruptible(running, self._stopping)


class _Interruptible:
    def __init__(self, running: RunningLaunch, stopping: threading.Event) -> None:
        self._running, self._stopping = running, stopping

    def poll(self) -> Exit | None:
        return self.wait(0)

    def wait(self, seconds: float) -> Exit | None:
        ended = self._running.wait(seconds)
        if ended is None and self._stopping.is_set():
            raise KeyboardInterrupt
        return ended

    def stop(self) -> Exit:
        return self._running.stop()
