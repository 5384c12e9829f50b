"""One plugin: how it is checked when it is loaded, and how its hooks and objects are called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import EntryPoint
from threading import current_thread, main_thread
from typing import Any, NamedTuple

import numpy as np
import pluggy

from flagcore import hooks
from flagcore.domain.space import FloatArray
from flagcore.errors import NoDevice
from flagcore.i18n import closest
from flagcore.loading.entry_points import metadata_of, name_of, one_line, origin, stdout_to_stderr
from flagcore.loading.limits import HOOK_SECONDS, SAMPLE_SECONDS, BadPlugin, within

SLOW_SECONDS = 5.0
"""The user is warned if a hook takes longer than this, unless it is one of SLOW_HOOKS."""
SLOW_HOOKS = ("flagcore_health", "flagcore_measured_chip")
HOOK_GROUPS = (hooks.ChipHooks, hooks.CostHooks, hooks.EngineHooks, hooks.TrialHooks)
HOOKS = tuple(name for group in HOOK_GROUPS for name in vars(group) if name.startswith("flagcore_"))


class Plugin(NamedTuple):
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
        """Return the result of this plugin's `hook`, or None without one. Exceptions are not caught."""
        caller = getattr(self.manager.hook, hook)
        result = caller(**arguments)
        if caller.spec.opts["firstresult"]:
            return result
        return result[0] if result else None


class _Manager(pluggy.PluginManager):
    """Finds hooks in a module without pluggy's static look-up of each of its names, which takes milliseconds."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if not inspect.ismodule(plugin):
            return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)
        function = vars(plugin).get(name)
        return getattr(function, "flagcore_impl", None) if inspect.isfunction(function) else None

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return getattr(getattr(module_or_class, name), "flagcore_spec", None) if name in HOOKS else None


def make_plugin(name: str, module: object, point: EntryPoint | None = None) -> Plugin:
    """Return the plugin that a module or an object implements. Raises BadPlugin if its hooks are not correct."""
    if isinstance(module, type):
        raise BadPlugin(f"the entry point names the class {module.__name__}; name a module, or an object")
    for member in dir(module):
        value = getattr(module, member) if member.startswith("flagcore_") else None
        if inspect.isroutine(value) and not hasattr(value, "flagcore_impl"):
            raise BadPlugin(f"{member} lacks @hookimpl, so it would never be called; add the decorator")
    manager = _Manager("flagcore")
    for group in HOOK_GROUPS:
        manager.add_hookspecs(group)
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        raise BadPlugin(str(error)) from error
    callers = manager.get_hookcallers(module) or []
    for caller in callers:
        if not caller.has_spec():  # manager.check_pending() also rejects such hooks, but without a suggestion
            raise _unknown_hook(caller.name)
    if not callers:
        raise BadPlugin("implements no hooks; mark its functions with @hookimpl")
    return Plugin(
        name=name,
        distribution=name_of(origin(point)) if point else "",
        version=metadata_of(origin(point))["Version"] if point else "",
        package=point.module.partition(".")[0] if point else "",
        hooks=tuple(sorted(caller.name for caller in callers)),
        manager=manager,
    )


def _unknown_hook(name: str) -> BadPlugin:
    """Return the error of a plugin that implements a hook that does not exist."""
    similar = closest(name.removeprefix("flagcore_"), [hook.removeprefix("flagcore_") for hook in HOOKS])
    hint = f"did you mean flagcore_{similar}?" if similar else f"the hooks are {', '.join(HOOKS)}"
    return BadPlugin(f"{name} is not a hook; {hint}")


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
BYTES = frozenset(("reserved_bytes", "device_used_bytes"))
"""Those whose results may not be NaN, because memory is never unknown."""


def _as_column(name: str, result: Any, arguments: Sequence[Any]) -> FloatArray:
    """Return a COLUMNS result as array. Raises BadPlugin for another shape, or known memory that becomes NaN."""
    column: FloatArray = np.asarray(result, dtype=np.float64)
    sizes = [each for argument in arguments for each in (getattr(argument, "sizes", None) or [argument])]
    shapes = {np.shape(each) for each in sizes}
    if column.shape != (expected := shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)):
        found = "None" if result is None else f"an array of shape {column.shape}"
        raise BadPlugin(f"returned {found} for arguments of shape {expected}")
    if name in BYTES and np.isnan(column).any() and not np.isnan(np.asarray(arguments[0], dtype=np.float64)).any():
        raise BadPlugin("returned NaN bytes")
    return column


LIMITED_CALLS = 8
"""The number of first calls of a method of a plugin's object that have a time limit."""


class PluginProxy:
    """Wraps an object of a plugin. Exceptions in its methods become NoDevice, with a hint to disable the plugin."""

    def __init__(self, plugin: str, wrapped: object) -> None:
        self._owner, self._wrapped = plugin, wrapped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = getattr(self._wrapped, name)
        return self.__dict__.setdefault(name, self._guard(name, member)) if callable(member) else member

    def _guard(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        limited = iter(range(LIMITED_CALLS))  # a thread for each of thousands of calls would slow predictions down

        def result(*arguments: Any, **named: Any) -> object:
            found: Any = method(*arguments, **named)
            if name == "sample":
                return dict(found) if isinstance(found, Mapping) else found
            return _as_column(name, found, arguments) if name in COLUMNS else found

        def call(*arguments: Any, **named: Any) -> object:
            # Only the main thread redirects stdout. Another thread would also redirect what the main thread prints.
            is_quiet = sys.stdout is sys.stderr or current_thread() is not main_thread()
            try:
                with nullcontext() if is_quiet else stdout_to_stderr():
                    if name == "sample":
                        return within(SAMPLE_SECONDS, partial(result, *arguments, **named))
                    if next(limited, None) is not None:
                        return within(HOOK_SECONDS, partial(result, *arguments, **named))
                    return result(*arguments, **named)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                source = f"plugin {self._owner}: {name} of {type(self._wrapped).__name__}"
                hint = f"disable it with --no-plugin {self._owner}"
                raise NoDevice(f"{source} raised {one_line(error)}; {hint}") from error

        return call
