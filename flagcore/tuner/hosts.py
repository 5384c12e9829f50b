"""The hosts that a search can still use, and the trials that it lost to them or to other programs."""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from flagcore.contracts import Launcher, Platform, Problem
from flagcore.domain.space import Candidate, IntArray
from flagcore.domain.trial import Trial
from flagcore.tuner.launches import on_hosts
from flagcore.tuner.shorten import SmallerTask

MAX_CONSECUTIVE_BUSY = 3
"""The search stops after this number of consecutive trials whose devices were busy."""


def with_hosts(platform: Platform, launcher: Launcher) -> Platform:
    """Return `platform` with the hosts of the next trial. Raises FlagError if too few usable hosts are left."""
    spec = platform.task.spec
    if not spec.on_each_host:
        return platform
    return on_hosts(platform, launcher.choose_hosts(spec.cluster.hosts, spec.cluster.nodes))


def nodes_left(platform: Platform, launcher: Launcher) -> int | None:
    """Return the number of nodes for the next trial if hosts were lost, or None if enough usable hosts are left."""
    spec = platform.task.spec
    if spec.cluster.min_nodes is None:
        return None
    usable = len(launcher.usable_hosts(spec.cluster.hosts))
    sizes = [nodes for nodes in spec.sizes if nodes <= usable] or spec.sizes[:1]
    return None if usable >= spec.trial_nodes else sizes[-1]


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
