"""Loads plugins, engines, launchers, strategies, importers and watchers by their entry points.

`load_plugins` returns the hooks of all plugins as typed methods; `workload`, `launcher` and `strategy` return the
object with a name. Plugins that fail are left out and reported as a `PluginFailure`.
"""

from flagcore.plugins.entry_points import (
    IMPORTERS,
    LAUNCHERS,
    STRATEGIES,
    WATCHERS,
    WORKLOADS,
    engines,
    importer,
    kind_of,
    launcher,
    missing_extra,
    names,
    strategy,
    watcher,
    workload,
    workload_of,
)
from flagcore.plugins.loaded import DISABLE_VARIABLE, GROUP, LoadedPlugins, load_plugins
from flagcore.plugins.loader import Plugin, PluginFailure

__all__ = [
    "DISABLE_VARIABLE",
    "GROUP",
    "IMPORTERS",
    "LAUNCHERS",
    "STRATEGIES",
    "WATCHERS",
    "WORKLOADS",
    "LoadedPlugins",
    "Plugin",
    "PluginFailure",
    "engines",
    "importer",
    "kind_of",
    "launcher",
    "load_plugins",
    "missing_extra",
    "names",
    "strategy",
    "watcher",
    "workload",
    "workload_of",
]
