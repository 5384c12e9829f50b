"""Trials that run at once: each in a thread, on a group of devices of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from flagcore.contracts import Running
from flagcore.domain.launch import Exit
from flagcore.domain.trial import Trial, TrialState


@dataclass(slots=True)
class _Flight:
    """A trial that runs, or that nobody asked the `outcome` of yet.

    Who acquires `claim` may run it. `done` is set when its thread ends, at once if it has none.
    """

    trial: Trial
    began: float
    outcome: Trial | BaseException | None = None
    claim: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)


class InFlight:
    """Starts trials, and returns each when it ends. At most `limit` run at once; with a limit of 1, in `start`.

    One thread calls the methods; those that run trials call `pause` and `watched`.
    """

    def __init__(self) -> None:
        self.limit = 1
        self._flights: dict[int, _Flight] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._stopping = threading.Event()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Those that run, or whose outcome is not returned yet."""
        return tuple(flight.trial for flight in self._flights.values())

    @property
    def free_group(self) -> int | None:
        """The first group of devices without a trial; None if as many trials run as may."""
        taken = {trial.group or 0 for trial in self.trials}
        free = [group for group in range(self.limit) if group not in taken]
        return free[0] if len(taken) < self.limit else None

    def start(self, trial: Trial, run: Callable[[Trial], Trial]) -> None:
        """Start `run`, which returns the trial with its outcome."""
        flight = self._flights[trial.number] = _Flight(trial, time.monotonic())

        def work() -> None:
            if not flight.claim.acquire(blocking=False):
                return
            try:
                flight.outcome = run(trial)
            except BaseException as error:  # `first` raises it
                flight.outcome = error
            self._ended.put(trial.number)
            flight.done.set()

        if self.limit == 1:
            flight.done.set()
            work()
        else:
            threading.Thread(target=work, name=f"trial {trial.number}", daemon=True).start()

    def first(self) -> Trial:
        """Return the outcome of the trial that ends first. Raises what its run raised."""
        number = self._ended.get()
        outcome = self._flights[number].outcome
        if not isinstance(outcome, Trial):
            assert outcome
            raise outcome
        del self._flights[number]
        return outcome

    def stop(self, reason: str) -> Iterator[Trial]:
        """End all trials. Yield their outcomes; those that have none are interrupted, for this reason."""
        self._stopping.set()
        for number, flight in sorted(self._flights.items()):
            if flight.claim.acquire(blocking=False):  # it was interrupted before it ran
                flight.done.set()
            flight.done.wait()
            del self._flights[number]
            seconds = time.monotonic() - flight.began
            cut = replace(flight.trial, state=TrialState.INTERRUPTED, reason=reason, duration_s=seconds)
            yield flight.outcome if isinstance(flight.outcome, Trial) else cut

    def pause(self, seconds: float) -> None:
        """Sleep in the thread of a trial. Raises KeyboardInterrupt if trials are to end."""
        if self._stopping.wait(seconds):
            raise KeyboardInterrupt

    def watched(self, running: Running) -> Running:
        """Return a running trial that raises KeyboardInterrupt while it is waited for if trials are to end."""
        return _Watched(running, self._stopping)


class _Watched:
    def __init__(self, running: Running, stopping: threading.Event) -> None:
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
