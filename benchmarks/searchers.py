"""The searches that a replay compares: flagcore's strategies, FlagScale's tuner, Optuna, and random search.

A search returns the rows that it ran, in order, with their costs. flagcore's searches call the functions of `flag tune`
itself (`learn`, `prune`, `rank`, `spent`; with probes also `combine` and `judge`), run the baseline first, and stop
slow trials early.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import optuna
from flagscale_rules import NESTING, FlagScale
from sweeps import Sweep

from flagcore.api.jobs import MAX_PAST
from flagcore.contracts import Choice, Problem, Strategy
from flagcore.domain.features import Observations, PastMeasurements
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Control
from flagcore.domain.trial import PROBE, Measurement, Role, Trial, TrialState
from flagcore.tuner.budget import stop_reason
from flagcore.tuner.learning import MEMORY_NOISE, MIN_NOISE
from flagcore.tuner.probe import combine, trial_of_probe
from flagcore.tuner.search_state import SearchState
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.measure import EARLY_STOP_RATIO
from flagcore.tuner.stages.predict import with_figures
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import rank, search_context

ITERATIONS, WARMUP = 5, 1
"""Steps and warm-up steps of a trial: the defaults of `flag tune` and of FlagScale."""
SEEDS_OF_CHANCE = 200
MAX_ASKS = 100
"""Maximum number of consecutive illegal or repeated suggestions of Optuna; then a random trial follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The trials of one search on one sweep, in the order in which they end.

    `seconds` is the cost of each trial, `probe_seconds` the cost of probes before the first trial, `says_done` whether
    the search stopped by itself, and `clock` the end of each trial.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    says_done: bool
    probe_seconds: float = 0.0
    clock: tuple[float, ...] = ()


Searcher = Callable[[Sweep], list[Search]]
"""Runs a search on a sweep, several times if it is random."""


def by_strategy(
    strategy: Strategy, other_sweeps: Sequence[Sweep] = (), *, probes: int = 0, at_once: int = 1
) -> Searcher:
    """Return a search by one of flagcore's strategies after `probes` probes.

    After the baseline, `at_once` trials run concurrently; the first ones include the baseline, to measure interference.
    The search learns from the latest of `other_sweeps` with the same chip and another model, as `flag tune` does from
    earlier runs.
    """
    other_measurements = [(one, _measured(one, number)) for number, one in enumerate(other_sweeps, start=1)]

    def search(sweep: Sweep) -> list[Search]:
        known = [past for one, past in other_measurements if _is_related(one, sweep)]
        time, memory = (
            (_last(Observations.join(each), MAX_PAST) for each in zip(*known, strict=True)) if known else _NOTHING
        )
        return [_run_search(sweep, strategy, PastMeasurements(time=time, memory=memory), probes, at_once)]

    return search


_NOTHING = Observations.empty(), Observations.empty()

WAIT = Choice(row=None, because="")


def _last(observed: Observations, most: int) -> Observations:
    rows = np.arange(max(0, len(observed) - most), len(observed))
    if not rows.size:
        return Observations.empty()
    return Observations(
        observed.features.take(rows), observed.log_ratio[rows], observed.noise[rows], observed.task[rows]
    )


def _is_related(one: Sweep, other: Sweep) -> bool:
    first, second = one.problem.platform.task, other.problem.platform.task
    return first.cluster.groups[0].chip == second.cluster.groups[0].chip and first.spec.model != second.spec.model


def _measured(sweep: Sweep, number: int) -> tuple[Observations, Observations]:
    """Return the measured times and memory of a sweep."""
    rows = np.flatnonzero(np.isfinite(sweep.seconds))
    predictions = sweep.problem.predictions
    seen = search_context(sweep.problem, learn(()), PastMeasurements.empty()).features(rows)

    def observed(measured: FloatArray, predicted: FloatArray, noise: float) -> Observations:
        ratio = np.log(measured[rows] / predicted[rows])
        return Observations(seen, ratio, np.full(rows.size, noise), np.full(rows.size, number))

    return (
        observed(sweep.seconds, predictions.step_time_s, MIN_NOISE),
        observed(sweep.used_bytes, predictions.device_used_bytes, MEMORY_NOISE),
    )


