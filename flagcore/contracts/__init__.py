"""The interfaces that the core calls.

Engines and launchers inherit from the base classes `Engine` and `Launcher`. The other interfaces are Protocols, so an
implementation need not inherit from them.
"""

from flagcore.contracts.engine import Engine, HostSetup, Platform, Probes, probes_of, unsupported
from flagcore.contracts.exchange import (
    Exporter,
    ExportJob,
    FindCandidate,
    HistoryReader,
    ImportedSpec,
    Importer,
    PageWriter,
)
from flagcore.contracts.launcher import HeldHosts, HostCheck, Launcher, Network, RunningLaunch
from flagcore.contracts.parts import Bounds, Commands, Plans, Published, Steps, differs_only
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
from flagcore.contracts.search import LEADERS, Choice, Event, OnEvent, Problem, SearchContext, Strategy, Watcher

__all__ = ["LEADERS", "AttentionShape", "Bounds", "Choice", "CollectiveCosts", "Commands", "Costs", "Engine", "Event"]
__all__ += ["ExportJob", "Exporter", "FindCandidate", "HeldHosts", "HistoryReader", "HostCheck", "HostSetup"]
__all__ += ["ImportedSpec", "Importer", "KernelCosts", "Launcher", "MemoryModel", "Network", "OnEvent", "PageWriter"]
__all__ += ["Plans", "Platform", "Probes", "Problem", "PruningRule", "Published", "RunningLaunch", "SearchContext"]
__all__ += ["Steps", "Strategy", "Telemetry", "Watcher", "communicator_bytes", "device_use"]
__all__ += ["differs_only", "probes_of", "unsupported"]
