"""Loads engines, launchers, strategies, importers and watchers, one object per entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache, partial
from importlib.metadata import requires
from typing import Any

from flagcore.contracts import Importer, Launcher, Strategy, Workload
from flagcore.domain.event import RunEvent
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import TrainSpec
from flagcore.errors import FlagError, NoDevice, SpecError, UsageError
from flagcore.plugins.installed import BadPlugin, installed, load_only, one_line, origins
from flagcore.plugins.loader import Plugin, make_plugin
from flagcore.plugins.validation import check_protocol

WORKLOADS = "flagcore.engines"
LAUNCHERS = "flagcore.launchers"
STRATEGIES = "flagcore.strategies"
IMPORTERS = "flagcore.importers"
WATCHERS = "flagcore.watchers"
HOOK = "flagcore_on_event"
"""The hook of watchers."""


def names(group: str) -> tuple[str, ...]:
    """Return the sorted names of the entry points in `group`, also of those that cannot be loaded."""
    return tuple(sorted(installed(group).points))


def missing_extra(group: str, name: str) -> str:
    """Return how to install an object in `group` that is a distribution of its own and an extra of flagcore.

    Empty for an installed object and for other names.
    """
    if name in installed(group).points:
        return ""
    start, end = f"flagcore-{name}", f"extra == '{name}'"
    is_extra = any(
        each.startswith(start) and each.replace('"', "'").endswith(end) for each in requires("flagcore") or ()
    )
    return f'pip install "flagcore[{name}]"' if is_extra else ""


def workload(name: str, key: str = "engine") -> Workload:
    """Return the engine `name`, which the `key` of a spec names.

    Raises SpecError if it is not installed, NoDevice if it cannot be loaded.
    """
    engine: Workload = _named(WORKLOADS, "engine", name, Workload, key)
    return engine


def workload_of(work: TrainSpec | ServeSpec) -> Workload:
    """Return the engine of a job. Raises like `workload`."""
    return workload(work.engine, "serve.engine" if isinstance(work, ServeSpec) else "train.engine")


class _Engines(Mapping[str, Workload]):
    """Engines by name, those of flagcore first. Each is loaded on first use."""

    def __init__(self) -> None:
        points = installed(WORKLOADS).points
        builtin = {name for name, each in points.items() if any(point.value.startswith("flagcore.") for point in each)}
        self._names = sorted(points, key=lambda name: (name not in builtin, name))
        self._loaded: dict[str, Workload] = {}

    def __getitem__(self, name: str) -> Workload:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = workload(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def engines() -> Mapping[str, Workload]:
    """Return the installed engines. Reading entry points takes milliseconds, so call it once per command."""
    return _Engines()


def kind_of(engine: str) -> str:
    """Return the kind of an engine, "train" or "serve"; empty if it cannot be loaded."""
    try:
        return _kind(engine)
    except FlagError:
        return ""


@cache
def _kind(engine: str) -> str:
    """Return the kind of an engine. It is cached, because hooks need it often and reading entry points is slow."""
    return workload(engine).kind


def launcher(name: str) -> Launcher:
    """Return the launcher `name`. Raises like `workload`."""
    result: Launcher = _named(LAUNCHERS, "launcher", name, Launcher, "auto_tuner.launcher")
    return result


def strategy(name: str) -> Strategy:
    """Return the strategy `name`. Raises like `workload`."""
    result: Strategy = _named(STRATEGIES, "strategy", name, Strategy, "auto_tuner.strategy")
    return result


def importer(name: str | None = None) -> Importer:
    """Return the importer `name`; without a name, the only installed importer of trees. Raises like `workload`."""
    if name is None:
        of_trees = [found for each in names(IMPORTERS) if (found := importer(each)).has_trees]
        if len(of_trees) != 1:
            if not of_trees:
                raise UsageError("no importer of another tuner's config is installed; install an extra that has one")
            raise UsageError(f"several importers of configs are installed: {', '.join(each.name for each in of_trees)}")
        return of_trees[0]
    result: Importer = _named(IMPORTERS, "importer", name, Importer, "importer")
    return result


def watcher(name: str) -> Callable[[RunEvent], None]:
    """Return the hook `flagcore_on_event` of the watcher `name`, which raises the exceptions of the watcher.

    Raises like `workload`.
    """

    def load(found: object) -> Plugin:
        plugin = make_plugin(name, found)
        if HOOK not in plugin.hooks:
            raise BadPlugin(f"does not implement {HOOK}")
        return plugin

    plugin: Plugin = _checked(WATCHERS, "watcher", name, load, "--watch")

    def call(event: RunEvent) -> None:
        plugin.call(HOOK, {"event": event})

    return call


def _named(group: str, kind: str, name: str, protocol: Any, key: str) -> Any:
    """Return an object by its name, if it implements a protocol, see `workload`."""
    return _checked(group, kind, name, partial(check_protocol, protocol), key)


def _checked(group: str, kind: str, name: str, check: Callable[[object], Any], key: str) -> Any:
    """Return what `check` makes of an object by its name, see `workload`."""
    points = installed(group).points
    if name not in points:
        similar = get_close_matches(name, points, n=3)
        installed_names = ", ".join(sorted(points)) or "none"
        fix = f"did you mean {' or '.join(similar)}?" if similar else f"installed: {installed_names}"
        fix = missing_extra(group, name) or fix
        raise SpecError(key=key, value=name, problem=f"is not an installed {kind}", fix=fix)
    try:
        return check(load_only(points[name]))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        distributions = origins(points[name])
        raise NoDevice(f"the {kind} {name} (from {distributions}) cannot be used: {one_line(error)}") from error