def _run_search(sweep: Sweep, strategy: Strategy, experience: PastMeasurements, probes: int, at_once: int) -> Search:
    problem, space = sweep.problem, sweep.problem.space
    control = replace(problem.platform.task.spec.control, max_trials=len(space) + 1, max_time=None)
    trials = _probe_candidates(sweep, strategy, experience, probes)
    learned = len(trials)
    search_state, problem = _learn_from_trials(problem, trials)
    choice, role = Choice(row=space.find(problem.baseline), because=""), Role.BASELINE
    pending, now, clock = list[tuple[float, Trial]](), 0.0, list[float]()
    while choice.row is not None or pending:
        while choice.row is not None:
            best = search_state.best if role is Role.SEARCH else None
            trial = _replay_trial(sweep, choice, len(trials) + len(pending), role, best)
            pending.append((now + trial.duration_s, trial))
            full = len(pending) == at_once or role is Role.BASELINE
            choice = WAIT if full else _next(problem, strategy, experience, search_state, control, pending)
        now, ended = min(pending, key=lambda each: each[0])
        pending.remove((now, ended))
        if ended.role is not Role.INTERFERENCE:
            trials.append(ended)
            clock.append(now)
        if at_once > 1 and role is Role.BASELINE and ended.state is TrialState.MEASURED:
            pending.append((now + ended.duration_s, replace(ended, role=Role.INTERFERENCE)))
        role = Role.SEARCH
        search_state, problem = _learn_from_trials(problem, trials)
        choice = _next(problem, strategy, experience, search_state, control, pending)
    found = [space.find(trial.candidate) for trial in trials[learned:]]
    return Search(
        rows=tuple(at for at in found if at is not None),
        seconds=tuple(trial.duration_s for trial in trials[learned:]),
        says_done=True,
        probe_seconds=sum(trial.duration_s for trial in trials[:learned]),
        clock=tuple(clock),
    )


def _next(
    problem: Problem,
    strategy: Strategy,
    experience: PastMeasurements,
    search_state: SearchState,
    control: Control,
    pending: Sequence[tuple[float, Trial]],
) -> Choice:
    """Return the candidate that a search tries next, without a row if it waits for running trials or ends."""
    running = [trial for _, trial in pending if trial.role is Role.SEARCH]
    if stop_reason(control, search_state, 0.0, len(running)) is not None:
        return WAIT
    return rank(strategy, search_context(problem, search_state, experience, pending=running))


def _learn_from_trials(problem: Problem, trials: Sequence[Trial]) -> tuple[SearchState, Problem]:
    search_state = learn(trials)
    pruned = prune_by_trials(problem, search_state.trials, search_state.probes)
    return search_state, replace(problem, pruned=pruned)


def _probe_candidates(sweep: Sweep, strategy: Strategy, experience: PastMeasurements, count: int) -> list[Trial]:
    """Return the probes before the first run: of the candidates that the strategy would try first."""
    problem, trials = sweep.problem, list[Trial]()
    task = problem.task
    probes = np.zeros(0, dtype=np.int64)
    while len(trials) < count:
        search_state, problem = _learn_from_trials(problem, trials)
        seen = search_context(problem, search_state, experience)
        left = np.setdiff1d(seen.open_rows, probes)
        if not left.size or (row := rank(strategy, replace(seen, open_rows=left)).row) is None:
            break
        probe = sweep.probes[row]
        trial = Trial(
            number=len(trials), candidate=probe.candidate, role=Role.SEARCH, state=TrialState.RUNNING, fidelity=PROBE
        )
        combined = combine(problem.predictions.row(row), probe, problem.platform)
        trials.append(trial_of_probe(task, trial, probe, combined))
        probes = np.append(probes, row)
    return trials


