"""The searches that a replay compares, each over one sweep: flagcore's strategies, FlagScale's tuner, Optuna, chance.

A search is the rows that it ran, in order, with what each cost. flagcore's go through the functions of `flag tune`
itself: `learn`, `prune`, `rank`, `spent`, the baseline first, slow trials ended early; with probes,
`combine` and `judge`, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import optuna
from flagscale_rules import NESTING, FlagScale
from sweeps import Sweep

from flagcore.api.common.transfer import MOST
from flagcore.contracts import SearchContext, Strategy
from flagcore.contracts.workload import require_prober
from flagcore.domain.experience import Observations, PastMeasurements
from flagcore.domain.search_state import Pruned, SearchState, stop_reason
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Control
from flagcore.domain.trial import PROBE, Measurement, Role, Trial, TrialState
from flagcore.learning.trials import LEAST_NOISE, MEMORY_NOISE
from flagcore.stages.combine import combine, trial_of_probe
from flagcore.stages.learn import learn
from flagcore.stages.measure import EARLY_STOP_RATIO
from flagcore.stages.predict import record
from flagcore.stages.prune import prune
from flagcore.stages.rank import rank, search_context

ITERATIONS, WARMUP = 5, 1
"""Steps of a trial, and those of them that do not count: the defaults of `flag tune`; FlagScale's are the same."""
SEEDS_OF_CHANCE = 200
MOST_ASKS = 100
"""After so many suggestions of Optuna in a row that are not in the space or known, chance picks the next trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What one search did on one sweep. `seconds` is what each trial cost, `probe_seconds` what probes took before the
    first, `says_done` whether it ended by itself. Rows are in the order in which trials end; `clock` is when each did.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    says_done: bool
    probe_seconds: float = 0.0
    clock: tuple[float, ...] = ()


Searcher = Callable[[Sweep], list[Search]]
"""Runs on a sweep, several times where there is chance in it."""


def by_strategy(strategy: Strategy, others: Sequence[Sweep] = (), *, probes: int = 0, at_once: int = 1) -> Searcher:
    """Return a search by one of flagcore's strategies, limited only by the strategy, after `probes` probes.

    After the baseline, `at_once` trials run at once; among the first is the baseline again, to measure interference.

    It learns from those of `others` that used the same chip and another model, as `flag tune` does from earlier runs,
    and from as many of them, the latest.
    """
    taught = [(one, _measured(one, number)) for number, one in enumerate(others, start=1)]

    def search(sweep: Sweep) -> list[Search]:
        known = [past for one, past in taught if _teaches(one, sweep)]
        time, memory = (
            (_last(Observations.join(each), MOST) for each in zip(*known, strict=True)) if known else _NOTHING
        )
        return [_tuned(sweep, strategy, PastMeasurements(time=time, memory=memory), probes, at_once)]

    return search


_NOTHING = Observations.empty(), Observations.empty()


def _last(observed: Observations, most: int) -> Observations:
    rows = np.arange(max(0, len(observed) - most), len(observed))
    if not rows.size:
        return Observations.empty()
    return Observations(
        observed.features.take(rows), observed.log_ratio[rows], observed.noise[rows], observed.task[rows]
    )


def _teaches(one: Sweep, other: Sweep) -> bool:
    here, there = one.problem.platform.task, other.problem.platform.task
    return here.cluster.groups[0].chip == there.cluster.groups[0].chip and here.spec.model != there.spec.model


def _measured(sweep: Sweep, number: int) -> tuple[Observations, Observations]:
    """Return times and memory of what a sweep measured."""
    rows = np.flatnonzero(np.isfinite(sweep.seconds))
    predictions = sweep.problem.predictions
    seen = _scene(sweep, sweep.problem.pruned, learn(()), PastMeasurements.empty()).features(rows)

    def observed(measured: FloatArray, predicted: FloatArray, noise: float) -> Observations:
        ratio = np.log(measured[rows] / predicted[rows])
        return Observations(seen, ratio, np.full(rows.size, noise), np.full(rows.size, number))

    return (
        observed(sweep.seconds, predictions.step_time_s, LEAST_NOISE),
        observed(sweep.used_bytes, predictions.device_used_bytes, MEMORY_NOISE),
    )


def _scene(
    sweep: Sweep, pruned: Pruned, search_state: SearchState, past: PastMeasurements, pending: Sequence[Trial] = ()
) -> SearchContext:
    problem = sweep.problem
    state = pruned, search_state, past, None, pending
    return search_context(problem.platform.task, sweep.workload, problem.space, problem.predictions, *state)


def _tuned(sweep: Sweep, strategy: Strategy, past: PastMeasurements, probes: int, at_once: int) -> Search:
    problem, space = sweep.problem, sweep.problem.space
    control = replace(problem.platform.task.spec.control, max_trials=len(space) + 1, max_time=None)
    trials = _probed(sweep, strategy, past, probes)
    before = len(trials)
    search_state, pruned = _learnt(sweep, trials, problem.pruned)
    row, role = space.find(problem.baseline), Role.BASELINE
    pending, now, clock = list[tuple[float, Trial]](), 0.0, list[float]()
    while row is not None or pending:
        while row is not None:
            best = search_state.best if role is Role.SEARCH else None
            trial = _ran(sweep, row, len(trials) + len(pending), role, best)
            pending.append((now + trial.duration_s, trial))
            full = len(pending) == at_once or role is Role.BASELINE
            row = None if full else _next(sweep, strategy, past, pruned, search_state, control, pending)
        now, ended = min(pending, key=lambda each: each[0])
        pending.remove((now, ended))
        if ended.role is not Role.INTERFERENCE:
            trials.append(ended)
            clock.append(now)
        if at_once > 1 and role is Role.BASELINE and ended.state is TrialState.MEASURED:
            pending.append((now + ended.duration_s, replace(ended, role=Role.INTERFERENCE)))
        role = Role.SEARCH
        search_state, pruned = _learnt(sweep, trials, pruned)
        row = _next(sweep, strategy, past, pruned, search_state, control, pending)
    found = [space.find(trial.candidate) for trial in trials[before:]]
    return Search(
        rows=tuple(at for at in found if at is not None),
        seconds=tuple(trial.duration_s for trial in trials[before:]),
        says_done=True,
        probe_seconds=sum(trial.duration_s for trial in trials[:before]),
        clock=tuple(clock),
    )


def _next(
    sweep: Sweep,
    strategy: Strategy,
    past: PastMeasurements,
    pruned: Pruned,
    search_state: SearchState,
    control: Control,
    pending: Sequence[tuple[float, Trial]],
) -> int | None:
    """Return the row that a search tries next while others run, None if it waits or ends."""
    running = [trial for _, trial in pending if trial.role is Role.SEARCH]
    if stop_reason(control, search_state, 0.0, len(running)) is not None:
        return None
    return rank(strategy, _scene(sweep, pruned, search_state, past, running)).row


def _learnt(sweep: Sweep, trials: Sequence[Trial], pruned: Pruned) -> tuple[SearchState, Pruned]:
    problem, search_state = sweep.problem, learn(trials)
    known = problem.rules, search_state.trials, pruned, search_state.probes
    return search_state, prune(problem.space, problem.predictions, sweep.workload, *known)


def _probed(sweep: Sweep, strategy: Strategy, past: PastMeasurements, wanted: int) -> list[Trial]:
    """Return the probes before the first run: of what the strategy would try first if nothing had been measured."""
    problem, trials = sweep.problem, list[Trial]()
    task, memory = problem.platform.task, problem.platform.costs.memory
    done = np.zeros(0, dtype=np.int64)
    while len(trials) < wanted:
        search_state, pruned = _learnt(sweep, trials, problem.pruned)
        seen = _scene(sweep, pruned, search_state, past)
        left = np.setdiff1d(seen.open_rows, done)
        if not left.size or (row := rank(strategy, replace(seen, open_rows=left)).row) is None:
            break
        probe = sweep.probes[row]
        trial = Trial(
            number=len(trials),
            candidate=probe.candidate,
            role=Role.SEARCH,
            state=TrialState.RUNNING,
            fidelity=PROBE,
        )
        combined = combine(problem.predictions.row(row), probe, memory, require_prober(sweep.workload).work_parts)
        trials.append(trial_of_probe(task, trial, probe, combined))
        done = np.append(done, row)
    return trials


def _ran(sweep: Sweep, row: int, number: int, role: Role, best: Trial | None) -> Trial:
    """Return a trial that gave what was measured, ended early as a real one would be."""
    problem, step = sweep.problem, float(sweep.seconds[row])
    task = problem.platform.task
    trial = Trial(
        number=number,
        candidate=problem.space.candidate(row),
        role=role,
        state=TrialState.OUT_OF_MEMORY,
        predicted=record(task, problem.predictions.row(row)),
        reason="it ran out of memory",
        duration_s=cost(sweep, row),
    )
    if np.isnan(step):
        return trial
    stopped_early = (
        best is not None and best.measurement is not None and step > EARLY_STOP_RATIO * best.measurement.step_time_s
    )
    ran = WARMUP + 2 if stopped_early else ITERATIONS
    train = task.spec.train
    measurement = Measurement(
        step_times_s=(step,) * (ran - WARMUP),
        step_time_s=step,
        spread_s=0.0,
        tokens_per_second_per_device=train.global_batch_size * train.seq_length / step / task.cluster.devices,
        device_used_bytes=None if stopped_early else int(sweep.used_bytes[row]),
        partial=stopped_early,
    )
    state = TrialState.STOPPED if stopped_early else TrialState.MEASURED
    seconds = float(sweep.start_seconds[row]) + ran * step
    return replace(trial, state=state, reason=None, measurement=measurement, duration_s=seconds)


def cost(sweep: Sweep, row: int) -> float:
    """Return the seconds of a whole trial; one that ran out of memory counts like the sweep's median."""
    step = float(sweep.seconds[row])
    steps = float(np.nanmedian(sweep.seconds)) if np.isnan(step) else step
    return float(sweep.start_seconds[row]) + ITERATIONS * steps


