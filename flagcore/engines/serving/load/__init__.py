"""Requests as clients send them: prompts, arrivals, the client, and what is measured of the answers."""

from flagcore.engines.serving.load.figures import goodput, quantiles_of
from flagcore.engines.serving.load.reports import read_report
from flagcore.engines.serving.load.result import Answer, LoadResult, ProblemKind, Target
from flagcore.engines.serving.load.sending import measure

__all__ = ["Answer", "LoadResult", "ProblemKind", "Target", "goodput", "measure", "quantiles_of", "read_report"]
