"""Prometheus text as engines print it at /metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def totals(text: str) -> dict[str, float]:
    """Return the sum of each sample's values over its labels, by name; what is not finite is left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        with suppress(ValueError):
            if sample and math.isfinite(value := float(sample["value"])):
                found[sample["name"]] = found.get(sample["name"], 0.0) + value
    return found


def labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of the first sample called `name`; none if there is no such sample."""
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


def counters(fetch: Callable[[str], str], named: Mapping[str, str]) -> dict[str, float]:
    """Return figures of /metrics under our names; none where the server does not answer."""
    try:
        known = totals(fetch("/metrics"))
    except OSError:
        return {}
    return {ours: known[theirs] for theirs, ours in named.items() if theirs in known}
