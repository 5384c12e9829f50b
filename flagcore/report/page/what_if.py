"""The predicted cost of each value of each knob, compared to the best configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flagcore.domain.space import IntArray
from flagcore.problem import Problem
from flagcore.stages.predict import record

CHUNK = 1 << 16


@dataclass(slots=True)
class _Value:
    """The fastest row with a value of a knob, and the fastest of those that differ least from the best."""

    count: int = 0
    fastest: tuple[float, int] = (np.inf, -1)
    nearest: tuple[int, float, int] = (1 << 30, np.inf, -1)


def what_if(problem: Problem, best: int) -> list[dict[str, Any]]:
    """Return for each knob with several values what each value costs, among candidates predicted to fit.

    `fastest` is the fastest predicted candidate with the value, `nearest` the fastest of those in which the fewest
    knobs differ from row `best`. Candidates without a predicted time are ignored.
    """
    space, own = problem.space, {knob: int(code[0]) for knob, code in problem.space.columns(np.array([best])).items()}
    knobs: dict[str, dict[int, _Value]] = {knob: {} for knob in own}
    for rows in space.chunks(CHUNK):
        columns = space.columns(rows)
        seconds = problem.predictions.step_time_s[rows]
        usable = np.flatnonzero(np.isfinite(seconds) & problem.predictions.fits[rows])
        if not usable.size:
            continue
        seconds = seconds[usable]
        columns = {knob: codes[usable] for knob, codes in columns.items()}
        distance = np.sum([codes != own[knob] for knob, codes in columns.items()], axis=0)
        for knob, codes in columns.items():
            _update(knobs[knob], codes, seconds, distance, rows.start + usable)
    found = []
    for axis in space.axes:
        values = knobs[axis.knob]
        if len(values) > 1:
            listed = [_value_record(problem, axis.decode(code), values[code], best) for code in sorted(values)]
            found.append({"knob": axis.knob, "best": axis.decode(own[axis.knob]), "values": listed})
    return found


def _update(values: dict[int, _Value], codes: IntArray, seconds: Any, distance: IntArray, rows: IntArray) -> None:
    for code in np.unique(codes).tolist():
        places = np.flatnonzero(codes == code)
        fastest = places[np.argmin(seconds[places])]
        near = places[np.lexsort((seconds[places], distance[places]))[0]]
        found = values.setdefault(code, _Value())
        found.count += int(places.size)
        found.fastest = min(found.fastest, (float(seconds[fastest]), int(rows[fastest])))
        found.nearest = min(found.nearest, (int(distance[near]), float(seconds[near]), int(rows[near])))


def _value_record(problem: Problem, value: Any, found: _Value, best: int) -> dict[str, Any]:
    fastest, nearest = (_candidate(problem, each[-1], best) for each in (found.fastest, found.nearest))
    return {"value": value, "candidates": found.count, "fastest": fastest, "nearest": nearest}


def _candidate(problem: Problem, row: int, best: int) -> dict[str, Any]:
    """Return a candidate by its differences from the best, with its prediction."""
    candidate, own = problem.space.candidate(row), problem.space.candidate(best).as_dict()
    predicted: Mapping[str, Any] = record(problem.platform.task, problem.predictions.row(row))
    keys = ("step_time_s", "tokens_per_second_per_device", "objective", "time", "limit", "memory")
    return {
        "candidate": candidate.as_dict(),
        "differs": {knob: value for knob, value in candidate.items if own.get(knob) != value},
        "predicted": {name: predicted[name] for name in keys if name in predicted},
    }
