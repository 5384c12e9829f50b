"""Wraps objects of plugins, so that their errors name the plugin."""

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
"""Methods whose answer is made an array of float64."""


def wrap_objects(plugin: str, hook: str, answer: T) -> T:
    """Return `answer`, with every object in it wrapped if `hook` answers with objects."""
    if hook not in HOOKS_WITH_OBJECTS:
        return answer
    if isinstance(answer, tuple):
        return cast(T, tuple(PluginProxy(plugin, one) for one in answer))
    return cast(T, PluginProxy(plugin, answer))


def plugin_name(answer: object) -> str:
    """Return the name of the plugin that answered with an object, or an empty string."""
    return answer._owner if isinstance(answer, PluginProxy) else ""


class PluginProxy:
    """Wraps a plugin's object. What its methods raise becomes NoDevice, with the option that disables the plugin."""

    def __init__(self, plugin: str, answer: object) -> None:
        self._owner, self._answer = plugin, answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = getattr(self._answer, name)
        return self._guard(name, member) if callable(member) else member

    def _guard(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            # In a background thread stdout stays: redirecting it there would take what the main thread prints.
            quiet = stdout_to_stderr() if current_thread() is main_thread() else nullcontext()
            try:
                with quiet:
                    found = method(*arguments, **named)
                return np.asarray(found, dtype=np.float64) if name in COLUMNS else found
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                whose = f"plugin {self._owner}: {name} of {type(self._answer).__name__}"
                hint = f"disable it with --no-plugin {self._owner}"
                raise NoDevice(f"{whose} raised {one_line(error)}; {hint}") from error

        return call
