"""What trials taught decides: the most expected gain for its expected cost, and an end when nothing is left to gain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.special import ndtr

from flagcore.contracts import Choice, Scene
from flagcore.domain.experience import Features, Observed
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import PROBE, Trial, TrialState
from flagcore.learning import MEMORY, TIME, Ratios, chance_to_gain, expected_gain
from flagcore.learning.trials import observed_figure, observed_memory, observed_times, unit_where_unknown

LOOKED_AT = 4096
"""Of the open candidates as many are weighed, the fastest predicted ones."""

TOGETHER = 256
"""Of these as many, the likeliest to gain, are weighed together when the search asks whether to go on."""

LEAST_GAIN, LEAST_CHANCE = 0.01, 0.05
"""The search ends when the chance that any open candidate is faster than the best by more than the first is less than
the second."""

LEAST_MEASURED = 3
"""So many candidates of the run itself are measured before it may end: what earlier runs teach may not hold here."""

TAIL = 1.2815515655446004
"""Standard deviations from the middle to the end of an 80% interval."""


@dataclass(frozen=True, slots=True)
class _View:
    """What is believed of some open rows: logarithm of seconds, chance to fit and keep the limits, seconds of a
    trial."""

    rows: IntArray
    features: Features
    ratios: Ratios
    log_time: FloatArray
    deviation: FloatArray
    fits: FloatArray
    cost: FloatArray


class Learned:
    """Corrects predictions by what trials of this run, and of earlier ones on the same chip, were measured at."""

    name = "learned"

    def next(self, scene: Scene) -> Choice:
        """Return the trial with the most expected gain for its expected cost, or none if hardly any gain is left."""
        view = _view(scene)
        ran = [trial.measurement for trial in scene.trials if _counts(trial) and trial.measurement]
        measured = [measurement.step_time_s for measurement in ran if not measurement.broken]
        if not measured:
            place = int(np.argmax(np.log(view.fits + 1e-12) - view.log_time))
            if len(ran) >= LEAST_MEASURED and view.fits.max() < LEAST_CHANCE:
                told = f"no untried candidate keeps the limits with a chance of more than {view.fits.max():.1%}"
                return Choice(row=None, because=told)
            nothing = "nothing that keeps the limits is measured yet" if ran else "nothing is measured yet"
            return _choice(view, place, f"{nothing}: the fastest predicted that is likely to fit")
        best = math.log(min(measured))
        gain = view.fits * expected_gain(view.log_time, view.deviation, best)
        chance, most = _left(view, gain, best)
        told = (
            f"the chance that an untried candidate is more than {LEAST_GAIN:.0%} faster than the best is {chance:.1%}; "
            f"it could be {most:.1%} faster at most (95%)"
        )
        if chance < LEAST_CHANCE and len(ran) >= LEAST_MEASURED:
            return Choice(row=None, because=told)
        possible = np.ones(gain.shape) if scene.seconds_left is None else view.cost < scene.seconds_left
        if not possible.any():
            return Choice(row=None, because=f"no trial fits into the {scene.seconds_left:.0f} s that are left; {told}")
        place = int(np.argmax(possible * gain / view.cost))
        return _choice(view, place, f"an expected gain of {gain[place]:.1%}; {told}")


def _view(scene: Scene) -> _View:
    """Weigh the open rows that are predicted to be the fastest."""
    predicted = unit_where_unknown(scene)
    rows = scene.open_rows
    if rows.size > LOOKED_AT:
        rows = np.sort(rows[np.argpartition(predicted[rows], LOOKED_AT)[:LOOKED_AT]])
    found = scene.features(rows)
    ratios = Ratios(Observed.join((scene.past.time, observed_times(scene))), found, TIME)
    time = ratios.of(found)
    log_time = np.log(predicted[rows]) + time.mean
    fits = _fits(scene, rows, found) * _keeps(scene, rows, found)
    return _View(rows, found, ratios, log_time, time.deviation, fits, _cost(scene, log_time))


def _fits(scene: Scene, rows: IntArray, found: Features) -> FloatArray:
    """Return the chance that each row fits, 1 where the capacity is not known."""
    share = scene.predictions.share_in_use[rows]
    if np.isnan(share).all():
        return np.ones(rows.size)
    memory = Ratios(Observed.join((scene.past.memory, observed_memory(scene))), found, MEMORY).of(found)
    room = -np.log(share) - memory.mean
    chance: FloatArray = np.nan_to_num(ndtr(room / np.maximum(memory.deviation, 1e-6)), nan=1.0)
    return chance


def _keeps(scene: Scene, rows: IntArray, found: Features) -> FloatArray:
    """Return the chance that each row keeps the limits, 1 where nothing is predicted of them."""
    chance = np.ones(rows.size)
    for name, limit in scene.task.spec.limits.items():
        predicted = scene.predictions.figures.get(name)
        if predicted is None:
            continue
        ratio = Ratios(observed_figure(scene, name), found, TIME).of(found)
        room = math.log(limit) - np.log(np.maximum(predicted[rows], 1e-9)) - ratio.mean
        chance *= np.nan_to_num(ndtr(room / np.maximum(ratio.deviation, 1e-6)), nan=1.0)
    return chance


def _cost(scene: Scene, log_time: FloatArray) -> FloatArray:
    """Return the expected seconds of a trial: what trials took beside their steps, and the steps.

    A probe runs few micro-batches, whatever the step: all cost the same.
    """
    if scene.task.spec.control.fidelity == PROBE:
        return np.ones_like(log_time)
    steps = scene.task.spec.control.train_iters
    beside = [
        trial.duration_s - steps * trial.measurement.step_time_s
        for trial in scene.trials
        if _counts(trial) and trial.measurement
    ]
    cost: FloatArray = (max(median(beside), 0.0) if beside else 0.0) + steps * np.exp(log_time)
    return cost


def _left(view: _View, gain: FloatArray, best: float) -> tuple[float, float]:
    """Return the chance that an open row gains enough to matter, and how much one may gain."""
    likeliest = np.argsort(-gain, kind="stable")[:TOGETHER]
    covariance = view.ratios.joint(view.features.take(likeliest)).covariance
    assert covariance is not None
    return chance_to_gain(view.log_time[likeliest], covariance, view.fits[likeliest], best, LEAST_GAIN)


def _choice(view: _View, place: int, because: str) -> Choice:
    middle, spread = view.log_time[place], TAIL * view.deviation[place]
    step = {"value": math.exp(middle), "low": math.exp(middle - spread), "high": math.exp(middle + spread)}
    return Choice(
        row=int(view.rows[place]),
        because=because,
        belief={"step_time_s": step, "chance_to_fit": float(view.fits[place])},
    )


def _counts(trial: Trial) -> bool:
    return trial.state is TrialState.MEASURED


STRATEGY = Learned()
