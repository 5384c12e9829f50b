"""The Protocols that the core calls. Whoever implements one need not import anything else of flagcore."""

from flagcore.contracts.chip import AttentionShape, CollectiveCosts, KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.contracts.importer import History, HistoryReader, HistoryRow, ImportedSpec, Importer, ImportNote
from flagcore.contracts.platform import Costs, Platform, Plugins
from flagcore.contracts.running import Launcher, Running
from flagcore.contracts.search import Choice, Event, OnEvent, SearchContext, Strategy, TrialStore
from flagcore.contracts.workload import (
    Breakdown,
    InstalledVersion,
    JobRecords,
    Pipelined,
    Predictor,
    Prober,
    Runner,
    SearchSpace,
    Workload,
    memory_components,
    model_parts,
    require_job_records,
    require_prober,
)

__all__ = [
    "AttentionShape",
    "Breakdown",
    "Choice",
    "CollectiveCosts",
    "Costs",
    "Event",
    "History",
    "HistoryReader",
    "HistoryRow",
    "ImportNote",
    "ImportedSpec",
    "Importer",
    "InstalledVersion",
    "JobRecords",
    "KernelCosts",
    "Launcher",
    "MemoryModel",
    "OnEvent",
    "Pipelined",
    "Platform",
    "Plugins",
    "Predictor",
    "Prober",
    "PruningRule",
    "Runner",
    "Running",
    "SearchContext",
    "SearchSpace",
    "Strategy",
    "Telemetry",
    "TrialStore",
    "Workload",
    "memory_components",
    "model_parts",
    "require_job_records",
    "require_prober",
]
