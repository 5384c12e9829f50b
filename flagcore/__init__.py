"""flagcore finds the fastest way to train or serve a large language model on any AI chip.

Importing this package costs nothing: every heavy import happens where it is first needed. What Python users call is
here by name (docs/python.md), and lives in `flagcore.api`; what they may catch is in `flagcore.errors`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flagcore.api import (
        CandidateReport,
        Comparison,
        Estimate,
        Explanation,
        Outcome,
        Run,
        compare,
        estimate,
        explain,
        explain_candidate,
        load_run,
        tune,
    )
    from flagcore.errors import FlagError

__version__ = "0.1.0"

__all__ = [
    "CandidateReport",
    "Comparison",
    "Estimate",
    "Explanation",
    "FlagError",
    "Outcome",
    "Run",
    "__version__",
    "compare",
    "estimate",
    "explain",
    "explain_candidate",
    "load_run",
    "tune",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'flagcore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("flagcore.errors" if name == "FlagError" else "flagcore.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
