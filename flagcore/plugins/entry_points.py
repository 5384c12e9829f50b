"""Finds the entry points of installed distributions, and loads engines, launchers, strategies, importers and watchers.

Entry points are read once for each state of the folders on the path, from one distribution after the other. stevedore's
list is not used, because its cache may be stale for two minutes after an install, and because one unreadable
distribution breaks the whole list.
"""

import logging
import os
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from difflib import get_close_matches
from functools import cache, cached_property, lru_cache, partial
from importlib.metadata import Distribution, EntryPoint, distributions, requires, version
from typing import Any, NoReturn, TypeVar, cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from stevedore.named import NamedExtensionManager

from flagcore.contracts import Engine, Importer, Launcher, PageWriter, Strategy, Watcher
from flagcore.domain.spec import TrainSpec
from flagcore.domain.trial import RunEvent
from flagcore.domain.work import Work
from flagcore.errors import FlagError, NoDevice, SpecError, UsageError
from flagcore.plugins.limits import HOOK_SECONDS, MESSAGE_SECONDS, TooSlow, within
from flagcore.plugins.validation import BadPlugin, PluginFailure, check_protocol

T = TypeVar("T")


class Clash(BadPlugin):
    """The error for several distributions that contain a plugin with the same name."""

    stage = "discover"


def installed(group: str, failures: list[PluginFailure] | None = None) -> dict[str, list[EntryPoint]]:
    """Return the entry points in `group` by name. A name with several entry points is a clash (see `load_only`).

    If several distributions have the same name, only the first one on the path is used. Distributions that cannot be
    read are added to `failures`.
    """
    points: dict[str, list[EntryPoint]] = {}
    distribution_names = set()
    for distribution, text in _distributions(tuple((folder, _changed(folder)) for folder in sys.path)):
        try:
            if group not in (distribution.read_text("entry_points.txt") or "" if text is None else text):
                continue
            key = canonicalize_name(name_of(distribution))
            if key in distribution_names:
                continue
            distribution_names.add(key)
            for point in distribution.entry_points.select(group=group):
                points.setdefault(point.name, []).append(point)
        except Exception as error:
            path = str(getattr(distribution, "_path", "?"))
            if failures is not None:
                failures.append(PluginFailure(name=path, stage="discover", reason=one_line(error)))
    return points


@lru_cache(maxsize=1)
def _distributions(path: tuple[tuple[str, int], ...]) -> list[tuple[Distribution, str | None]]:
    """Return the distributions on the path with the texts of their entry points; None if a text cannot be read.

    `path`: the folders on the path, and when each has changed.
    """
    found: list[tuple[Distribution, str | None]] = []
    for distribution in distributions():
        text = None
        with suppress(Exception):
            text = distribution.read_text("entry_points.txt") or ""
        if text is None or "flagcore" in text:
            found.append((distribution, text))
    return found


def _changed(folder: str) -> int:
    with suppress(OSError):
        return os.stat(folder or ".").st_mtime_ns
    return 0


@lru_cache(maxsize=256)
def name_of(distribution: Distribution) -> str:
    """Return the name in the metadata of a distribution, which are parsed once."""
    return distribution.metadata["Name"]


@lru_cache(maxsize=256)
def version_of(distribution: Distribution) -> str:
    """Return the version in the metadata of a distribution, which are parsed once."""
    return distribution.version


def origin(point: EntryPoint) -> Distribution:
    """Return the distribution that defines an entry point."""
    assert point.dist is not None, "installed() reads entry points from distributions only"
    return point.dist


def origins(points: Iterable[EntryPoint]) -> str:
    """Return the names of the distributions that define `points`, comma-separated."""
    return ", ".join(sorted(name_of(origin(point)) for point in points))


@lru_cache(maxsize=256)
def _incompatible(distribution: Distribution) -> str | None:
    """Return why `distribution` does not support this release of flagcore, or None. Reads its `Requires-Dist`."""
    # Parsing a requirement is slow, so those of other distributions are skipped.
    requirements = [each for each in distribution.requires or () if each.lower().startswith("flagcore")]
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        own = version("flagcore")
        if canonicalize_name(requirement.name) == "flagcore" and not requirement.specifier.contains(own, True):
            return f"needs {requirement}, but this is flagcore {own}; install a version for this release"
    return None


@cache
def _own_requirements() -> tuple[str, ...]:
    """Return the requirements of flagcore itself."""
    return tuple(requires("flagcore") or ())


