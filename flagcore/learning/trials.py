"""Observed ratios of measured to predicted figures, and the expected duration of trials."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

import numpy as np

from flagcore.contracts import SearchContext
from flagcore.domain.experience import Observations
from flagcore.domain.search_state import FAILED_STATES
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import PROBE, RUN, Measurement, Trial, TrialState
from flagcore.learning.prior import MEMORY, TIME, Scales
from flagcore.learning.ratios import Ratios

LEAST_NOISE = 0.01
"""Minimum relative noise of a step time."""

PARTIAL_NOISE = 0.05
"""Minimum noise of a trial that was stopped early: its first steps say less about the others."""

PROBE_NOISE = 0.05
"""Noise of a probe: its communication is modelled, and no other rank runs."""

MEMORY_NOISE = 0.01

FIGURE_NOISE = 0.1
"""Noise of a latency: the slowest of a hundred requests differs this much between two runs of one load."""

BEYOND, MAX_EXCESS = 0.02, 0.5
"""Logarithms: the assumed minimum excess over the capacity of a trial out of memory, and the maximum excess over the
prediction, beyond which a failure has another cause."""


def observed_times(context: SearchContext) -> Observations:
    """Return measured over predicted step times. Without a prediction the ratio is to one second.

    Failed and invalid trials are ignored. A timed-out trial is a lower bound: the time limit divided by its steps, or
    the expected time if that is longer. A trial that would be much slower than expected hung, and is ignored.
    """
    found = [(trial, row) for trial, row in seen(context) if _timed(trial)]
    rows = np.array([row for _, row in found], dtype=np.int64)
    predicted = unit_where_unknown(context)[rows]
    measured = np.array([trial.measurement.step_time_s for trial, _ in found if trial.measurement])
    probes = {probe.number for probe in context.probes}
    usual = median([_spread(trial.measurement) for trial, _ in found if trial.state is TrialState.MEASURED] or [0.0])
    least = [PROBE_NOISE if trial.number in probes else LEAST_NOISE for trial, _ in found]
    noise = np.array([max(few, _noise(trial, usual)) for few, (trial, _) in zip(least, found, strict=True)])
    known = _observed(context, rows, np.log(measured) - np.log(predicted), noise)
    return Observations.join((known, _bounds_of_time(context, known)))


def _bounds_of_time(context: SearchContext, known: Observations) -> Observations:
    """Return the bounds of trials that timed out, probes aside: a probe runs few micro-batches of a step."""
    control, overhead = context.task.spec.control, overhead_seconds(context)
    out = [
        (trial, row) for trial, row in seen(context) if trial.state is TrialState.TIMED_OUT and trial.fidelity == RUN
    ]
    scales = [trial.shortened.scale if trial.shortened else 1.0 for trial, _ in out]
    late = [((trial.duration_s - overhead) * scale, row) for (trial, row), scale in zip(out, scales, strict=True)]
    found = [(seconds / control.train_iters, row) for seconds, row in late if seconds > 0]
    if not found:
        return Observations.empty()
    rows = np.array([row for _, row in found], dtype=np.int64)
    bound = np.log([seconds for seconds, _ in found]) - np.log(unit_where_unknown(context)[rows])
    expected = _expected(context, context.past.time, known, rows, TIME)
    slow = bound < expected + MAX_EXCESS
    ratio = np.maximum(expected, bound)[slow]
    return _observed(context, rows[slow], ratio, np.full(ratio.size, PARTIAL_NOISE))


def believed_times(context: SearchContext, known: Observations) -> Observations:
    """Return what the pending trials are expected to measure after what is `known`, as if they had measured it.

    So several trials are chosen one after the other ("kriging believer"; Ginsbourger et al. 2010).
    """
    rows = np.array([context.space.find(trial.candidate) for trial in context.pending], dtype=np.int64)
    if not rows.size:
        return Observations.empty()
    ratio = _expected(context, context.past.time, known, rows, TIME)
    return _observed(context, rows, ratio, np.full(rows.size, LEAST_NOISE))


def overhead_seconds(context: SearchContext) -> float:
    """Return the median time of finished trials outside their steps; 0 before the first one."""
    steps = context.task.spec.control.train_iters
    overheads = [seconds for trial in context.trials if (seconds := trial.overhead_s(steps)) is not None]
    return max(median(overheads), 0.0) if overheads else 0.0


def observed_memory(context: SearchContext) -> Observations:
    """Return measured over predicted memory in use.

    A trial that ran out of memory is a lower bound: it counts as the expected need, or as slightly more than the
    capacity if that is larger.
    """
    predicted, share = context.predictions.device_used_bytes, context.predictions.share_in_use
    ran = [(trial, row) for trial, row in seen(context) if trial.state is TrialState.MEASURED]
    found = [(row, used) for trial, row in ran if (used := _used(trial.measurement))]
    known = _observed_values(context, found, predicted, MEMORY_NOISE)
    failed = [row for trial, row in seen(context) if trial.state is TrialState.OUT_OF_MEMORY and share[row] > 0]
    if not failed:
        return known
    rows = np.array(failed, dtype=np.int64)
    expected = _expected(context, context.past.memory, known, rows, MEMORY)
    bound = np.minimum(BEYOND - np.log(share[rows]), MAX_EXCESS)
    return Observations.join(
        (known, _observed(context, rows, np.maximum(expected, bound), np.full(len(rows), 2 * BEYOND)))
    )


def observed_figure(context: SearchContext, name: str) -> Observations:
    """Return measured over predicted values of a figure of servers, of the trials that measured it."""
    predicted = context.predictions.figures[name]
    found = [
        (row, figure)
        for trial, row in seen(context)
        if trial.state is TrialState.MEASURED and trial.measurement
        if (figure := trial.measurement.figures.get(name, 0.0)) > 0 and predicted[row] > 0
    ]
    return _observed_values(context, found, predicted, FIGURE_NOISE)


def _observed_values(
    context: SearchContext, found: Sequence[tuple[int, float]], predicted: FloatArray, noise: float
) -> Observations:
    rows = np.array([row for row, _ in found], dtype=np.int64)
    ratio = np.log(np.array([value for _, value in found], dtype=np.float64)) - np.log(predicted[rows])
    return _observed(context, rows, ratio, np.full(len(rows), noise))


def unit_where_unknown(context: SearchContext) -> FloatArray:
    """Return the predicted step times, the median for unknown ones; one second for all if none is known."""
    step = context.predictions.step_time_s
    known = np.isfinite(step)
    return np.where(known, step, np.median(step[known])) if known.any() else np.ones_like(step)


def _expected(
    context: SearchContext, past: Observations, known: Observations, rows: IntArray, scales: Scales
) -> FloatArray:
    """Return the posterior means of `rows` from exact observations only."""
    asked = context.features(rows)
    return Ratios(Observations.join((past, known)), asked, scales).of(asked).mean


def seen(context: SearchContext) -> Sequence[tuple[Trial, int]]:
    """Return trials and their rows, and probes of candidates that did not run."""
    ran = {trial.candidate for trial in context.trials if trial.state is not TrialState.INTERRUPTED}
    several = (*context.trials, *(probe for probe in context.probes if probe.candidate not in ran))
    return [(trial, row) for trial in several if (row := context.space.find(trial.candidate)) is not None]


def _timed(trial: Trial) -> bool:
    ended = trial.state in (TrialState.MEASURED, TrialState.STOPPED)
    return ended and trial.measurement is not None and 0 < trial.measurement.step_time_s < math.inf


def _observed(context: SearchContext, rows: IntArray, ratio: FloatArray, noise: FloatArray) -> Observations:
    if not rows.size:
        return Observations.empty()
    return Observations(context.features(rows), ratio, noise, np.zeros(rows.size, dtype=np.int64))


def _spread(measured: Measurement | None) -> float:
    """Return the spread of a trial's steps as a share of their median."""
    return measured.spread_s / measured.step_time_s if measured else 0.0


