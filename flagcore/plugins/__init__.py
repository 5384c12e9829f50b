"""Loads vendor plugins, engines, launchers, strategies, importers and watchers by their entry points.

`load_plugins` returns the hooks of all vendor plugins as typed methods. A plugin that fails is skipped and reported as
a `PluginFailure`. `find_engine`, `launcher`, `strategy`, `importer` and `watcher` return the object with a given name.
"""

from flagcore.loading.entry_points import PluginFailure
from flagcore.plugins.entry_points import (
    ENGINES,
    IMPORTERS,
    LAUNCHERS,
    SECTIONS,
    STRATEGIES,
    WATCHERS,
    benchmark,
    broken_parts,
    engine_of,
    engines,
    find_engine,
    first_engine,
    importer,
    kind_of,
    kinds,
    launcher,
    missing_extra,
    names,
    page_writer,
    strategy,
    usable,
    watcher,
)
from flagcore.plugins.here import best_chip, target
from flagcore.plugins.loaded import DISABLE_VARIABLE, GROUP, LoadedPlugins, load_plugins, with_overlay
from flagcore.plugins.plugin import Plugin
