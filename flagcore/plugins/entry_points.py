"""Names the groups of entry points, and loads engines, launchers, strategies, importers and watchers."""

import logging
import re
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache, cached_property, partial
from importlib.metadata import EntryPoint, distributions
from types import ModuleType
from typing import Any, NoReturn, TypeVar, cast

import click
from stevedore.named import NamedExtensionManager

from flagcore.contracts import Engine, Importer, Launcher, PageWriter, Strategy, Watcher
from flagcore.domain.model import Mixer
from flagcore.domain.spec import TrainSpec
from flagcore.domain.trial import RunEvent
from flagcore.domain.work import Work
from flagcore.errors import FlagError, NoDevice, SpecError, UsageError
from flagcore.loading import entry_points as loading
from flagcore.loading.entry_points import installed, instance_of, load_checked, name_of, origin, origins, subclass_of
from flagcore.plugins.validation import check_protocol

T = TypeVar("T")


class _OneEntryPoint(NamedExtensionManager):  # type: ignore[misc]
    """A stevedore manager that loads one given entry point, and does not search for others."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        super().__init__(point.group, [point.name], on_load_failure_callback=_reraise)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]


def load_only(points: Sequence[EntryPoint]) -> object:
    """Import the only entry point in `points` with stevedore. Raises what `flagcore.loading` raises."""
    return loading.load_only(points, lambda point: _OneEntryPoint(point)[point.name].plugin)


def _reraise(manager: Any, point: EntryPoint, error: Exception) -> NoReturn:
    raise error


_collecting = ContextVar[tuple[list[str], ...]]("_collecting", default=())
_create_record = logging.getLogRecordFactory()


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings and errors that are logged within this context, also in threads of `within`. They
    are still logged as usual."""
    logging.setLogRecordFactory(_record)
    token = _collecting.set((*_collecting.get(), texts := list[str]()))
    try:
        yield texts
    finally:
        _collecting.reset(token)


def _record(*arguments: object, **named: object) -> logging.LogRecord:
    record = _create_record(*arguments, **named)
    for texts in _collecting.get() if record.levelno >= logging.WARNING else ():
        texts.append(record.getMessage())
    return record


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
SECTIONS = "flagcore.sections"
"""Sections of specs that only another distribution reads: types of pydantic, by the key of the section."""
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
    parts = (each.partition(";") for each in _requires("flagcore") if each.startswith("flagcore-"))
    needs = [(re.split("[^a-z-]", text)[0], marker.replace("'", '"')) for text, _sign, marker in parts]
    missing = [each for each, marker in needs if not (marker or any(distributions(name=each)))]
    own = [each for each in missing if each == f"flagcore-{name}"]
    if not own and any(marker.endswith(f'extra == "{name}"') for _name, marker in needs):
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
            self.data[name] = _named(JOBS, Work, name, "kind", subclass_of)
        return self.data[name]


