"""The searches that a replay compares, each over one sweep: flagcore's strategies, FlagScale's tuner, Optuna, chance.

A search is the rows that it ran, in order, with what each cost. flagcore's go through the functions of `flag tune`
itself: `learn`, `prune`, `rank`, `spent`, the baseline first, hopeless trials ended early.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import optuna
from flagscale_rules import NESTING, FlagScale
from sweeps import Sweep

from flagcore.api.experienced import MOST
from flagcore.contracts import Scene, Strategy
from flagcore.domain.budget import spent
from flagcore.domain.experience import Observed, Past
from flagcore.domain.knowledge import Lessons, Pruned
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.learning.trials import LEAST_NOISE
from flagcore.stages.learn import learn
from flagcore.stages.measure import HOPELESS
from flagcore.stages.predict import record
from flagcore.stages.prune import prune
from flagcore.stages.rank import rank, scene

ITERATIONS, WARMUP = 5, 1
"""Steps of a trial, and those of them that do not count: the defaults of `flag tune`; FlagScale's are the same."""
SEEDS_OF_CHANCE = 200
MOST_ASKS = 100
"""After so many suggestions of Optuna in a row that are not in the space or known, chance picks the next trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What one search did on one sweep. `seconds` is what each trial cost, `says_done` whether it ended by itself."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    says_done: bool


Searcher = Callable[[Sweep], list[Search]]
"""Runs on a sweep, several times where there is chance in it."""


def by_strategy(strategy: Strategy, others: Sequence[Sweep] = ()) -> Searcher:
    """Return a search by one of flagcore's strategies, without any limit but its own.

    It knows what was measured in those of `others` that are of the same chip and of another model: what earlier runs
    leave behind, and as many of them, the last ones, as a run of `flag tune` learns from.
    """
    taught = [(one, _measured(one, number)) for number, one in enumerate(others, start=1)]

    def search(sweep: Sweep) -> list[Search]:
        all_of_it = Observed.join([observed for one, observed in taught if _teaches(one, sweep)])
        known = _last(all_of_it, MOST)
        return [_tuned(sweep, strategy, replace(Past.nothing(), time=known))]

    return search


def _last(observed: Observed, most: int) -> Observed:
    rows = np.arange(max(0, len(observed) - most), len(observed))
    if not rows.size:
        return Observed.nothing()
    return Observed(observed.features.take(rows), observed.log_ratio[rows], observed.noise[rows], observed.task[rows])


def _teaches(one: Sweep, other: Sweep) -> bool:
    here, there = one.problem.platform.task, other.problem.platform.task
    return here.cluster.groups[0].chip == there.cluster.groups[0].chip and here.spec.model != there.spec.model


def _measured(sweep: Sweep, number: int) -> Observed:
    rows = np.flatnonzero(np.isfinite(sweep.seconds))
    ratio = np.log(sweep.seconds[rows] / sweep.problem.predictions.step_time_s[rows])
    seen = _scene(sweep, sweep.problem.pruned, learn(()), Past.nothing()).features(rows)
    return Observed(seen, ratio, np.full(rows.size, LEAST_NOISE), np.full(rows.size, number))


def _scene(sweep: Sweep, pruned: Pruned, lessons: Lessons, past: Past) -> Scene:
    problem = sweep.problem
    task = problem.platform.task
    return scene(task, sweep.workload, problem.space, problem.predictions, pruned, lessons, past)


def _tuned(sweep: Sweep, strategy: Strategy, past: Past) -> Search:
    problem, trials, cost = sweep.problem, list[Trial](), list[float]()
    task, space = problem.platform.task, problem.space
    control = replace(task.spec.control, max_trials=len(space) + 1, max_time=None)
    pruned, lessons = problem.pruned, learn(())
    row, role = space.find(problem.baseline), Role.BASELINE
    while row is not None:
        best = lessons.best if role is Role.SEARCH else None
        trial, seconds = _ran(sweep, row, len(trials), role, best)
        trials.append(trial)
        cost.append(seconds)
        lessons = learn(trials)
        pruned = prune(space, problem.predictions, sweep.workload, problem.rules, lessons.trials, pruned)
        role = Role.SEARCH
        if spent(control, lessons, sum(cost)) is not None:
            break
        row = rank(strategy, _scene(sweep, pruned, lessons, past)).row
    found = [space.find(trial.candidate) for trial in trials]
    return Search(rows=tuple(at for at in found if at is not None), seconds=tuple(cost), says_done=True)


def _ran(sweep: Sweep, row: int, number: int, role: Role, best: Trial | None) -> tuple[Trial, float]:
    """Return a trial that gave what was measured, ended early as a real one would be, and the seconds of its steps."""
    problem, step = sweep.problem, float(sweep.seconds[row])
    task = problem.platform.task
    trial = Trial(
        number=number,
        candidate=problem.space.candidate(row),
        role=role,
        state=TrialState.OUT_OF_MEMORY,
        predicted=record(task, problem.predictions.row(row)),
        reason="it ran out of memory",
        duration_s=ITERATIONS * step,
    )
    if np.isnan(step):
        cost = _cost(sweep, row)
        return replace(trial, duration_s=cost), cost
    hopeless = best is not None and best.measurement is not None and step > HOPELESS * best.measurement.step_time_s
    ran, peak = WARMUP + 2 if hopeless else ITERATIONS, float(sweep.peak_bytes[row])
    train = task.spec.train
    measurement = Measurement(
        step_times_s=(step,) * (ran - WARMUP),
        step_time_s=step,
        spread_s=0.0,
        tokens_per_second_per_device=train.global_batch_size * train.seq_length / step / task.cluster.devices,
        peak_allocated_bytes=None if np.isnan(peak) else int(peak),
        partial=hopeless,
    )
    state = TrialState.STOPPED if hopeless else TrialState.MEASURED
    done = replace(trial, state=state, reason=None, measurement=measurement, duration_s=ran * step)
    return done, ran * step


def _cost(sweep: Sweep, row: int) -> float:
    """Return the seconds of a whole trial; one that ran out of memory counts like the sweep's median."""
    step = float(sweep.seconds[row])
    return ITERATIONS * (float(np.nanmedian(sweep.seconds)) if np.isnan(step) else step)