def _replay_trial(sweep: Sweep, choice: Choice, number: int, role: Role, best_trial: Trial | None) -> Trial:
    """Return the trial of a choice's row as it was measured, stopped early like a real trial."""
    row = choice.row
    assert row is not None
    problem, step = sweep.problem, float(sweep.seconds[row])
    task = problem.platform.task
    trial = Trial(
        number=number,
        candidate=problem.space.candidate(row),
        role=role,
        state=TrialState.OUT_OF_MEMORY,
        predicted=with_figures(task, problem.predictions.row(row)),
        believed=choice.belief,
        reason="it ran out of memory",
        duration_s=cost(sweep, row),
    )
    if np.isnan(step):
        return trial
    stopped_early = (
        best_trial is not None
        and best_trial.measurement is not None
        and step > EARLY_STOP_RATIO * best_trial.measurement.step_time_s
    )
    iterations = WARMUP + 2 if stopped_early else ITERATIONS
    train = task.spec.train
    measurement = Measurement(
        step_times_s=(step,) * (iterations - WARMUP),
        step_time_s=step,
        spread_s=0.0,
        tokens_per_second_per_device=train.global_batch_size * train.seq_length / step / task.cluster.devices,
        device_used_bytes=None if stopped_early else int(sweep.used_bytes[row]),
        partial=stopped_early,
    )
    state = TrialState.STOPPED if stopped_early else TrialState.MEASURED
    seconds = float(sweep.start_seconds[row]) + iterations * step
    return replace(trial, state=state, reason=None, measurement=measurement, duration_s=seconds)


def cost(sweep: Sweep, row: int) -> float:
    """Return the seconds of a complete trial; out of memory costs the sweep's median."""
    step = float(sweep.seconds[row])
    steps = float(np.nanmedian(sweep.seconds)) if np.isnan(step) else step
    return float(sweep.start_seconds[row]) + ITERATIONS * steps


def flagscale(priority: str | None = None, *, memory_model: bool = False) -> Searcher:
    """Return FlagScale's tuner with the priority and the memory pruning of its configuration.

    Its memory estimates are those of flagcore, which are more accurate than its own.
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
    """Return Optuna's TPE over the knobs that vary; illegal and repeated suggestions cost nothing."""

    def search(sweep: Sweep) -> list[Search]:
        # otherwise all sweeps begin with the same suggestions
        own = zlib.crc32(repr((sweep.name, sweep.source)).encode())
        return [_sample(sweep, optuna.samplers.TPESampler(seed=own + seed), own + seed) for seed in range(seeds)]

    return search


def _sample(sweep: Sweep, sampler: optuna.samplers.BaseSampler, seed: int) -> Search:
    columns, space = sweep.problem.space.columns(), sweep.problem.space
    names = [axis.knob for axis in space.axes if np.unique(columns[axis.knob]).size > 1]
    if len(names) > 1 and "data_parallel_size" in names:
        names.remove("data_parallel_size")  # it follows from the devices
    distributions = {
        name: optuna.distributions.CategoricalDistribution(np.unique(columns[name]).tolist()) for name in names
    }
    known_rows = {
        tuple(values): row for row, values in enumerate(zip(*(columns[n].tolist() for n in names), strict=True))
    }
    study, chance = optuna.create_study(sampler=sampler), np.random.default_rng(seed)
    rows: list[int] = []
    asks = 0
    while len(rows) < len(space) and not (rows and np.nanmin(sweep.seconds[rows]) <= sweep.best):
        if asks == MAX_ASKS:
            row = int(chance.choice(np.setdiff1d(np.arange(len(space)), rows)))
            values = {name: int(columns[name][row]) for name in names}
            study.enqueue_trial(values)
        trial = study.ask(distributions)
        row = known_rows.get(tuple(trial.params[name] for name in names))
        asks += 1
        if row is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        step = float(sweep.seconds[row])
        study.tell(trial, 1e3 * float(np.nanmax(sweep.seconds)) if np.isnan(step) else step)
        if row not in rows:
            rows.append(row)
            asks = 0
    return _search(sweep, rows, says_done=False)


def oracle(sweep: Sweep) -> list[Search]:
    """Run the baseline, then the best candidate: an upper bound for searches that begin with the baseline."""
    problem = sweep.problem
    rows = dict.fromkeys((problem.space.find(problem.baseline), int(np.nanargmin(sweep.seconds))))
    return [_search(sweep, [row for row in rows if row is not None], says_done=True)]


def random(sweep: Sweep) -> list[Search]:
    """Run candidates in random order without replacement."""
    chance = np.random.default_rng(0)
    orders = (chance.permutation(len(sweep.seconds)).tolist() for _ in range(SEEDS_OF_CHANCE))
    return [_search(sweep, order, says_done=False) for order in orders]


def _search(sweep: Sweep, rows: list[int], *, says_done: bool) -> Search:
    return Search(rows=tuple(rows), seconds=tuple(cost(sweep, row) for row in rows), says_done=says_done)
