"""Wraps the objects of plugins, so that their errors name the plugin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import current_thread, main_thread
from typing import Any, TypeVar, cast

import numpy as np

from flagcore.errors import NoDevice
from flagcore.plugins.installed import one_line, stdout_to_stderr

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
    if isinstance(result, tuple):
        return cast(T, tuple(PluginProxy(plugin, each) for each in result))
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