class _OneEntryPoint(NamedExtensionManager):  # type: ignore[misc]
    """A stevedore manager that loads one given entry point, and does not search for others."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        super().__init__(point.group, [point.name], on_load_failure_callback=_reraise)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]


def load_only(points: Sequence[EntryPoint]) -> object:
    """Import the object of the only entry point in `points`, which all have the same name.

    Raises Clash if there are several, BadPlugin if it needs another release of flagcore or its import does not end, and
    any exception of the import itself.
    """
    point, *others = points
    if others:
        raise Clash(f"several distributions have this name: {origins(points)}; uninstall all but one")
    if reason := _incompatible(origin(point)):
        raise BadPlugin(reason)
    if point in _TOO_SLOW:
        raise _TOO_SLOW[point]
    try:
        with stdout_to_stderr():
            (extension,) = within(HOOK_SECONDS, partial(_OneEntryPoint, point))
    except TooSlow as error:
        _TOO_SLOW[point] = error
        raise
    return extension.plugin


_TOO_SLOW: dict[EntryPoint, TooSlow] = {}
"""The entry points whose import did not end, with the error. A further import would wait for it."""


def _reraise(manager: Any, point: EntryPoint, error: Exception) -> NoReturn:
    raise error


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, including the output of native code, because stdout is reserved for results."""
    copy = None
    with suppress(OSError, ValueError, AttributeError):  # stdout or stderr may be closed
        sys.stdout.flush()
        copy = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if copy is not None:
            os.dup2(copy, 1)
            os.close(copy)


def one_line(error: BaseException, limit: int = 400) -> str:
    """Return the type and the message of `error` as one printable line."""
    try:
        message = " ".join(within(MESSAGE_SECONDS, partial(str, error)).split())
    except Exception:
        message = "(its message cannot be shown)"
    text = "".join(letter for letter in message if letter.isprintable())
    if isinstance(error, BadPlugin):
        return text[:limit]
    kind = type(error).__name__
    return f"{kind}: {text}"[:limit] if text else kind


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings and errors that are logged within this context. They are still logged as usual."""
    texts: list[str] = []
    create_record = logging.getLogRecordFactory()

    def record_and_collect(*arguments: object, **named: object) -> logging.LogRecord:
        record = create_record(*arguments, **named)
        if record.levelno >= logging.WARNING:
            texts.append(record.getMessage())
        return record

    logging.setLogRecordFactory(record_and_collect)
    try:
        yield texts
    finally:
        logging.setLogRecordFactory(create_record)


ENGINES = "flagcore.engines"
LAUNCHERS = "flagcore.launchers"
STRATEGIES = "flagcore.strategies"
IMPORTERS = "flagcore.importers"
PAGES = "flagcore.pages"
WATCHERS = "flagcore.watchers"
BENCHMARKS = "flagcore.benchmarks"
"""Programs that measure devices: `kernels` for `flag calibrate`, `links` for the network between hosts."""
KIT = "flagcore.kit"
"""Modules of the conformance kit, by the command of `flag plugins` that they are for."""
JOBS = "flagcore.kinds"
"""Kinds of jobs besides training: subclasses of `Work`."""
OVERLAYS = "flagcore.overlays"
"""A subclass of `LoadedPlugins` that adds what no plugin knows, such as the user's calibrations."""
KINDS = {ENGINES: "engine", LAUNCHERS: "launcher", STRATEGIES: "strategy", IMPORTERS: "importer", WATCHERS: "watcher"}
KINDS |= {PAGES: "page writer", JOBS: "kind of job", OVERLAYS: "overlay"}
"""The noun that messages use for the objects of each entry point group."""


def names(group: str) -> tuple[str, ...]:
    """Return the sorted names of the entry points in `group`, including those that cannot be loaded."""
    return tuple(sorted(installed(group)))


def missing_extra(group: str, name: str) -> str:
    """Return the pip command that installs the object `name`, if a distribution of flagcore may contain it.

    That is the one with this name, the extra with this name, or else those that come with flagcore and are missing.
    Returns an empty string if it is already installed in `group`, or if there is no such distribution.
    """
    if name in installed(group):
        return ""
    needs = [Requirement(each) for each in requires("flagcore") or () if each.startswith("flagcore-")]
    missing = [each.name for each in needs if not (each.marker or any(distributions(name=each.name)))]
    own = [each for each in missing if each == f"flagcore-{name}"]
    if not own and any(str(each.marker).endswith(f'extra == "{name}"') for each in needs):
        return f'pip install "flagcore[{name}]"'
    return f"pip install {' '.join(own or missing)}" if missing else ""


def find_engine(name: str, key: str = "engine") -> Engine:
    """Return the engine `name`. Raises SpecError (for the spec's `key`) if not installed, NoDevice if not loadable."""
    return _named(ENGINES, Engine, name, key)


def engine_of(work: Work) -> Engine:
    """Return the engine of a job. Raises SpecError, NoDevice."""
    return find_engine(work.engine, f"{work.kind}.engine").with_program(work.program)


