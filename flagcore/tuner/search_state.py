"""The state of a search after its trials: what counts as measured and as a tie, and the plan that sums it up."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from flagcore.domain.knob import Knobs
from flagcore.domain.metrics import gain
from flagcore.domain.plan import Counts, Interference, Plan, Runs, Speedup
from flagcore.domain.space import DOES_NOT_FIT, Candidate, Pruned, Space
from flagcore.domain.spec import Control, Task
from flagcore.domain.trial import RUN, Role, Trial, TrialState, is_disturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The trials of a search so far.

    `by_candidate`: the trial that counts as the result of each candidate; see `flagcore.tuner.stages.learn`.
    `best`: the trial of the candidate with the highest median speed among those that meet the limits.
    `fastest`: the trial of the candidate with the highest median speed, whether it meets the limits or not.
    `probes`: trials of a lower fidelity.
    `interference`: the interference between parallel trials, as far as known.
    """

    by_candidate: dict[Candidate, Trial] = field(default_factory=dict)
    repeats: tuple[Trial, ...] = ()
    baseline: Trial | None = None
    best: Trial | None = None
    fastest: Trial | None = None
    probes: tuple[Trial, ...] = ()
    interference: Interference | None = None

    @property
    def trials(self) -> tuple[Trial, ...]:
        """One trial per candidate, in the order in which they ran."""
        return tuple(sorted(self.by_candidate.values(), key=lambda trial: trial.number))

    def repeats_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the conclusive repeats of a candidate, in order."""
        return tuple(trial for trial in self.repeats if trial.is_conclusive and trial.candidate == candidate)

    def all_runs(self, candidate: Candidate) -> Runs:
        """Return the runs of a candidate, and which of them count."""
        first = self.by_candidate.get(candidate)
        repeats = (each for each in self.repeats if each.candidate == candidate)
        return Runs.of((*((first,) if first else ()), *repeats))

    def runs_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the measured runs of a candidate that count."""
        return self.all_runs(candidate).counted

    def reported_trial(self, trial: Trial | None) -> Trial | None:
        """Return the run that reports show for a trial's candidate.

        It is `trial` if that is imported or one of the candidate's runs, and has whole steps. Otherwise it is the run
        whose steps were shortened least.
        """
        runs = self.runs_of(trial.candidate) if trial else ()
        if trial is None or not runs or ((trial in runs or trial.source) and not trial.shortened):
            return trial
        return max(runs, key=lambda run: run.shortened.nodes if run.shortened else math.inf)

    def speed_of(self, candidate: Candidate) -> float:
        """Return a candidate's steps per second, from the median step time of its runs. 0 if it was not measured."""
        seconds = self.all_runs(candidate).median_s
        return 1.0 / seconds if seconds else 0.0

    def keeps_limits(self, candidate: Candidate) -> bool:
        """Return whether more than half of a candidate's measured runs met all limits."""
        runs = self.runs_of(candidate)
        return 2 * sum(not trial.measurement.broken for trial in runs if trial.measurement) > len(runs)

    @property
    def settled(self) -> frozenset[Candidate]:
        """The candidates with a conclusive trial. All other candidates may be tried again."""
        return frozenset(candidate for candidate, trial in self.by_candidate.items() if trial.is_conclusive)

    def leaders(self, count: int) -> tuple[Trial, ...]:
        """Return the trials of up to `count` measured candidates that meet the limits, the best first, then the
        fastest."""
        rated = [(self.speed_of(each.candidate), each) for each in self.trials if self.keeps_limits(each.candidate)]
        rated.sort(key=lambda pair: (pair[1] != self.best, -pair[0]))
        return tuple(trial for speed, trial in rated[:count] if speed)

    @property
    def rivals(self) -> tuple[Trial, ...]:
        """Trials of the candidates that do not differ significantly from the best, the fastest first."""
        best = self.best
        if best is None:
            return ()
        best_runs, best_speed = self.runs_of(best.candidate), self.speed_of(best.candidate)
        near_best = []
        for trial in self.trials:
            if trial.candidate == best.candidate or not self.keeps_limits(trial.candidate):
                continue
            runs, own_speed = self.runs_of(trial.candidate), self.speed_of(trial.candidate)
            if own_speed and not significant(best_speed / own_speed - 1.0, best_runs, runs):
                near_best.append(trial)
        return tuple(sorted(near_best, key=lambda trial: -self.speed_of(trial.candidate)))

    @property
    def finalists(self) -> tuple[Trial, ...]:
        """One trial of each candidate to repeat: the measured baseline, the best and the fastest rivals, in this order.

        There are no duplicates. Empty if no candidate is the best yet.
        """
        if self.best is None:
            return ()
        baseline = self.baseline
        measured = (baseline,) if baseline and baseline.state is TrialState.MEASURED else ()
        return tuple({trial.candidate: trial for trial in (*measured, self.best, *self.rivals[:MAX_RIVALS])}.values())

    @property
    def repeated(self) -> tuple[Trial, ...]:
        """The finalists, and one trial of each other candidate that was disturbed."""
        candidates = {trial.candidate for trial in self.finalists}
        return (*self.finalists, *(trial for trial in self.disturbed if trial.candidate not in candidates))

    @property
    def disturbed(self) -> tuple[Trial, ...]:
        """Trials to repeat once, because they may be faster than the best without the programs that used their cores.

        At most MAX_DISTURBED, the one that may be fastest first. It is assumed that a trial slows down by the share of
        the cores that other programs use, the best as well.
        """
        if self.best is None:
            return ()
        best_s = _undisturbed_s(max(self.runs_of(self.best.candidate), key=_undisturbed_s))
        timed = [each for each in self.trials if each.is_conclusive and not each.source and each.measurement]
        slowed = [each for each in timed if each.share_of_others and each.candidate != self.best.candidate]
        slowed = sorted(slowed, key=_undisturbed_s)
        return tuple(each for each in slowed if _undisturbed_s(each) < best_s)[:MAX_DISTURBED]

    @property
    def faster_once(self) -> tuple[Trial, ...]:
        """Trials that ran once and were faster than the median of the best, the fastest first."""
        best_speed = self.speed_of(self.best.candidate) if self.best else math.inf
        faster = [each for each in self.trials if self.speed_of(each.candidate) > best_speed and each.is_conclusive]
        once = [each for each in faster if not self.repeats_of(each.candidate) and self.keeps_limits(each.candidate)]
        return tuple(sorted(once, key=lambda trial: -self.speed_of(trial.candidate)))

    @property
    def drift(self) -> float | None:
        """The relative speedup from the first to the last run of the baseline. None if it ran once."""
        runs = self.runs_of(self.baseline.candidate) if self.baseline else ()
        return runs[-1].speed / runs[0].speed - 1.0 if len(runs) > 1 else None

    @property
    def drifted(self) -> bool:
        """Whether the drift of the baseline exceeds the noise of its runs."""
        change = self.drift
        if change is None or self.baseline is None:
            return False
        runs = self.runs_of(self.baseline.candidate)
        return abs(change) > max(noise([run]) for run in (runs[0], runs[-1]))


