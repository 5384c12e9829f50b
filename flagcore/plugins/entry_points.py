"""Loads engines, launchers, strategies, importers and watchers, one object per entry point."""

from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.metadata import requires
from typing import Any, TypeVar, cast

from flagcore.contracts import Importer, Launcher, Strategy, Watcher, Workload
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import TrainSpec
from flagcore.domain.trial import RunEvent
from flagcore.errors import FlagError, NoDevice, SpecError, UsageError
from flagcore.plugins.loader import installed, load_only, one_line, origins
from flagcore.plugins.validation import check_protocol

T = TypeVar("T")

WORKLOADS = "flagcore.engines"
LAUNCHERS = "flagcore.launchers"
STRATEGIES = "flagcore.strategies"
IMPORTERS = "flagcore.importers"
WATCHERS = "flagcore.watchers"
KINDS = {
    WORKLOADS: "engine",
    LAUNCHERS: "launcher",
    STRATEGIES: "strategy",
    IMPORTERS: "importer",
    WATCHERS: "watcher",
}
"""The word that messages use for an object of each entry point group."""


def names(group: str) -> tuple[str, ...]:
    """Return the sorted names of the entry points in `group`, including those that cannot be loaded."""
    return tuple(sorted(installed(group)))


def missing_extra(group: str, name: str) -> str:
    """Return the pip command that installs the object `name`, if one of flagcore's extras contains it.

    Returns an empty string if it is already installed in `group`, or if there is no such extra.
    """
    if name in installed(group):
        return ""
    start, end = f"flagcore-{name}", f"extra == '{name}'"
    is_extra = any(
        each.startswith(start) and each.replace('"', "'").endswith(end) for each in requires("flagcore") or ()
    )
    return f'pip install "flagcore[{name}]"' if is_extra else ""


def workload(name: str, key: str = "engine") -> Workload:
    """Return the engine `name`.

    `key`: the key of the spec that names the engine, for errors.
    Raises SpecError if the engine is not installed, or NoDevice if it cannot be loaded.
    """
    return _named(WORKLOADS, Workload, name, key)


def workload_of(work: TrainSpec | ServeSpec) -> Workload:
    """Return the engine of a job. Raises SpecError or NoDevice like `workload`."""
    return workload(work.engine, "serve.engine" if isinstance(work, ServeSpec) else "train.engine")


class _Engines(UserDict[str, Any]):
    """A mapping from names to engines. Each engine is loaded on first use."""

    def __getitem__(self, name: str) -> Workload:
        if self.data[name] is None:
            self.data[name] = workload(name)
        engine: Workload = self.data[name]
        return engine


def engines() -> Mapping[str, Workload]:
    """Return the installed engines by name, flagcore's own engines first.

    Call it once per command, because reading entry points takes milliseconds.
    """
    points = installed(WORKLOADS)
    builtin = {name for name, each in points.items() if any(point.value.startswith("flagcore.") for point in each)}
    return _Engines(dict.fromkeys(sorted(points, key=lambda name: (name not in builtin, name))))


def kind_of(engine: str) -> str:
    """Return the kind of an engine, "train" or "serve", or an empty string if it cannot be loaded."""
    try:
        return _kind(engine)
    except FlagError:
        return ""


@cache
def _kind(engine: str) -> str:
    """Return the kind of an engine, train or serve. Cached, because hooks need it often and entry points are slow to
    read."""
    return workload(engine).kind


def launcher(name: str) -> Launcher:
    """Return the launcher `name`. Raises SpecError or NoDevice like `workload`."""
    return _named(LAUNCHERS, Launcher, name, "auto_tuner.launcher")


def strategy(name: str) -> Strategy:
    """Return the strategy `name`. Raises SpecError or NoDevice like `workload`."""
    return _named(STRATEGIES, Strategy, name, "auto_tuner.strategy")


def importer(name: str | None = None) -> Importer:
    """Return the importer `name`. Raises SpecError or NoDevice like `workload`.

    If `name` is None, return the only importer with `has_trees` that can be loaded. Raises UsageError if there is not
    exactly one.
    """
    if name is not None:
        return _named(IMPORTERS, Importer, name, "importer")
    importers = list[Importer]()
    for each in names(IMPORTERS):
        with suppress(FlagError):
            importers.append(importer(each))
    importers = [each for each in importers if each.has_trees]
    if not importers:
        raise UsageError("no importer of another tuner's config is installed; install an extra that has one")
    if len(importers) > 1:
        listed = ", ".join(each.name for each in importers)
        raise UsageError(f"several importers of configs are installed: {listed}")
    return importers[0]


def watcher(name: str) -> Callable[[RunEvent], object]:
    """Return the function `on_event` of the watcher `name`. It lets exceptions of the watcher through.

    Raises SpecError or NoDevice like `workload`.
    """
    return _named(WATCHERS, Watcher, name, "--watch").on_event


def _named(group: str, protocol: Callable[..., T], name: str, key: str) -> T:
    """Return the object `name` in `group` if it implements `protocol`. Raises SpecError or NoDevice like `workload`."""
    points, kind = installed(group), KINDS[group]
    if name not in points:
        similar = get_close_matches(name, points, n=3)
        installed_names = ", ".join(sorted(points)) or "none"
        fix = f"did you mean {' or '.join(similar)}?" if similar else f"installed: {installed_names}"
        fix = missing_extra(group, name) or fix
        raise SpecError(key=key, value=name, problem=f"is not an installed {kind}", fix=fix)
    try:
        return cast(T, check_protocol(protocol, load_only(points[name])))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        distributions = origins(points[name])
        raise NoDevice(f"the {kind} {name} (from {distributions}) cannot be used: {one_line(error)}") from error