def kinds() -> MutableMapping[str, type[Work]]:
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

    def sections(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the fields that distributions add to a spec with `keys`, or without keys all that can be loaded."""
        from flagcore.spec.validate import Section  # late, because pydantic is slow

        found = dict[str, Any]()
        for key in {*names(SECTIONS)}.intersection(keys or names(SECTIONS)):
            with suppress(*[NoDevice] * (not keys)):
                kind = load_checked("section", installed(SECTIONS)[key], partial(subclass_of, Section), load_only)
                found[key] = (kind, None)
        return found

    def missing(self, name: str) -> str:
        """Return the command that installs the engine `name`, or an empty text if there is none."""
        return missing_extra(ENGINES, name)


_requires = cache(lambda name: next((found.requires for found in distributions(name=name)), None) or ())


def broken_parts() -> Iterator[tuple[str, str]]:
    """Yield the distributions and the error of each entry point that cannot be used, or has the wrong type.

    Plugins, engines and overlays are left out, because they have their own records, and watchers whose packages only
    their users install.
    """
    from flagcore.spec.models import Catalogue  # late, because pydantic is slow
    from flagcore.spec.validate import Section

    own = {LAUNCHERS: Launcher, STRATEGIES: Strategy, IMPORTERS: Importer, PAGES: PageWriter, WATCHERS: Watcher}
    checks: dict[str, tuple[str, Callable[[Any], object]]] = {
        **{group: (KINDS[group], partial(check_protocol, protocol)) for group, protocol in own.items()},
        JOBS: (KINDS[JOBS], partial(subclass_of, Work)),
        KIT: ("conformance kit", partial(instance_of, ModuleType)),
        SECTIONS: ("section", partial(subclass_of, Section)),
        "flagcore.commands": ("command", partial(instance_of, click.Command)),
        "flagcore.effective": ("report of knobs", partial(instance_of, cast(Any, Callable))),
        "flagcore.mixers": ("mixer", partial(subclass_of, Mixer)),
        "flagcore.models": ("catalogue of models", partial(loading.with_methods, Catalogue)),
        "flagcore.operators": ("operator library", partial(loading.of_group, "flagcore.operators")),
        "flagcore.schedules": ("schedule", partial(loading.of_group, "flagcore.schedules")),
    }
    for group, (noun, check) in checks.items():
        for points in installed(group).values():
            try:
                load_checked(noun, points, check, load_only)
            except NoDevice as error:
                if group != WATCHERS or not isinstance(error.__cause__, ImportError):
                    yield origins(points), str(error)


def usable(parts: MutableMapping[str, T], warn: Callable[[str], object]) -> MutableMapping[str, T]:
    """Remove the engines or kinds of jobs that cannot be loaded from `parts`. `warn`: called with each error."""
    for name in list(parts):
        try:
            parts[name]
        except FlagError as error:
            warn(str(error))
            del parts[name]
    return parts


def engines(spec: Mapping[str, Any] | None = None) -> _Engines:
    """Return the installed engines, flagcore's first. `spec`: the data that they are for, maybe invalid."""
    points = installed(ENGINES)
    needs = {re.split("[^a-z-]", each)[0] for each in _requires("flagcore") if "extra ==" not in each}
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
    importers, broken = list[Importer](), list[str]()
    for each in names(IMPORTERS):
        try:
            importers.append(importer(each))
        except FlagError as error:
            broken.append(f"; {error}")
    importers = [each for each in importers if each.has_trees]
    if not importers:
        text = "no importer of another tuner's config is installed; install an extra that has one"
        raise UsageError(text + "".join(broken))
    if len(importers) > 1:
        listed = ", ".join(each.name for each in importers)
        raise UsageError(f"several importers of configs are installed: {listed}")
    return importers[0]


def page_writer() -> PageWriter:
    """Return the first page writer that can be loaded. Raises NoDevice if there is none."""
    failure = NoDevice("the page of a run cannot be written; install flagcore-page")
    for name in names(PAGES):
        try:
            return _named(PAGES, PageWriter, name, PAGES)
        except NoDevice as error:
            failure = error
    raise failure


def watcher(name: str) -> Callable[[RunEvent], object]:
    """Return the watcher's `on_event`, whose exceptions are not caught. Raises SpecError or NoDevice."""
    return _named(WATCHERS, Watcher, name, "--watch").on_event


def _named(
    group: str, protocol: Callable[..., T], name: str, key: str, check: Callable[[Any, object], Any] = check_protocol
) -> T:
    """Return `name` in `group`, for which `check` accepts `protocol`. Raises SpecError, NoDevice."""
    points, kind = installed(group), KINDS[group]
    if name not in points:
        similar = get_close_matches(name, points, n=3)
        installed_names = ", ".join(sorted(points)) or "none"
        fix = f"did you mean {' or '.join(similar)}?" if similar else f"installed: {installed_names}"
        fix = missing_extra(group, name) or fix
        raise SpecError(key=key, value=name, problem=f"is not an installed {kind}", fix=fix)
    return cast(T, load_checked(kind, points[name], partial(check, protocol), load_only))
