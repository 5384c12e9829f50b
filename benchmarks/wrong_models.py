"""The search with wrong predictions for the current sweep, and correct predictions for the sweeps that it learns
from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
from searchers import Search, Searcher, by_strategy
from sweeps import Sweep, with_predictions

from flagcore import plugins
from flagcore.domain.prediction import Predictions

MEMORY = "memory"
ERROR_FACTORS: Mapping[str, Mapping[str, float]] = {
    "nothing wrong": {},
    "all times x 3": {"_s": 3.0},
    "all times / 3": {"_s": 1 / 3},
    "communication x 3": {"_comm_": 3.0},
    "communication / 3": {"_comm_": 1 / 3},
    "bubble x 3": {"_bubble_": 3.0},
    "bubble / 3": {"_bubble_": 1 / 3},
    "memory x 1.3": {MEMORY: 1.3},
    "memory x 0.7": {MEMORY: 0.7},
    "all times x 3, communication x 9, memory x 0.7": {"_s": 3.0, "_comm_": 3.0, MEMORY: 0.7},
}
"""Factors of predicted memory, and of parts of a step whose names contain the text."""


def wrong_models(sweeps: Sequence[Sweep]) -> dict[str, Searcher]:
    """Return searches by name: with experience from other sweeps on the chip, without, and by prediction only."""
    learned, predicted = plugins.strategy("learned"), plugins.strategy("predicted")
    searches = {
        "learned": by_strategy(learned, sweeps),
        "learned, first run on a chip": by_strategy(learned),
        "predicted": by_strategy(predicted),
    }
    return {
        f"{wrong}: {name}": _misled(search, factors)
        for wrong, factors in ERROR_FACTORS.items()
        for name, search in searches.items()
    }


def _misled(search: Searcher, factors: Mapping[str, float]) -> Searcher:
    def search_with_errors(sweep: Sweep) -> list[Search]:
        return search(with_predictions(sweep, distort(sweep.problem.predictions, factors)))

    return search_with_errors


def distort(predictions: Predictions, factors: Mapping[str, float]) -> Predictions:
    """Return predictions multiplied by `factors`; the factors of times are by the name of the part."""
    parts = dict(predictions.time_s)
    for text, factor in factors.items():
        parts |= {name: part * factor for name, part in parts.items() if text in name}
    slower = np.sum(list(parts.values()), axis=0) / np.sum(list(predictions.time_s.values()), axis=0)
    times = {name: getattr(predictions, name) * slower for name in ("step_time_s", "low_s", "high_s")}
    memory = factors.get(MEMORY, 1.0)
    names = [
        each.name for each in fields(predictions) if each.name.endswith("_bytes") and each.name != "capacity_bytes"
    ]
    sizes = {name: getattr(predictions, name) * memory for name in names}
    return replace(predictions, **times, **sizes, time_s=parts)