def flagscale(priority: str | None = None, *, memory_model: bool = False) -> Searcher:
    """Return FlagScale's tuner, with the priority and the memory model of its configuration.

    Its memory model is flagcore's here, which errs less than its own.
    """

    def search(sweep: Sweep) -> list[Search]:
        problem, rows = sweep.problem, list[int]()
        strategies = [problem.space.candidate(row).as_dict() for row in range(len(problem.space))]
        assert set(strategies[0]) == set(NESTING)
        needed = problem.predictions.peak_allocated_bytes.tolist() if memory_model else None
        chip = problem.platform.task.cluster.groups[0]
        tuner = FlagScale(strategies, priority, needed, chip.memory_bytes or chip.chip.memory_bytes.value)
        while (row := tuner.next()) is not None:
            rows.append(row)
            step = float(sweep.seconds[row])
            tuner.tell(None if np.isnan(step) else step)
        return [_search(sweep, rows, says_done=True)]

    return search


def tpe(seeds: int) -> Searcher:
    """Return Optuna's TPE over the knobs that vary; what is not in the space or known already costs nothing."""

    def search(sweep: Sweep) -> list[Search]:
        own = zlib.crc32(repr((sweep.name, sweep.source)).encode())  # or all sweeps begin with the same few suggestions
        return [_sampled(sweep, optuna.samplers.TPESampler(seed=own + seed), own + seed) for seed in range(seeds)]

    return search


def _sampled(sweep: Sweep, sampler: optuna.samplers.BaseSampler, seed: int) -> Search:
    columns, space = sweep.problem.space.columns(), sweep.problem.space
    names = [axis.knob for axis in space.axes if np.unique(columns[axis.knob]).size > 1]
    if len(names) > 1 and "data_parallel_size" in names:
        names.remove("data_parallel_size")  # what the devices leave
    distributions = {
        name: optuna.distributions.CategoricalDistribution(np.unique(columns[name]).tolist()) for name in names
    }
    known = {tuple(values): row for row, values in enumerate(zip(*(columns[n].tolist() for n in names), strict=True))}
    study, chance = optuna.create_study(sampler=sampler), np.random.default_rng(seed)
    rows: list[int] = []
    asks = 0
    while len(rows) < len(space) and not (rows and np.nanmin(sweep.seconds[rows]) <= sweep.best):
        if asks == MOST_ASKS:
            row = int(chance.choice(np.setdiff1d(np.arange(len(space)), rows)))
            values = {name: int(columns[name][row]) for name in names}
            study.enqueue_trial(values)
        trial = study.ask(distributions)
        found = known.get(tuple(trial.params[name] for name in names))
        asks += 1
        if found is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        step = float(sweep.seconds[found])
        study.tell(trial, 1e3 * float(np.nanmax(sweep.seconds)) if np.isnan(step) else step)
        if found not in rows:
            rows.append(found)
            asks = 0
    return _search(sweep, rows, says_done=False)


def random(sweep: Sweep) -> list[Search]:
    """Search without replacement, in many orders."""
    chance = np.random.default_rng(0)
    orders = (chance.permutation(len(sweep.seconds)).tolist() for _ in range(SEEDS_OF_CHANCE))
    return [_search(sweep, order, says_done=False) for order in orders]


def _search(sweep: Sweep, rows: list[int], *, says_done: bool) -> Search:
    return Search(rows=tuple(rows), seconds=tuple(_cost(sweep, row) for row in rows), says_done=says_done)
