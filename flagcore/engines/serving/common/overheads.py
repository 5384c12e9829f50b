"""What engines add to their kernels, by release. docs/serving-model.md has the points that they are fitted to.

Most figures are printed by benchmarks/serving_fit.py; `request`, `entry`, `receive` and `reserve` were chosen so that
simulated times to the first token are those of the same points.
"""

from __future__ import annotations

import re
from dataclasses import replace

from flagcore.engines.serving.model.work import Overheads

Releases = tuple[tuple[tuple[int, int], Overheads], ...]
"""Overheads and the release from which on they hold, the newest first."""

HostTimes = tuple[float, float]
"""Seconds of an iteration and of each of its sequences where the CPU that computes also schedules, samples and serves
clients."""

UNFITTED = Overheads(iteration=0.0, sequence=0.0, request=0.0, attention=0.0, ffn=0.0)
"""For an engine without figures of its own: its kernels alone, so times are lower bounds."""


def overheads_of(releases: Releases, version: str | None, host_times: HostTimes | None, on_host: bool) -> Overheads:
    """Return the overheads of a release; without a version those of the newest.

    `on_host`: there is no device, the host computes, and small kernels are no launches.
    """
    number = release(version)
    each = [found for since, found in releases if number is None or number >= since]
    found = each[0] if each else releases[-1][1] if releases else UNFITTED
    if not on_host:
        return found
    if host_times is not None:
        found = replace(found, iteration=host_times[0], sequence=host_times[1], request=3e-3, entry=0.5e-3)
    return replace(found, attention=0.0, latent=0.0, ffn=0.0, experts={})


def release(version: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None if it does not begin with two."""
    parts = re.match(r"v?(\d+)\.(\d+)", version or "")
    return None if parts is None else (int(parts[1]), int(parts[2]))
