"""Reads what the servers of an engine report about themselves: samples at /metrics, and lines of their log."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import KnobValue
from flagcore.domain.trial import TrialState
from flagcore_serving.launch.server import Fetch
from flagcore_serving.load.result import COMPLETIONS

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReports:
    """The API of an engine's server, and the format of its reports: all that the trial program knows about an engine.

    - `counters`: the samples at /metrics to read, with the names that a trial's metrics give them. A sample may be
      limited to a label: name{label="value"}.
    - `shares`: metrics of a load that are ratios: the increase of the first counter (or the sum of several, as in a+b),
      divided by the summed increases of the other counters.
    - `settings`: regular expressions for the log, by knob. Their only group is the value in use; the first match
      counts.
    - `memory_lines`: regular expressions for memory in the log, by metric. The largest match counts.
    - `failures`: failure patterns, from specific to general.
    """

    counters: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    memory_lines: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[FailurePattern, ...] = ()
    effective: Callable[[Fetch, str], Mapping[str, KnobValue]] = lambda fetch, log: {}
    """Returns the knob values that a running server or its log reports. Raises OSError."""
    own_memory: Callable[[str], Mapping[str, float]] = lambda log: {}
    """Returns, from a log, those metrics of `memory` that `memory_lines` cannot describe."""
    api: str = COMPLETIONS
    """Path of the API for prompts of token ids: COMPLETIONS or GENERATE."""
    health: str = "/health"
    """Path that returns status 200 when the server is ready."""

    @classmethod
    def read(cls, package: str, **fields: Any) -> ServerReports:
        """Return the report format in `reports.yaml` of an engine's package. `fields`: fields that the file lacks."""
        data = yaml.load(files(package).joinpath("reports.yaml").read_text("utf-8"), _LOADER)
        data["failures"] = tuple(
            FailurePattern(pattern="|".join(row["lines"]), state=TrialState(row["state"]), advice=row.get("advice", ""))
            for row in data["failures"]
        )
        return cls(**data, **fields)

    def read_counters(self, fetch: Fetch) -> dict[str, float]:
        """Return the counters at /metrics by their names in a trial, or no counters if the server does not respond."""
        try:
            values = samples(fetch("/metrics"))
        except OSError:
            return {}
        return {name: combine(name, values[sample]) for sample, name in self.counters.items() if sample in values}

    def memory(self, log: str) -> dict[str, float]:
        """Return the memory that the log reports, by metric.

        The metrics are weights_gib, kv_cache_gib, graphs_gib and compute_gib (GiB on the fullest device), and
        kv_cache_tokens (tokens of the whole instance). Metrics that the log does not report are omitted.
        """
        return {**largest_matches(log, self.memory_lines), **self.own_memory(log)}


_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
AVERAGED_COUNTERS = (
    *("cache_usage", "cache_hit_rate", "sequences_per_iteration"),
    *("acceptance_rate", "tokens_per_iteration"),
)
"""Counters that are averaged over ranks and instances. All others are summed."""


def samples(text: str) -> dict[str, list[float]]:
    """Parse the response of /metrics. Return the finite values of each sample by name, one value per set of labels.

    A sample is also listed under its name with each label, as in name{label="value"}."""
    result: dict[str, list[float]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        with suppress(ValueError):
            if sample and math.isfinite(value := float(sample["value"])):
                named = (f'{{{label}="{each}"}}' for label, each in _LABEL.findall(sample["labels"] or ""))
                for suffix in ("", *named):
                    result.setdefault(sample["name"] + suffix, []).append(value)
    return result


def combine(name: str, values: Sequence[float]) -> float:
    """Combine the values of a counter over ranks or instances: the mean for AVERAGED_COUNTERS, else the sum."""
    return sum(values) / (len(values) if name in AVERAGED_COUNTERS else 1)


def labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of the first sample named `name`. The result is empty if there is no such sample."""
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


def settings_in(log: str, patterns: Mapping[str, Sequence[str]]) -> dict[str, KnobValue]:
    """Return the values of knobs in a log. For each knob, the first matching pattern is used."""
    result: dict[str, KnobValue] = {}
    for knob, knob_patterns in patterns.items():
        match = next((match for pattern in knob_patterns if (match := re.search(pattern, log))), None)
        if match:
            text = match[1]
            result[knob] = text == "True" if text in ("True", "False") else int(text) if text.isdigit() else text
    return result