def flagscale(priority: str | None = None, *, memory_model: bool = False) -> Searcher:
    """Return FlagScale's tuner, with the priority and the memory model of its configuration.

    Its memory model is flagcore's here, which errs less than its own.
    """

    def search(sweep: Sweep) -> list[Search]:
        problem, rows = sweep.problem, list[int]()
        candidates = [problem.space.candidate(row).as_dict() for row in range(len(problem.space))]
        strategies = [{knob: each[knob] for knob in NESTING} for each in candidates]
        needed = problem.predictions.peak_allocated_bytes.tolist() if memory_model else None
        capacity = problem.predictions.capacity_bytes
        tuner = FlagScale(strategies, priority, needed, float("inf") if capacity is None else float(capacity))
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


def oracle(sweep: Sweep) -> list[Search]:
    """Run the baseline, then the best: no search that begins with a baseline can do better."""
    problem = sweep.problem
    rows = dict.fromkeys((problem.space.find(problem.baseline), int(np.nanargmin(sweep.seconds))))
    return [_search(sweep, [row for row in rows if row is not None], says_done=True)]


def random(sweep: Sweep) -> list[Search]:
    """Search without replacement, in many orders."""
    chance = np.random.default_rng(0)
    orders = (chance.permutation(len(sweep.seconds)).tolist() for _ in range(SEEDS_OF_CHANCE))
    return [_search(sweep, order, says_done=False) for order in orders]


def _search(sweep: Sweep, rows: list[int], *, says_done: bool) -> Search:
    return Search(rows=tuple(rows), seconds=tuple(cost(sweep, row) for row in rows), says_done=says_done)
