"""One trial: a candidate is run, or probed, and what it measured is returned."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.contracts import Launcher, TrialStore, Workload
from flagcore.domain.trial import PROBE, Trial, TrialState
from flagcore.problem import Problem
from flagcore.stages.combine import combine, trial_of_probe
from flagcore.stages.launch import launch
from flagcore.stages.measure import measure
from flagcore.stages.probe import probe


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """Runs trials of one problem, each in its own folder. `devices` can probe at the same time."""

    problem: Problem
    workload: Workload
    launcher: Launcher
    store: TrialStore
    devices: int

    def measure(self, trial: Trial, timeout: float, best: Trial | None) -> Trial:
        """Run a candidate. It is stopped early if it is clearly slower than `best`."""
        platform, folder = self.problem.platform, self.store.folder(trial)
        running = launch(platform, self.workload, self.launcher, trial.candidate, folder, timeout)
        return measure(running, platform, self.workload, trial, folder, best)

    def probe(self, trial: Trial, timeout: float) -> Trial:
        """Probe a candidate rank by rank. Ranks that an interrupted probe of it finished are not probed again."""
        row = self.problem.space.find(trial.candidate)
        assert row is not None, "every candidate that is probed is in the space"
        probed = probe(
            self.problem.platform,
            self.workload,
            self.launcher,
            trial.candidate,
            self.store.folder(trial),
            timeout,
            earlier=[self.store.folder(each) for each in self.store.trials() if _was_interrupted(each, trial)],
            to_the_end=False,
            devices=self.devices,
        )
        combined = combine(self.problem.predictions.row(row), probed, self.problem.platform.costs.memory)
        return trial_of_probe(self.problem.platform.task, trial, probed, combined)


def _was_interrupted(earlier: Trial, trial: Trial) -> bool:
    same = (earlier.candidate, earlier.fidelity) == (trial.candidate, PROBE)
    return same and earlier.state is TrialState.INTERRUPTED
