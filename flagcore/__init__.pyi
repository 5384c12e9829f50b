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

__version__: str
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
