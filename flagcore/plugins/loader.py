"""Finds the entry points of installed distributions, and loads plugins.

Entry points are read anew each time, from one distribution after the other. stevedore's list is not used, because its
cache may be stale for two minutes after an install, and because one unreadable distribution breaks the whole list. Each
plugin has its own pluggy manager, and the objects that it returns are wrapped, so that its errors include its name and
do not affect other plugins.
"""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import Distribution, EntryPoint, distributions, version
from threading import current_thread, main_thread
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from stevedore.named import NamedExtensionManager

from flagcore import hooks
from flagcore.errors import NoDevice


class BadPlugin(Exception):
    """The error of a plugin that does not implement the hooks correctly. `stage`: as in `PluginFailure`."""

    stage = "check"


class Clash(BadPlugin):
    """The error for several distributions that contain a plugin with the same name."""

    stage = "discover"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailure:
    """The failure of a plugin or of one of its hooks.

    `stage`: discover, load, check, ask (a hook raised an exception), answer (a hook returned an invalid result), or
    disable.
    `hook`: the name of the hook for ask and answer, else empty.
    """

    name: str
    distribution: str = ""
    stage: str
    hook: str = ""
    reason: str

    def __str__(self) -> str:
        origin = f" ({self.distribution})" if self.distribution else ""
        return f"plugin {self.name}{origin}: {self.hook + ': ' if self.hook else ''}{self.reason}"


def installed(group: str, failures: list[PluginFailure] | None = None) -> dict[str, list[EntryPoint]]:
    """Return the entry points in `group` by name. A name with several entry points is a clash (see `load_only`).

    If several distributions have the same name, only the first one on the path is used. Distributions that cannot be
    read are added to `failures`.
    """
    points: dict[str, list[EntryPoint]] = {}
    distribution_names = set()
    for distribution in distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or ""):
                continue
            key = canonicalize_name(distribution.metadata["Name"])
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


def origin(point: EntryPoint) -> Distribution:
    """Return the distribution that defines an entry point."""
    assert point.dist is not None, "installed() reads entry points from distributions only"
    return point.dist


def origins(points: Iterable[EntryPoint]) -> str:
    """Return the names of the distributions that define `points`, comma-separated."""
    return ", ".join(sorted(origin(point).metadata["Name"] for point in points))


def _incompatible(distribution: Distribution) -> str | None:
    """Return why `distribution` does not support this release of flagcore, or None. Reads its `Requires-Dist`."""
    # Parsing a requirement is slow, so those of other distributions are skipped.
    requirements = [each for each in distribution.requires or () if each.lower().startswith("flagcore")]
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) == "flagcore" and not requirement.specifier.contains(
            version("flagcore"), prereleases=True
        ):
            return (
                f"needs {requirement}, but this is flagcore {version('flagcore')}; install a version for this release"
            )
    return None


class _OneEntryPoint(NamedExtensionManager):  # type: ignore[misc]
    """A stevedore manager that loads one given entry point, and does not search for others."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        super().__init__(point.group, [point.name], on_load_failure_callback=_reraise)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]


def load_only(points: Sequence[EntryPoint]) -> object:
    """Import the object of the only entry point in `points`, which all have the same name.

    Raises Clash if there are several, BadPlugin if it needs another release of flagcore, and any exception of the
    import itself.
    """
    point, *others = points
    if others:
        raise Clash(f"several distributions have this name: {origins(points)}; uninstall all but one")
    if reason := _incompatible(origin(point)):
        raise BadPlugin(reason)
    with stdout_to_stderr():
        (extension,) = _OneEntryPoint(point)
    return extension.plugin


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
        message = " ".join(str(error).split())
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


T = TypeVar("T")

HOOKS_WITH_OBJECTS = frozenset(
    f"flagcore_{name}" for name in ("memory_model", "kernel_costs", "collective_costs", "telemetry")
)
COLUMNS = frozenset(
    (
        *("reserved_bytes", "device_used_bytes", "gemm_seconds", "attention_seconds", "attention_backward_seconds"),
        *("memory_seconds", "host_copy_seconds", "seconds", "compute_share"),
    )
)
"""Methods of plugins' objects whose results are converted to arrays of float64."""


