"""Loads plugins, engines, launchers, strategies and importers by entry point. Knows no vendor's name.

`load_plugins()` gives the hooks as typed methods; `workload`, `launcher` and `strategy` give one named object.
What is broken is left out and reported as a `PluginFailure`.
"""

from flagcore.plugins.entry_points import (
    IMPORTERS,
    LAUNCHERS,
    STRATEGIES,
    WORKLOADS,
    engines,
    importer,
    kind_of,
    launcher,
    names,
    strategy,
    workload,
    workload_of,
)
from flagcore.plugins.installed import PluginFailure
from flagcore.plugins.loaded import DISABLE_VARIABLE, GROUP, LoadedPlugins, load_plugins
from flagcore.plugins.loader import Plugin

__all__ = [
    "DISABLE_VARIABLE",
    "GROUP",
    "IMPORTERS",
    "LAUNCHERS",
    "STRATEGIES",
    "WORKLOADS",
    "LoadedPlugins",
    "Plugin",
    "PluginFailure",
    "engines",
    "importer",
    "kind_of",
    "launcher",
    "load_plugins",
    "names",
    "strategy",
    "workload",
    "workload_of",
]
