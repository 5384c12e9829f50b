"""The checks of the kit, one function per check. The name of a check is a statement that is true for a valid plugin."""

from importlib import import_module
from types import ModuleType

from flagcore_testing.kit import LOADS, SLOW, Check

MODULES = (
    *("module", "chips", "sources", "answers", "costs", "collectives", "engines", "environment", "detector"),
    *("telemetry", "detection", "packaging", "second_entry"),
)
"""The modules with checks, in the order of execution."""


def _checks(module: ModuleType) -> tuple[Check, ...]:
    """Return the checks of a module: the public functions that it defines, and those in its CHECKS."""
    own_functions = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    public = (each for each in own_functions if not each.__name__.startswith("_") and hasattr(each, "__wrapped__"))
    return (*(each for each in public if not hasattr(each, "cache_info")), *getattr(module, "CHECKS", ()))


_ALL = [check for name in MODULES for check in _checks(import_module(f"{__name__}.{name}"))]
CHECKS: tuple[Check, ...] = tuple(sorted(_ALL, key=lambda check: check.__name__ not in (LOADS, SLOW)))
"""The checks in order of execution. Checks whose failure skips the others come first."""