def _noise(trial: Trial, usual: float) -> float:
    """Return the noise of a trial's step time.

    `usual` is the median spread of all trials of the run: few steps give a poor estimate of their own.
    """
    measured = trial.measurement
    if measured is None:
        return LEAST_NOISE
    spread = max(_spread(measured), usual) / math.sqrt(max(len(measured.step_times_s), 1))
    return max(PARTIAL_NOISE if measured.partial else LEAST_NOISE, spread, trial.interval)


def _used(measured: Measurement | None) -> float:
    """Return the memory that a trial used, comparable to the prediction, or 0."""
    return float(measured.device_used_bytes or 0) if measured and not measured.partial else 0.0


def whole_seconds(context: SearchContext, log_time: FloatArray) -> FloatArray:
    """Return the seconds of a complete trial: the overhead of trials, and the steps.

    All probes take the same time, 1 before the first one, because they run few micro-batches.
    """
    if context.task.spec.control.fidelity == PROBE:
        return np.full_like(log_time, _median(context, (TrialState.MEASURED,)) or 1.0)
    control = context.task.spec.control
    step = np.minimum(np.exp(log_time), control.max_step_time or math.inf)  # longer ones are shortened
    seconds: FloatArray = overhead_seconds(context) + control.train_iters * step
    return seconds


def expected_seconds(
    context: SearchContext, log_time: FloatArray, whole: FloatArray, fits: FloatArray, ends: FloatArray
) -> FloatArray:
    """Return the expected seconds of a trial, from the probabilities that it fits and that it ends.

    A failing trial takes the median time of trials that failed in the same way; before the first one, the overhead
    and one step.
    """
    short = overhead_seconds(context) + np.exp(log_time) if context.task.spec.control.fidelity != PROBE else whole
    out = _median(context, (TrialState.OUT_OF_MEMORY,)) or short
    broken = _median(context, FAILED_STATES) or short
    seconds: FloatArray = fits * (ends * whole + (1.0 - ends) * broken) + (1.0 - fits) * out
    return seconds


def _median(context: SearchContext, states: Collection[TrialState]) -> float | None:
    return median([trial.duration_s for trial in context.trials if trial.state in states] or [0.0]) or None
