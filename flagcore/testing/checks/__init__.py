"""The checks of the kit, by subject: one function per check. The name of a check is true for a valid plugin."""

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
    own_functions = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    return (*(each for each in own_functions if hasattr(each, "__wrapped__")), *getattr(module, "CHECKS", ()))


MODULES = (
    *(module, side_effects, chips, peaks, sources, answers, costs, collectives, engines, environment, failures),
    *(trials, detection, shipped, packaging),
)
CHECKS: tuple[Check, ...] = tuple(check for each in MODULES for check in _checks(each))
"""The checks in order of execution. The first checks whether the plugin loads."""
