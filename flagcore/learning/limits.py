"""The chance that a candidate keeps the limits of its task: upper bounds of figures, of which measurements tell."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from flagcore.contracts import SearchContext
from flagcore.domain.experience import Features
from flagcore.domain.space import FloatArray, IntArray
from flagcore.learning.prior import TIME
from flagcore.learning.ratios import Ratios
from flagcore.learning.trials import observed_figure

LEAST = 1e-9
"""Seconds: predicted figures below it count as it."""


def chance_to_keep(context: SearchContext, rows: IntArray, found: Features) -> FloatArray:
    """Return the chance that each row keeps all limits, as if they were independent; 1 where nothing is predicted.

    `found` are the features of `rows`. A figure's error is learned as that of the time is.
    """
    chance = np.ones(rows.size)
    for name, limit in context.task.spec.limits.items():
        predicted = context.predictions.figures.get(name)
        if predicted is None:
            continue
        ratio = Ratios(observed_figure(context, name), found, TIME).of(found)
        room = math.log(limit) - np.log(np.maximum(predicted[rows], LEAST)) - ratio.mean
        chance *= np.nan_to_num(ndtr(room / np.maximum(ratio.deviation, 1e-6)), nan=1.0)
    return chance
