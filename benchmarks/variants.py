"""Variants of a replay: searches without one part or with wrong predictions, trials at once, and subsets of sweeps."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from searchers import Search, Searcher, by_strategy
from sweeps import MIN_CANDIDATES, Sweep, select_rows, with_predictions

from flagcore import plugins
from flagcore.contracts import Engine
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns

PROBES = 3
"""Number of candidates probed before the first run, if all candidates of all sweeps were probed."""


def ablations(sweeps: Sequence[Sweep]) -> dict[str, Searcher]:
    """Return searches without one part by name. Some learn from the sweeps of other models on the same chip."""
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
    """Return searches by name, with wrong predictions for the current sweep and correct ones for those they learn from.

    They have experience from other sweeps on the chip, or none, or follow the prediction only.
    """
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


def print_at_once(
    names: Sequence[str], sweeps: Sequence[Sweep], numbers: Sequence[int], searches: int
) -> dict[str, Any]:
    """Print a table with a line for each strategy and number of concurrent trials, and return its values.

    Wall-clock is from the baseline to the end of the last trial.
    """
    print(
        "| strategy | at once | trials | wall-clock s | of serial | regret when done | best found |\n|" + " --- |" * 7
    )
    figures: dict[str, Any] = {}
    for name in names:
        for label, known in ((name, sweeps), (f"{name}, first run on a chip", ())):
            sequential = None
            for number in (1, *numbers):
                search = by_strategy(plugins.strategy(name), known, at_once=number)
                found = [_figures(sweep, search(sweep)[0]) for sweep in sweeps[::searches]]
                trials, wall, regret = (np.array(column) for column in zip(*found, strict=True))
                sequential = wall if sequential is None else sequential
                figures[f"{label}, {number}"] = line = {
                    "trials": float(trials.mean()),
                    "wall_clock_s": float(wall.mean()),
                    "of_serial": float(wall.sum() / sequential.sum()),
                    "regret_when_done": float(regret.mean()),
                    "best_kept_within_1pct": float((regret <= 0.01).mean()),
                }
                count, seconds, share, slower, best_share = line.values()
                cells = f"{count:.1f} | {seconds:.1f} | {share:.1%} | {slower:.2%} | {best_share:.1%}"
                print(f"| {label} | {number} | {cells} |", flush=True)
    return figures


def _figures(sweep: Sweep, search: Any) -> tuple[float, float, float]:
    """Return the trials of a search, its seconds, and the slowdown of its best candidate against the sweep's best."""
    return len(search.rows), search.clock[-1], float(np.nanmin(sweep.seconds[list(search.rows)]) / sweep.best - 1.0)


DRAWS = 2
SHARE = 0.7


def subsets(sweeps: Sequence[Sweep]) -> dict[str, list[Sweep]]:
    """Return subsets by name, for each of which a result should hold: halves, cluster sizes, and parts of the rows."""
    result = {}
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(len(sweeps)).tolist()
        for name, places in (("first", order[: len(order) // 2]), ("second", order[len(order) // 2 :])):
            result[f"{name} half of the sweeps, draw {draw + 1}"] = [sweeps[place] for place in sorted(places)]
    devices = [sweep.problem.platform.task.cluster.devices for sweep in sweeps]
    for many in sorted(set(devices)):
        result[f"{many} devices"] = [sweep for sweep, own in zip(sweeps, devices, strict=True) if own == many]
    for draw in range(DRAWS):
        fewer = [_subset(sweep, [draw, place]) for place, sweep in enumerate(sweeps)]
        result[f"{SHARE:.0%} of the rows, draw {draw + 1}"] = [
            each for each in fewer if len(each.seconds) >= MIN_CANDIDATES
        ]
    return {name: some for name, some in result.items() if some}


def _subset(sweep: Sweep, seed: list[int]) -> Sweep:
    size = len(sweep.seconds)
    chosen = np.random.default_rng(seed).choice(size, max(1, round(SHARE * size)), replace=False)
    return select_rows(sweep, np.sort(chosen))