def _undisturbed_s(trial: Trial) -> float:
    """Return the step time that a trial may have on cores that no other program uses, in seconds."""
    return trial.measurement.step_time_s * (1.0 - trial.share_of_others) if trial.measurement else math.inf


MIN_NOISE = 0.02
"""The minimum relative noise that is assumed between two runs of the same candidate. Chosen for runs minutes apart."""

MAX_RIVALS = 2
"""The maximum number of rivals of the best that run again. Chosen to limit the cost of repeats."""

MAX_DISTURBED = 2
"""The maximum number of trials that run again because other programs used their cores. Chosen to limit the cost of
repeats."""


def noise(runs: Sequence[Trial]) -> float:
    """Return the relative noise of a candidate, at least MIN_NOISE.

    It is the maximum of the spread of steps, the spread between runs, and the uncertainty of scaled step times.
    """
    measured = [trial.measurement for trial in runs if trial.measurement]
    if not measured:
        return MIN_NOISE
    step_spread = median(each.spread_s / each.step_time_s if each.step_time_s > 0 else 0.0 for each in measured)
    return max(MIN_NOISE, step_spread, spread(runs), *(trial.interval for trial in runs))


def spread(runs: Sequence[Trial]) -> float:
    """Return half of the difference between the fastest and the slowest of `runs`, relative to their median speed."""
    speeds = [trial.speed for trial in runs]
    return (max(speeds) - min(speeds)) / 2 / median(speeds) if speeds and median(speeds) > 0 else 0.0


