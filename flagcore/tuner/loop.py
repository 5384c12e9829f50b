"""The whole search: discover, build, predict, prune; then rank, launch, measure, learn, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from flagcore.contracts import Engine, Launcher, OnEvent, Problem, Strategy
from flagcore.domain.features import PastMeasurements
from flagcore.domain.plan import Plan
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Spec
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Role, Trial, TrialState
from flagcore.errors import FlagError, HostLost, Interrupted, LaunchError
from flagcore.i18n import N_, Message, _
from flagcore.plugins import LoadedPlugins
from flagcore.tuner.budget import Budget
from flagcore.tuner.devices import require_devices
from flagcore.tuner.feasibility import dry_run, require_feasible
from flagcore.tuner.parallel import Hosts, Parallelism
from flagcore.tuner.planner import Planner, Progress
from flagcore.tuner.problem import build_problem, require_launchable
from flagcore.tuner.search_state import next_repeat, summarize
from flagcore.tuner.stages.rank import rank, untried
from flagcore.tuner.trial_runner import TrialRunner

if TYPE_CHECKING:
    from flagcore.tuner.store import OptunaStore  # importing optuna is slow


class Dependencies(NamedTuple):
    """The objects that the loop calls. `probe_strategy` chooses the candidates to probe before the first run."""

    plugins: LoadedPlugins
    engine: Engine
    launcher: Launcher
    strategy: Strategy
    probe_strategy: Strategy
    open_store: Callable[[Problem], OptunaStore]
    on_event: OnEvent
    past: Callable[[Problem], PastMeasurements] = lambda problem: PastMeasurements.empty()


class TuneResult(NamedTuple):
    """The plan and the problem of a search, and the error that stopped it early, or None."""

    plan: Plan
    problem: Problem
    error: FlagError | None


def tune(
    spec: Spec, dependencies: Dependencies, completed_baseline: Mapping[str, KnobValue] | None = None
) -> TuneResult:
    """Find the fastest candidate by running or probing candidates, or from predictions alone.

    Finished trials are stored even if an exception is raised. `completed_baseline`: that of the run that is resumed,
    with a value for each knob.
    """
    started = time.monotonic()  # on a busy machine, building the problem takes a part of the time
    fidelity = spec.control.fidelity
    about = (spec, dependencies.plugins, dependencies.engine)
    problem = build_problem(*about, completed=completed_baseline)  # discovers, builds, predicts, prunes
    require_feasible(problem)
    if fidelity == ESTIMATE:
        dependencies.open_store(problem)
        return TuneResult(plan=dry_run(problem), problem=problem, error=None)
    require_launchable(problem)
    require_devices(problem.platform, dependencies.plugins.devices(spec.envs), needed=1 if fidelity == PROBE else None)
    search = _Search(problem, dependencies, started)
    error: FlagError | None = None
    try:
        stopped = search.run()
    except KeyboardInterrupt:
        search.interrupt(N_("interrupted by the user"))
        stopped, error = N_("interrupted"), Interrupted(_("interrupted"))
    except LaunchError as failure:
        search.interrupt(str(failure))
        stopped, error = str(failure), failure
    finally:
        tuple(search.pool.stop(""))
        dependencies.launcher.close()
    found = search.progress
    plan = summarize(problem.task, problem.space, found.problem.pruned, found.state, stopped, problem.knobs)
    return TuneResult(plan=plan, problem=problem, error=error)


class _Search:
    """One call of `tune`: what it has found so far, and the budget, devices and hosts that it may use."""

    def __init__(self, problem: Problem, dependencies: Dependencies, started: float) -> None:
        store, launcher, control = dependencies.open_store(problem), dependencies.launcher, problem.task.spec.control
        stored, parallel = store.trials(), Parallelism(problem.platform)
        cut_off = (store.folder(each) for each in stored if each.state is TrialState.INTERRUPTED)
        self.dependencies, self.fidelity, self.pool = dependencies, control.fidelity, parallel.pool
        self.budget, self.parallel = Budget.of(control, stored, started), parallel
        self.hosts = Hosts(problem, launcher, stored, cut_off)
        self.progress = Progress(problem, store, self.budget, parallel, dependencies.on_event)
        self.planner = Planner(self.progress, self.budget, parallel, self.hosts, dependencies.past(problem))
        self.runner = TrialRunner(problem=problem, launcher=launcher, store=store, parallel=parallel)
        self.lacks_nodes = False
        """Whether the search ended because the open candidates need nodes that were lost."""

    def run(self) -> str:
        """Probe, search, and repeat the finalists. Return why the search stopped.

        Raises HostLost if it stopped because hosts were lost.
        A search continues after repeats only if the run is resumed with more trials or time than ended it.
        """
        self._run_probes()
        search_ended = next((each.search_ended for each in self.progress.state.repeats[::-1] if each.search_ended), "")
        if not search_ended or self.budget.exceeds(search_ended):
            search_ended = self._run_candidates()
        if not self.lacks_nodes:
            self._repeat_finalists(search_ended)
        if self.lacks_nodes or (self.hosts.are_busy and self.hosts.loss):
            raise HostLost("", ": ".join(filter(None, (search_ended, self.hosts.loss))))
        return search_ended

    def _run_probes(self) -> None:
        """Probe `control.probes` candidates in the first MAX_SHARE_OF_PROBES of `control.max_time`."""
        while self.fidelity == RUN and self.planner.may_start and self.budget.seconds_for_probes > 0:
            probed = {each.candidate for each in self.progress.state.probes if each.is_conclusive}
            if len(probed) >= self.budget.control.probes:
                return
            choice = rank(self.dependencies.probe_strategy, self.planner.context_for_probes(probed))
            if choice.row is None:
                return
            candidate = self.progress.problem.space.candidate(choice.row)
            self._run(self.planner.plan(candidate, Role.SEARCH, choice, fidelity=PROBE))

    def _run_candidates(self) -> str:
        """Run the baseline, then the candidates that the strategy chooses. Return why no further trial starts."""
        baseline = self.progress.problem.baseline
        while self.planner.may_start and not self.planner.is_done(baseline):
            self._run(self.planner.plan(baseline, Role.BASELINE))
        while True:
            if compared := self.parallel.decide(self.progress.state, self.planner.may_compare):
                self._start(self.planner.plan(compared, Role.INTERFERENCE))
            reason = self._start_trials()
            if not self.pool.trials:
                self.pool.limit = 1  # repeats run alone
                return reason
            self._finish(self.pool.next_finished())

    def _start_trials(self) -> str:
        """Start trials on free groups of devices. Return why no further trial may start, or an empty string."""
        self.lacks_nodes = False
        while self.pool.free_device_group is not None:
            if (reason := self.planner.stop_reason()) is not None:
                return reason
            context, nodes, problem = self.planner.context(), self.planner.nodes_left, self.progress.problem
            choice = rank(self.dependencies.strategy, context)
            if choice.row is None:
                open_rows = untried(problem, self.progress.state, self.parallel.pending)
                self.lacks_nodes = bool(nodes and open_rows.size and not context.open_rows.size)
                text = N_("no other candidate can run on the {nodes} nodes that are left")
                return Message(text, nodes=nodes) if self.lacks_nodes else choice.because
            self._start(self.planner.plan(problem.space.candidate(choice.row), Role.SEARCH, choice))
        return ""

    def _repeat_finalists(self, search_ended: str) -> None:
        """Run the baseline, the best candidate and its rivals again in turn, to reduce the effect of noise.

        `search_ended` is the reason why the search stopped, which is stored with each repeat.
        """
        while trial := next_repeat(self.budget.control, self.progress.state):
            if not self.planner.can_repeat(trial):
                return
            planned = self.planner.plan(trial.candidate, Role.REPEAT, search_ended=search_ended)
            if trial in self.progress.state.disturbed:
                because = Message(N_("other programs used cores during trial {number}"), number=trial.number)
                planned = replace(planned, chosen_because=because)
            self._run(planned)

    def _run(self, planned: Trial) -> None:
        """Run a trial and wait for its end."""
        self._start(planned)
        self._finish(self.pool.next_finished())

    def _start(self, planned: Trial) -> None:
        """Launch and measure a trial, in a thread if several may run."""
        trial = self.progress.begin(planned)
        best = self.progress.state.best if trial.role is Role.SEARCH else None
        self.pool.start(trial, partial(self.runner.run, best=best, on_wait=partial(self.progress.emit, "trial_waits")))

    def _finish(self, trial: Trial) -> None:
        """Learn from a trial."""
        self.hosts.note(trial)
        self.progress.finish(trial)

    def interrupt(self, reason: str) -> None:
        """Interrupt all running trials and store them with `reason`."""
        for trial in self.pool.stop(reason):
            self._finish(trial)
