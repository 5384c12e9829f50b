"""Loads a plugin into its own pluggy manager, and wraps its objects, so that its errors name it and affect no other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import Distribution
from threading import current_thread, main_thread
from typing import Any, TypeVar, cast

import numpy as np
import pluggy

from flagcore import hooks
from flagcore.domain.engine import ValueRule
from flagcore.errors import NoDevice
from flagcore.plugins.installed import BadPlugin, one_line, stdout_to_stderr

T = TypeVar("T")

HOOKS_WITH_OBJECTS = frozenset(
    f"flagcore_{name}" for name in ("memory_model", "kernel_costs", "collective_costs", "pruning_rules", "telemetry")
)
COLUMNS = frozenset(
    (
        *("reserved_bytes", "device_used_bytes", "gemm_seconds", "attention_seconds", "attention_backward_seconds"),
        *("memory_seconds", "host_copy_seconds", "seconds", "compute_share"),
    )
)
"""Methods whose results are converted to arrays of float64."""


def wrap_objects(plugin: str, hook: str, result: T) -> T:
    """Return the result of a hook with its objects wrapped, if the hook returns objects."""
    if hook not in HOOKS_WITH_OBJECTS:
        return result
    if isinstance(result, tuple):  # of pruning rules
        return cast(T, tuple(each if isinstance(each, ValueRule) else PluginProxy(plugin, each) for each in result))
    return cast(T, PluginProxy(plugin, result))


def plugin_name(wrapped: object) -> str:
    """Return the name of the plugin that an object is from, empty if it is not from a plugin."""
    return wrapped._owner if isinstance(wrapped, PluginProxy) else ""


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
            # In a background thread stdout stays: redirecting it there would take what the main thread prints.
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
    """A loaded plugin. `hooks` are the hooks that it implements; `manager` has only this plugin."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]
    manager: pluggy.PluginManager

    def call(self, hook: str, arguments: Mapping[str, object]) -> object:
        """Return the result of this plugin's implementation of `hook`, None if there is none. Raises its exceptions."""
        caller = getattr(self.manager.hook, hook)
        result = caller(**arguments)
        if caller.spec.opts["firstresult"]:
            return result
        return result[0] if result else None


def make_plugin(name: str, module: object, distribution: Distribution | None = None) -> Plugin:
    """Return a plugin from a module or an object. Raises BadPlugin if it does not implement the hooks correctly."""
    if isinstance(module, type):
        raise BadPlugin(f"the entry point names the class {module.__name__}; name a module, or an object")
    for member in dir(module):
        value = getattr(module, member) if member.startswith("flagcore_") else None
        if inspect.isroutine(value) and not hasattr(value, "flagcore_impl"):
            raise BadPlugin(f"{member} lacks @hookimpl, so it would never be called; add the decorator")
    _check_api_version(module)
    manager = pluggy.PluginManager("flagcore")
    for group in HOOK_GROUPS:
        manager.add_hookspecs(group)
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        raise BadPlugin(str(error)) from error
    callers = manager.get_hookcallers(module) or []
    for caller in callers:
        if not caller.has_spec():  # manager.check_pending() also rejects these, but without a suggestion
            hooks_without_prefix = [hook.removeprefix("flagcore_") for hook in HOOKS]
            similar = get_close_matches(caller.name.removeprefix("flagcore_"), hooks_without_prefix, n=1)
            hint = f"did you mean flagcore_{similar[0]}?" if similar else f"the hooks are {', '.join(HOOKS)}"
            raise BadPlugin(f"{caller.name} is not a hook; {hint}")
    if not callers:
        raise BadPlugin("implements no hooks; mark its functions with @hookimpl")
    return Plugin(
        name=name,
        distribution=distribution.metadata["Name"] if distribution else "",
        version=distribution.version if distribution else "",
        hooks=tuple(sorted(caller.name for caller in callers)),
        manager=manager,
    )


def _check_api_version(module: object) -> None:
    """Raise BadPlugin for a plugin that was written for a later version of the hooks."""
    api = getattr(module, "HOOKS_API", hooks.HOOKS_API)
    if isinstance(api, bool) or not isinstance(api, int) or api < 1:
        raise BadPlugin(
            f"has HOOKS_API = {api!r}, which is not a version of the hooks; write HOOKS_API = {hooks.HOOKS_API}"
        )
    if api > hooks.HOOKS_API:
        fix = "install a newer flagcore, or an older version of the plugin"
        raise BadPlugin(f"was written for HOOKS_API {api}, but this flagcore has HOOKS_API {hooks.HOOKS_API}; {fix}")