class _Kinds(UserDict[str, Any]):
    """A mapping from names to kinds of jobs. Each kind is loaded on first use."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = _named(JOBS, type, name, "kind")
        return self.data[name]


def kinds() -> Mapping[str, type[Work]]:
    """Return the installed kinds of jobs by name, training first. Looking one up raises NoDevice if it is broken."""
    return _Kinds({TrainSpec.kind: TrainSpec, **dict.fromkeys(names(JOBS))})


class _Engines(UserDict[str, Any]):
    """A mapping from names to engines for `program`. Each engine is loaded on first use."""

    program: object = None

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = find_engine(name).with_program(self.program)
        return self.data[name]

    @cached_property
    def kinds(self) -> Mapping[str, type[Work]]:
        """The installed kinds of jobs."""
        return kinds()

    def missing(self, name: str) -> str:
        """Return the command that installs the engine `name`, or an empty text if there is none."""
        return missing_extra(ENGINES, name)


def command_readers() -> list[str]:
    """Return the names of the engines whose commands can be imported, and of those that cannot be loaded."""
    unable = set[str]()
    for name in names(ENGINES):
        with suppress(FlagError):
            unable |= set() if find_engine(name).commands else {name}
    return [name for name in names(ENGINES) if name not in unable]


def engines(spec: Mapping[str, Any] | None = None) -> _Engines:
    """Return the installed engines, flagcore's first. `spec`: the data that they are for, maybe invalid."""
    points = installed(ENGINES)
    needs = {re.split("[^a-z-]", each)[0] for each in _own_requirements() if "extra ==" not in each}
    own = {name for name, each in points.items() if any(name_of(origin(point)) in needs for point in each)}
    found = _Engines(dict.fromkeys(sorted(points, key=lambda name: (name not in own, name))))
    train = (spec or {}).get(TrainSpec.kind)
    found.program = train.get("program") if isinstance(train, Mapping) else None
    return found


def first_engine(kind: str = TrainSpec.kind) -> str:
    """Return the name of the first installed engine of a kind of jobs, or an empty string if there is none."""
    return next((name for name in engines() if kind_of(name) == kind), "")


def benchmark(name: str) -> str:
    """Return the module of a benchmark program, which is started and not imported. Raises NoDevice if it is missing."""
    for point in installed(BENCHMARKS).get(name, ()):
        return point.value
    raise NoDevice(f"the benchmark program {name} is not installed; install flagcore-training")


@cache
def kind_of(engine: str) -> str:
    """Return the kind of an engine's jobs, or "" if it cannot be loaded. Cached: entry points are slow."""
    try:
        return find_engine(engine).kind
    except FlagError:
        return ""


def launcher(name: str) -> Launcher:
    """Return the launcher `name`. Raises SpecError, NoDevice."""
    return _named(LAUNCHERS, Launcher, name, "auto_tuner.launcher")


def strategy(name: str) -> Strategy:
    """Return the strategy `name`. Raises SpecError, NoDevice."""
    return _named(STRATEGIES, Strategy, name, "auto_tuner.strategy")


def importer(name: str | None = None) -> Importer:
    """Return the importer `name`. Raises SpecError or NoDevice.

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


def page_writer() -> PageWriter:
    """Return what writes the page of a run. Raises NoDevice if it is missing or cannot be loaded."""
    for name in names(PAGES):
        return _named(PAGES, PageWriter, name, PAGES)
    raise NoDevice("the page of a run cannot be written; install flagcore-page")


def overlay() -> Callable[..., Any] | None:
    """Return the class of the first overlay, or None if none is installed. Raises NoDevice if it cannot be loaded."""
    return next((_named(OVERLAYS, type, name, OVERLAYS) for name in names(OVERLAYS)), None)


def watcher(name: str) -> Callable[[RunEvent], object]:
    """Return the watcher's `on_event`, whose exceptions are not caught. Raises SpecError or NoDevice."""
    return _named(WATCHERS, Watcher, name, "--watch").on_event


def _named(group: str, protocol: Callable[..., T], name: str, key: str) -> T:
    """Return `name` in `group`, of `protocol`, or a class if that is `type`. Raises SpecError, NoDevice."""
    points, kind = installed(group), KINDS[group]
    if name not in points:
        similar = get_close_matches(name, points, n=3)
        installed_names = ", ".join(sorted(points)) or "none"
        fix = f"did you mean {' or '.join(similar)}?" if similar else f"installed: {installed_names}"
        fix = missing_extra(group, name) or fix
        raise SpecError(key=key, value=name, problem=f"is not an installed {kind}", fix=fix)
    try:
        found = load_only(points[name])
        return cast(T, found if protocol is type else within(HOOK_SECONDS, partial(check_protocol, protocol, found)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        distributions = origins(points[name])
        raise NoDevice(f"the {kind} {name} (from {distributions}) cannot be used: {one_line(error)}") from error
