"""Reads what engines print: Prometheus text at /metrics, and log lines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from flagcore.domain.candidate import KnobValue

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
AVERAGED = ("cache_usage", "cache_hit_rate", "sequences_per_iteration")
"""Counters that ranks and instances have in the mean; of the others they have the sum."""


def samples(text: str) -> dict[str, list[float]]:
    """Return the values of each sample, one for each set of labels, by name; values that are not finite are dropped."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        with suppress(ValueError):
            if sample and math.isfinite(value := float(sample["value"])):
                found.setdefault(sample["name"], []).append(value)
    return found


def joined(name: str, values: Sequence[float]) -> float:
    """Return the total over ranks or instances of the counter `name`: one or more `values`."""
    return sum(values) / (len(values) if name in AVERAGED else 1)


def labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of the first sample called `name`; empty if there is none."""
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample and sample["name"] == name:
            return dict(_LABEL.findall(sample["labels"] or ""))
    return {}


def largest(log: str, patterns: Mapping[str, str], scale: float = 1.0) -> dict[str, float]:
    """Return by name the largest number that a pattern's only group finds in a log, times `scale`."""
    found = {}
    for name, pattern in patterns.items():
        with suppress(ValueError):
            found[name] = scale * max(float(each.replace(",", "")) for each in re.findall(pattern, log))
    return found


def settings(log: str, patterns: Mapping[str, Sequence[str]]) -> dict[str, KnobValue]:
    """Return by knob what the group of the first pattern that matches finds first in a log."""
    found: dict[str, KnobValue] = {}
    for knob, several in patterns.items():
        match = next((match for pattern in several if (match := re.search(pattern, log))), None)
        if match:
            text = match[1]
            found[knob] = text == "True" if text in ("True", "False") else int(text) if text.isdigit() else text
    return found


def counters(fetch: Callable[[str], str], named: Mapping[str, str]) -> dict[str, float]:
    """Return figures of /metrics under our names; none where the server does not answer."""
    try:
        found = samples(fetch("/metrics"))
    except OSError:
        return {}
    return {ours: joined(ours, found[theirs]) for theirs, ours in named.items() if theirs in found}
