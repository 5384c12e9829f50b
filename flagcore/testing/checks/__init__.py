"""All that every plugin keeps to: one function a check, by subject. A check's name is true of a good plugin."""

from __future__ import annotations

from types import ModuleType

from flagcore.testing.checks import (
    chips,
    collectives,
    costs,
    dense,
    detection,
    engines,
    environment,
    failures,
    foreign,
    knobs,
    launches,
    memory,
    module,
    packaging,
    peaks,
    pruning,
    shipped,
    side_effects,
    telemetry,
    transcripts,
    valid,
)
from flagcore.testing.kit import Check


def _checks(module: ModuleType) -> tuple[Check, ...]:
    """Return the checks of a module: the public functions that it defines."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    return tuple(each for each in own if hasattr(each, "__wrapped__"))


CHECKS: tuple[Check, ...] = (
    *(*_checks(module), *_checks(side_effects), *_checks(chips), *_checks(peaks), *_checks(dense), *_checks(foreign)),
    *(*valid.CHECKS, *_checks(memory), *_checks(costs), *_checks(collectives)),
    *(*_checks(engines), *_checks(knobs), *_checks(environment), *_checks(failures)),
    *(*_checks(telemetry), *_checks(pruning), *_checks(launches)),
    *(*_checks(detection), *_checks(transcripts), *_checks(shipped), *_checks(packaging)),
)
"""The kit, in the order in which it is run. The first says whether the plugin loads."""
