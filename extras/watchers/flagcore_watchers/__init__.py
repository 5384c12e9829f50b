"""Watchers that log the events of a run to experiment trackers. `flag tune --watch NAME` selects them.

Each watcher has a function `on_event`. This module converts the metrics of a trial to the form that the trackers need.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

PARTS = ("predicted", "measured")
SKIPPED = ("effective", "versions", "components", "time_limit")
"""Mappings of a trial that contain no figures."""


def metrics(trial: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a trial's prediction and measurement by dotted names, and the trial's duration."""
    found = {"duration_s": float(trial["duration_s"])}
    for part in PARTS:
        found.update(_numbers(trial.get(part) or {}, part))
    return {name: value for name, value in found.items() if math.isfinite(value)}


def params(trial: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return the values of a trial's knobs by name. Null becomes the string `None`."""
    known = (str, int, float, bool)
    return {name: value if isinstance(value, known) else str(value) for name, value in trial["candidate"].items()}


def about(trial: Mapping[str, Any]) -> dict[str, str]:
    """Return the state, the role, the fidelity and the reason of a trial."""
    names = ("state", "role", "fidelity", "reason")
    return {name: str(trial[name]) for name in names if trial.get(name) is not None}


def _numbers(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and name not in SKIPPED:
            yield from _numbers(value, f"{prefix}.{name}")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}.{name}", float(value)
