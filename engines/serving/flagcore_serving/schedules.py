"""What an installed engine itself says about its servers: an optional distribution asks it, without a device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flagcore.contracts import Platform, Problem
from flagcore.domain.space import Candidate
from flagcore.errors import NoDevice
from flagcore.loading.entry_points import installed, instance_of, load_checked

GROUP = "flagcore.schedules"
"""The entry points of schedules, by the name of their engine."""


class Schedule(ABC):
    """Asks an installed engine. No method raises: without an answer, the search goes on as if there were none.

    `group`: the entry points of its objects, for `flag doctor`.
    """

    group = GROUP

    @abstractmethod
    def refusal(self, engine: Any, platform: Platform, candidate: Candidate) -> str:
        """Return why a `ServingEngine` does not start the servers of a candidate, in its words. Empty if it does."""

    @abstractmethod
    def scheduled(self, problem: Problem) -> Problem:
        """Return `problem` with the loads of its fastest candidates simulated by the engine's own scheduler, and
        without those that the engine refuses."""

    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Return sentences for the user about what was asked, and about what was not answered."""


class _Broken(Schedule):
    """A schedule that cannot be used. Only a search that needs it ends."""

    def __init__(self, error: NoDevice) -> None:
        self.error = error

    def refusal(self, engine: Any, platform: Platform, candidate: Candidate) -> str:
        return ""

    def scheduled(self, problem: Problem) -> Problem:
        """Raise NoDevice."""
        raise self.error

    def notes(self) -> Sequence[str]:
        return [str(self.error)]


def schedule_of(engine: str) -> Schedule | None:
    """Return the schedule of an engine, or None if none is installed."""
    check: Callable[[object], Schedule] = partial(instance_of, Schedule)  # type: ignore[type-abstract]
    points = installed(GROUP).get(engine)
    try:
        return load_checked("schedule", points, check) if points else None
    except NoDevice as error:
        return _Broken(error)
