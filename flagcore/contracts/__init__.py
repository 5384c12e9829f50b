"""The Protocols that the core calls. Whoever implements one need not import anything else of flagcore."""

from flagcore.contracts.chip import AttentionShape, CollectiveCosts, KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.contracts.platform import Costs, Platform, Plugins
from flagcore.contracts.running import Launcher, Running
from flagcore.contracts.search import Choice, Event, OnEvent, SearchContext, Strategy, TrialStore
from flagcore.contracts.workload import Pipelined, Workload

__all__ = [
    "AttentionShape",
    "Choice",
    "CollectiveCosts",
    "Costs",
    "Event",
    "KernelCosts",
    "Launcher",
    "MemoryModel",
    "OnEvent",
    "Pipelined",
    "Platform",
    "Plugins",
    "PruningRule",
    "Running",
    "SearchContext",
    "Strategy",
    "Telemetry",
    "TrialStore",
    "Workload",
]
