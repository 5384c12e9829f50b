"""How far predictions are from measurements, and how well they order candidates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Pair = tuple[float | None, float]
"""Predicted (None where nothing was) and measured, both a cost: the lower, the better."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of what was answered: mean, median, 90th percentile and worst of |predicted / measured - 1|, and the bias, the
    geometric mean of predicted / measured less one.
    """

    answered: int
    mape: float
    median: float
    p90: float
    worst: float
    bias: float


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Over groups of jobs that differ in their candidate alone: mean of Kendall's tau-b, mean and largest regret.

    Regret is what the candidate that is predicted best takes longer than the best of all measured ones.
    """

    groups: int
    tau: float
    regret: float
    worst_regret: float


def errors(pairs: Iterable[Pair]) -> Errors | None:
    """Return the errors of `pairs`, None if none has a prediction."""
    ratios = [predicted / measured for predicted, measured in pairs if predicted]
    if not ratios:
        return None
    off = sorted(abs(ratio - 1.0) for ratio in ratios)
    return Errors(
        answered=len(off),
        mape=statistics.fmean(off),
        median=statistics.median(off),
        p90=off[min(len(off) - 1, int(0.9 * len(off)))],
        worst=off[-1],
        bias=math.exp(statistics.fmean(map(math.log, ratios))) - 1.0,
    )


def ranking(groups: Mapping[object, Sequence[Pair]]) -> Ranking | None:
    """Return how well `groups` are ordered: those of three candidates or more whose measurements differ.

    A candidate without a prediction ranks last. Of those that are predicted equal any may be picked: their mean counts.
    """
    taus, regrets = [], []
    for pairs in groups.values():
        if len(pairs) < 3 or len({measured for _, measured in pairs}) < 2:
            continue
        predicted = [math.inf if each is None else each for each, _ in pairs]
        measured = [each for _, each in pairs]
        least = min(predicted)
        picked = [time for guess, time in zip(predicted, measured, strict=True) if guess <= least * (1 + 1e-9)]
        taus.append(kendall(predicted, measured))
        regrets.append(statistics.fmean(picked) / min(measured) - 1.0)
    if not taus:
        return None
    mean = statistics.fmean
    return Ranking(groups=len(taus), tau=mean(taus), regret=mean(regrets), worst_regret=max(regrets))


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau-b: 1 for the same order, -1 for the reverse, 0 where one of the two is all ties."""
    agree, apart, alone = 0, 0, [0, 0]
    for (a, b), (c, d) in combinations(zip(one, other, strict=True), 2):
        first, second = (a > c) - (a < c), (b > d) - (b < d)
        agree += first * second > 0
        apart += first * second < 0
        alone[0] += first == 0 != second
        alone[1] += second == 0 != first
    both = math.sqrt((agree + apart + alone[0]) * (agree + apart + alone[1]))
    return (agree - apart) / both if both else 0.0