def wrap_objects(plugin: str, hook: str, result: T) -> T:
    """Return the result of `hook`. An object with methods is wrapped in a `PluginProxy`."""
    return cast(T, PluginProxy(plugin, result)) if hook in HOOKS_WITH_OBJECTS else result


class PluginProxy:
    """Wraps an object of a plugin. Exceptions in its methods become NoDevice, with a hint to disable the plugin."""

    def __init__(self, plugin: str, wrapped: object) -> None:
        self._owner, self._wrapped = plugin, wrapped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = getattr(self._wrapped, name)
        return self._guard(name, member) if callable(member) else member

    def _guard(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            # Only the main thread redirects stdout. Another thread would also redirect what the main thread prints.
            quiet = stdout_to_stderr() if current_thread() is main_thread() else nullcontext()
            try:
                with quiet:
                    result = method(*arguments, **named)
                return np.asarray(result, dtype=np.float64) if name in COLUMNS else result
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                source = f"plugin {self._owner}: {name} of {type(self._wrapped).__name__}"
                hint = f"disable it with --no-plugin {self._owner}"
                raise NoDevice(f"{source} raised {one_line(error)}; {hint}") from error

        return call


HOOK_GROUPS = (hooks.ChipHooks, hooks.CostHooks, hooks.EngineHooks, hooks.TrialHooks)
HOOKS = tuple(name for group in HOOK_GROUPS for name in vars(group) if name.startswith("flagcore_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A loaded plugin.

    `package`: the package that its entry point names. Empty if it has no entry point.
    `hooks`: the names of the hooks that it implements.
    `manager`: a pluggy manager that contains only this plugin.
    """

    name: str
    distribution: str
    version: str
    package: str
    hooks: tuple[str, ...]
    manager: pluggy.PluginManager

    def call(self, hook: str, arguments: Mapping[str, object]) -> object:
        """Call this plugin's implementation of `hook` and return its result, or None if there is no implementation.

        Exceptions of the plugin are not caught.
        """
        caller = getattr(self.manager.hook, hook)
        result = caller(**arguments)
        if caller.spec.opts["firstresult"]:
            return result
        return result[0] if result else None


def make_plugin(name: str, module: object, point: EntryPoint | None = None) -> Plugin:
    """Return the plugin that a module or an object implements. Raises BadPlugin if its hooks are not correct."""
    if isinstance(module, type):
        raise BadPlugin(f"the entry point names the class {module.__name__}; name a module, or an object")
    for member in dir(module):
        value = getattr(module, member) if member.startswith("flagcore_") else None
        if inspect.isroutine(value) and not hasattr(value, "flagcore_impl"):
            raise BadPlugin(f"{member} lacks @hookimpl, so it would never be called; add the decorator")
    manager = pluggy.PluginManager("flagcore")
    for group in HOOK_GROUPS:
        manager.add_hookspecs(group)
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        raise BadPlugin(str(error)) from error
    callers = manager.get_hookcallers(module) or []
    for caller in callers:
        if not caller.has_spec():  # manager.check_pending() also rejects such hooks, but without a suggestion
            hooks_without_prefix = [hook.removeprefix("flagcore_") for hook in HOOKS]
            similar = get_close_matches(caller.name.removeprefix("flagcore_"), hooks_without_prefix, n=1)
            hint = f"did you mean flagcore_{similar[0]}?" if similar else f"the hooks are {', '.join(HOOKS)}"
            raise BadPlugin(f"{caller.name} is not a hook; {hint}")
    if not callers:
        raise BadPlugin("implements no hooks; mark its functions with @hookimpl")
    return Plugin(
        name=name,
        distribution=origin(point).metadata["Name"] if point else "",
        version=origin(point).version if point else "",
        package=point.module.partition(".")[0] if point else "",
        hooks=tuple(sorted(caller.name for caller in callers)),
        manager=manager,
    )
