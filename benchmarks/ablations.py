"""Ablations of the search: variants without one part, to measure the value of that part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from searchers import Search, Searcher, by_strategy
from sweeps import Sweep, with_predictions

from flagcore import plugins
from flagcore.contracts import Engine
from flagcore.domain.space import BoolArray, Candidate, Columns

PROBES = 3
"""Number of candidates probed before the first run, if all candidates of all sweeps were probed."""


def ablations(sweeps: Sequence[Sweep]) -> dict[str, Searcher]:
    """Return searches by name. Some learn from the sweeps of other models on the same chip."""
    learned, predicted = plugins.strategy("learned"), plugins.strategy("predicted")
    experienced, new = by_strategy(learned, sweeps), by_strategy(learned)

    def without_prior(sweep: Sweep) -> list[Search]:
        return new(_without_prior(sweep))

    def without_dominance(sweep: Sweep) -> list[Search]:
        problem, blunt = sweep.problem, _Blunt(sweep.engine)
        platform = replace(problem.platform, engine=blunt)  # type: ignore[arg-type]
        return experienced(replace(sweep, problem=replace(problem, platform=platform)))

    searches = {
        "all of it": experienced,
        "without experience: first run on a chip": new,
        "without prior and experience": without_prior,
        "without learning: order of prediction": by_strategy(predicted),
        "without dominance": without_dominance,
    }
    if all(len(sweep.probes) == len(sweep.seconds) for sweep in sweeps):
        searches[f"{PROBES} probes first"] = by_strategy(learned, sweeps, probes=PROBES)
        searches[f"{PROBES} probes first, first run on a chip"] = by_strategy(learned, probes=PROBES)
    return searches


def _without_prior(sweep: Sweep) -> Sweep:
    """Return a sweep whose candidates all have the same predicted time."""
    known = sweep.problem.predictions
    same = np.full_like(known.step_time_s, np.median(known.step_time_s))
    return with_predictions(sweep, replace(known, step_time_s=same, low_s=0.5 * same, high_s=2.0 * same, time_s={}))


class _Blunt:
    """An engine without an order of memory between candidates."""

    def __init__(self, engine: Engine) -> None:
        self._workload = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        return np.zeros(next(iter(columns.values())).size, dtype=np.bool_)

    takes_at_least = needs_at_least
