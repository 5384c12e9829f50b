"""Reads the metrics that the trial programs of all engines write."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagcore.domain.files import read_regular
from flagcore.errors import FlagError

METRICS = "metrics.json"


class NoMetrics(FlagError):
    """Raised if a trial ended without metrics."""


def read_metrics(folder: str) -> dict[str, Any]:
    """Return the metrics that a trial program wrote into `folder`. Raises NoMetrics if there are none."""
    try:
        data = json.loads(read_regular(Path(folder, METRICS)))
    except FileNotFoundError:
        raise NoMetrics(f"exit code 0, but no {METRICS} was written") from None
    except (OSError, ValueError, RecursionError) as error:
        raise NoMetrics(f"{METRICS} cannot be read ({type(error).__name__})") from None
    if not isinstance(data, dict):
        raise NoMetrics(f"{METRICS} is not an object")
    return data


def interquartile_range(seconds: Sequence[float]) -> float:
    """Return the interquartile range; it is 0 for a single value."""
    if len(seconds) < 2:
        return 0.0
    quarters = statistics.quantiles(seconds, n=4, method="inclusive")
    return quarters[2] - quarters[0]