def indifference(control: Control, runs: Sequence[Trial]) -> float:
    """Return the relative difference below which two candidates count as equally fast.

    It is the maximum of `control.indifference` and the noise of the best candidate, whose runs are `runs`.
    """
    return max(control.indifference, noise(runs))


def significant(slowdown: float, first_runs: Sequence[Trial], second_runs: Sequence[Trial]) -> bool:
    """Return whether the difference between two candidates exceeds the larger noise of the two, divided by the square
    root of the smaller number of runs.

    `slowdown`: the step time of the slower candidate over that of the faster one, minus one. `first_runs` and
    `second_runs`: the measured runs of each candidate.
    """
    # Times are compared, not speeds: noise is relative to a time and can exceed 100%, as can a slowdown, but not the
    # relative loss of speed.
    return slowdown >= max(noise(first_runs), noise(second_runs)) / math.sqrt(min(len(first_runs), len(second_runs)))


def measured_alone(trials: Sequence[Trial]) -> Trial | None:
    """Return the first trial of the run that was measured while no other trial ran, usually the baseline, or None."""
    trials_alone = (trial for trial in trials if trial.fidelity == RUN and not trial.source and trial.group is None)
    return next((trial for trial in trials_alone if trial.state is TrialState.MEASURED), None)


def interference(trials: Sequence[Trial]) -> Interference | None:
    """Return the last comparison of a trial that ran alone with one that ran in parallel, or None if there is none."""
    alone_times = measured_alone(trials)
    conclusive = [trial for trial in trials if trial.role is Role.INTERFERENCE and trial.is_conclusive]
    if alone_times is None or not conclusive:
        return None
    last = conclusive[-1]
    slowdown = alone_times.speed / last.speed - 1.0 if last.state is TrialState.MEASURED else None
    return Interference(slowdown=slowdown, noise=noise([alone_times]), trials=(alone_times.number, last.number))


SURE_GAIN = 10.0
"""The gain, relative to the noise, from which one repeat of the baseline is enough. Chosen by hand."""


def min_repeats(control: Control, search_state: SearchState) -> dict[Candidate, int]:
    """Return the minimum number of repeats of each finalist.

    It is `control.repeats` if there are several finalists, else 0. It is at least 1 for a finalist whose run was not
    final. Unless `control.repeats` is 0, it is 1 for other disturbed trials, and for a baseline that is slower than the
    best by more than SURE_GAIN times the noise; a baseline of which all runs were disturbed runs once more.
    """
    trials = search_state.finalists
    rounds = control.repeats if len(trials) > 1 else 0
    disturbed = {trial.candidate: min(control.repeats, 1) for trial in search_state.disturbed}
    least = disturbed | {trial.candidate: rounds if trial.is_final else max(rounds, 1) for trial in trials}
    baseline, best = search_state.baseline, search_state.best
    if baseline and best and baseline.candidate in least:
        faster = search_state.speed_of(best.candidate) / search_state.speed_of(baseline.candidate) - 1.0
        if faster > SURE_GAIN * max(noise(search_state.runs_of(each.candidate)) for each in (baseline, best)):
            least[baseline.candidate] = min(least[baseline.candidate], 1)
        if control.repeats and is_disturbed(search_state.runs_of(baseline.candidate)):
            again = len(search_state.repeats_of(baseline.candidate)) + 1
            least[baseline.candidate] = max(least[baseline.candidate], min(again, control.repeats + 1))
    return least


def next_repeat(control: Control, search_state: SearchState) -> Trial | None:
    """Return the trial to repeat next, or None if all repeats are done.

    The finalists run again in rotation, `min_repeats` times each. The total number of repeats is also limited, because
    the best and its rivals may change. At the end, each trial that ran once and was faster than the best runs again.
    More rounds choose no better in simulated races (benchmarks/LOG.md).
    """
    trials, minimum = search_state.repeated, min_repeats(control, search_state)
    done = {trial.candidate: len(search_state.repeats_of(trial.candidate)) for trial in trials}
    most = max(control.repeats, 1) * (2 + MAX_RIVALS) + MAX_DISTURBED
    once = search_state.faster_once if control.repeats else ()
    if sum(trial.is_conclusive for trial in search_state.repeats) >= most:
        return next(iter(once), None)
    waiting = [trial for trial in trials if done[trial.candidate] < minimum[trial.candidate]]
    return min(waiting or once, key=lambda trial: done.get(trial.candidate, 0), default=None)


