"""Parses Prometheus text at /metrics and log lines of engines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from flagcore.domain.candidate import KnobValue

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
AVERAGED_COUNTERS = (
    *("cache_usage", "cache_hit_rate", "sequences_per_iteration"),
    *("acceptance_rate", "tokens_per_iteration"),
)
"""Counters that are averaged over ranks and instances; others are summed."""


def samples(text: str) -> dict[str, list[float]]:
    """Return the finite values of each sample by name, one for each set of labels."""
    result: dict[str, list[float]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        with suppress(ValueError):
            if sample and math.isfinite(value := float(sample["value"])):
                result.setdefault(sample["name"], []).append(value)
    return result


def combine(name: str, values: Sequence[float]) -> float:
    """Return the sum or the mean of a counter's `values` over ranks or instances."""
    return sum(values) / (len(values) if name in AVERAGED_COUNTERS else 1)


def labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of the first sample `name`; empty if there is none."""
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample and sample["name"] == name:
            return dict(_LABEL.findall(sample["labels"] or ""))
    return {}


def largest_matches(log: str, patterns: Mapping[str, str], scale: float = 1.0) -> dict[str, float]:
    """Return, by name, the largest number that a pattern's group matches in a log, times `scale`."""
    result = {}
    for name, pattern in patterns.items():
        with suppress(ValueError):
            result[name] = scale * max(float(each.replace(",", "")) for each in re.findall(pattern, log))
    return result


def settings(log: str, patterns: Mapping[str, Sequence[str]]) -> dict[str, KnobValue]:
    """Return, by knob, the first match in a log of the group of its first matching pattern."""
    result: dict[str, KnobValue] = {}
    for knob, knob_patterns in patterns.items():
        match = next((match for pattern in knob_patterns if (match := re.search(pattern, log))), None)
        if match:
            text = match[1]
            result[knob] = text == "True" if text in ("True", "False") else int(text) if text.isdigit() else text
    return result


def counters(fetch: Callable[[str], str], names: Mapping[str, str]) -> dict[str, float]:
    """Return samples of /metrics, renamed by `names`; empty if the server does not respond."""
    try:
        values = samples(fetch("/metrics"))
    except OSError:
        return {}
    return {name: combine(name, values[sample]) for sample, name in names.items() if sample in values}
