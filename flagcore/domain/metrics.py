"""The metrics of services: their names, their statistics, and the highest load that meets limits of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flagcore.i18n import _

PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", *(f"p{each}" for each in PERCENTILES))
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
"""Latencies in seconds: the time to the first token, the time per further token, the time between two chunks of a
response, and the time of the whole request."""
PER_DEVICE, PER_USER = "output_tokens_per_s_per_device", "output_tokens_per_s_per_user"
RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_requests_per_s", PER_DEVICE)
"""Rates of the whole cluster, except for the last one, which is per device. Goodput includes only the requests that
meet the SLO."""

MIN_REQUESTS = {"p99": 400, "p95": 80, "p90": 40}
"""The minimum number of requests for measuring a percentile. Chosen so that four requests are above the percentile."""
HIGHEST_LOAD = "highest_load"
"""The name of the metric for the highest rate or concurrency that meets the SLO, for a load with `auto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestLoad:
    """The result of a search for the highest load, as request rates or numbers of clients.

    - `met`: the highest load that met the limits; None if no load did.
    - `exceeded`: the lowest load above `met` that exceeded a limit; None if no load did.
    - `untested`: the lowest load between both for which no time was left. The highest load may then be higher than
      `met`. None if no load was left out.
    """

    met: float | None = None
    exceeded: float | None = None
    untested: float | None = None


def devices_in_use(figures: Mapping[str, float]) -> float:
    """Return the number of devices of a server with these figures. 0 if it is unknown."""
    rate, per_device = (figures.get(name) or 0.0 for name in ("output_tokens_per_s", PER_DEVICE))
    devices = rate / per_device if per_device else 0.0
    return float(round(devices)) if math.isfinite(devices) else 0.0


def devices_pair(base: Mapping[str, float], own: Mapping[str, float]) -> tuple[float, float]:
    """Return the devices of a baseline and of another candidate; see `devices_in_use`."""
    return devices_in_use(base), devices_in_use(own)


def equal_devices(objective: str, base: Mapping[str, float], own: Mapping[str, float]) -> float:
    """Return the factor that makes a ratio of rates one on equal devices: the devices of `base` over those of `own`.

    It is 1 for other objectives than rates of all devices, and if a number of devices is unknown.
    """
    of_all = objective in RATES and objective != PER_DEVICE
    base_devices, own_devices = devices_pair(base, own)
    return base_devices / own_devices if of_all and base_devices and own_devices else 1.0


def gain(objective: str, base_s: float, own_s: float, base: Mapping[str, float], own: Mapping[str, float]) -> float:
    """Return the gain of a step time over that of a baseline, on equal devices: 0.25 is 25% more throughput.

    `base`, `own`: the figures of both, from which their devices follow.
    """
    return base_s / own_s * equal_devices(objective, base, own) - 1.0


def nest_statistics(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with the statistics of each latency nested: `ttft_s.p50` becomes `p50` in `ttft_s`."""
    data: dict[str, Any] = {}
    for name, value in figures.items():
        latency, _, statistic = name.partition(".")
        if statistic:
            data.setdefault(latency, {})[statistic] = value
        else:
            data[name] = value
    return data


def flat_statistics(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with flat names such as `ttft_s.p50`. This reverses `nest_statistics`."""
    data: dict[str, Any] = {}
    for name, value in figures.items():
        is_nested = isinstance(value, Mapping)
        data |= {f"{name}.{each}": figure for each, figure in value.items()} if is_nested else {name: value}
    return data


def load_text(point: Mapping[str, Any]) -> str:
    """Format the load of a load point."""
    if "concurrency" in point:
        return _("{count} clients", count=f"{point['concurrency']:g}")
    if "request_rate" not in point:
        return ""
    rate = point["request_rate"]
    return _("all requests at once") if math.isinf(float(rate)) else _("{rate} requests/s", rate=f"{float(rate):,.10g}")