def summarize(
    task: Task, space: Space, pruned: Pruned, search_state: SearchState, stopped_because: str, knobs: Knobs
) -> Plan:
    """Return the plan of a search. The best and the baseline are runs with whole steps, if there are such runs."""
    return Plan(
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        objective=task.spec.objective,
        counts=count(space, pruned, search_state),
        trials=search_state.trials,
        repeats=search_state.repeats,
        baseline=search_state.reported_trial(search_state.baseline),
        best=search_state.reported_trial(search_state.best),
        speedup=speedup(search_state, task.spec.objective),
        stopped_because=stopped_because,
        rivals=search_state.rivals,
        drift=search_state.drift,
        drifted=search_state.drifted,
        fidelity=task.spec.control.fidelity,
        probes=search_state.probes,
        fastest=search_state.fastest,
        interference=search_state.interference,
        limits=task.spec.work.slo,
        knobs=knobs,
    )


def count(space: Space, pruned: Pruned, search_state: SearchState) -> Counts:
    """Count the combinations by outcome.

    A candidate with a trial is counted by the trial's state, even if a rule removed it later.
    """
    trial_of_row = {row: trial for trial in search_state.trials if (row := space.find(trial.candidate)) is not None}
    states = Counter(trial.state for trial in trial_of_row.values())
    rule = pruned.rule.copy()
    rule[list(trial_of_row)] = -1
    removed = {name: int((rule == place + 1).sum()) for place, name in enumerate(pruned.rules)}
    return Counts(
        combinations=space.combinations,
        illegal=dict(space.illegal),
        merged=space.merged,
        candidates=len(space),
        does_not_fit=removed.pop(DOES_NOT_FIT, 0),
        pruned={name: number for name, number in removed.items() if number},
        measured=states[TrialState.MEASURED],
        stopped=states[TrialState.STOPPED],
        failed=sum(number for state, number in states.items() if state.failed),
        untried=int((rule == 0).sum()),
    )


def speedup(search_state: SearchState, objective: str) -> Speedup | None:
    """Return the speedup of the best over the baseline. None if one of them has no measurement of whole steps.

    Without rounds of runs that count, there is one round with all of these. It is significant only if both ran more
    than once, and not all runs of one of them while other programs used their cores.
    """
    best, baseline = search_state.best, search_state.baseline
    if best is None or baseline is None:
        return None
    if best.candidate == baseline.candidate:
        return Speedup.of(0.0, (0.0,))
    baseline_runs, best_runs = (search_state.runs_of(each.candidate) for each in (baseline, best))
    runs = (*baseline_runs, *best_runs)
    if not (baseline_runs and best_runs) or any(each.source or not each.is_final for each in runs):
        return None
    base_s, best_s = (1.0 / search_state.speed_of(each.candidate) for each in (baseline, best))
    base, own = (of[0].measurement.figures if of[0].measurement else {} for of in (baseline_runs, best_runs))
    is_rival = baseline.candidate in {each.candidate for each in search_state.rivals}
    rounds = [gain(objective, *seconds, base, own) for seconds in _rounds(baseline_runs, best_runs)]
    value = gain(objective, base_s, best_s, base, own)
    is_significant = not is_rival and are_repeated(baseline_runs, best_runs)
    return Speedup.of(value, rounds or [value], is_significant=is_significant)


def are_repeated(*runs_of_each: Sequence[Trial]) -> bool:
    """Return whether each candidate ran at least twice, and once without other programs on its cores."""
    return all(len(runs) > 1 and not is_disturbed(runs) for runs in runs_of_each)


def _rounds(baseline_runs: Sequence[Trial], best_runs: Sequence[Trial]) -> list[tuple[float, float]]:
    """Return the step times in each round: a run of the baseline, and the first run of the best before the next one."""
    ends = (*(run.number for run in baseline_runs[1:]), math.inf)
    return [
        (1.0 / run.speed, 1.0 / best_run.speed)
        for run, end in zip(baseline_runs, ends, strict=True)
        if (best_run := next((each for each in best_runs if run.number < each.number < end), None))
    ]
