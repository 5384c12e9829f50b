"""All that every plugin keeps to: one function a check, by subject. A check's name is true of a good plugin."""

from __future__ import annotations

from types import ModuleType

from flagcore.testing.checks import (
    asking,
    chips,
    collectives,
    costs,
    dense,
    detection,
    engines,
    environment,
    failures,
    foreign,
    importing,
    knobs,
    launches,
    memory,
    module,
    packaging,
    peaks,
    pruning,
    shipped,
    telemetry,
    topology,
    transcripts,
)
from flagcore.testing.kit import Check

MODULES = (
    *(module, importing, asking, chips, peaks, dense, foreign, topology, memory, costs, collectives),
    *(engines, knobs, environment, failures, telemetry, pruning, launches),
    *(detection, transcripts, shipped, packaging),
)


def _checks(module: ModuleType) -> list[Check]:
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    return [each for each in own if callable(each) and not isinstance(each, type) and not each.__name__.startswith("_")]


CHECKS: tuple[Check, ...] = tuple(check for module in MODULES for check in _checks(module))
"""The kit, in the order in which it is run. The first says whether the plugin loads."""
