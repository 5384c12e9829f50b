"""The interfaces that the core calls.

Engines and launchers inherit from the base classes `Workload` and `Launcher`. The other interfaces are Protocols, so an
implementation need not inherit from them.
"""

from flagcore.contracts.exchange import (
    CommandReader,
    Exporter,
    ExportJob,
    FindCandidate,
    HistoryReader,
    ImportedSpec,
    Importer,
    ManifestWriter,
)
from flagcore.contracts.launcher import HostCheck, Hosts, Launcher, Network, RunningLaunch
from flagcore.contracts.plugin import (
    AttentionShape,
    CollectiveCosts,
    Costs,
    KernelCosts,
    MemoryModel,
    PruningRule,
    Telemetry,
    communicator_bytes,
    device_use,
)
from flagcore.contracts.search import Choice, Event, OnEvent, Problem, SearchContext, Strategy, Watcher
from flagcore.contracts.workload import HostSetup, Platform, Workload

__all__ = [
    "AttentionShape",
    "Choice",
    "CollectiveCosts",
    "CommandReader",
    "Costs",
    "Event",
    "ExportJob",
    "Exporter",
    "FindCandidate",
    "HistoryReader",
    "HostCheck",
    "HostSetup",
    "Hosts",
    "ImportedSpec",
    "Importer",
    "KernelCosts",
    "Launcher",
    "ManifestWriter",
    "MemoryModel",
    "Network",
    "OnEvent",
    "Platform",
    "Problem",
    "PruningRule",
    "RunningLaunch",
    "SearchContext",
    "Strategy",
    "Telemetry",
    "Watcher",
    "Workload",
    "communicator_bytes",
    "device_use",
]
