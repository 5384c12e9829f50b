"""All that every plugin keeps to: one function a check, by subject. A check's name is true of a good plugin."""

from __future__ import annotations

from types import ModuleType

from flagcore.testing.checks import (
    answers,
    chips,
    collectives,
    costs,
    detection,
    engines,
    environment,
    failures,
    module,
    packaging,
    peaks,
    shipped,
    side_effects,
    sources,
    trials,
)
from flagcore.testing.kit import Check


def _checks(module: ModuleType) -> tuple[Check, ...]:
    """Return the checks of a module: the public functions that it defines, and those in its CHECKS."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    return (*(each for each in own if hasattr(each, "__wrapped__")), *getattr(module, "CHECKS", ()))


MODULES = (
    *(module, side_effects, chips, peaks, sources, answers, costs, collectives, engines, environment, failures),
    *(trials, detection, shipped, packaging),
)
CHECKS: tuple[Check, ...] = tuple(check for each in MODULES for check in _checks(each))
"""The kit, in the order in which it is run. The first checks whether the plugin loads."""
