"""Imports a plugin and calls its hooks in a separate process, and reports their side effects.

`python -m flagcore_testing.hook_runner ENTRY PATHS` runs in an empty folder. The first step is the import, and each
other step is a hook. The program prints lines of JSON. Before each step it prints `{"begins": HOOK}`, and after the
last one `{"ends": ENTRY}`. After each step it prints `hook`, `seconds`, `printed`, `changed` (the changed parts of the
process), `raised`, and `arguments` (the names of the arguments that the hook modified). For the import, it also prints
the packages (`loaded`) and the plugin's `files` that were loaded. `PARTS` lists the state of a process that a plugin
must not change.
"""

import ctypes
import importlib
import json
import logging
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from flagcore_vendorkit import plugin as vendor_plugin  # noqa: F401 (as above)

from flagcore.loading.entry_points import one_line
from flagcore.loading.limits import THREAD, BadPlugin
from flagcore.physics import roofline  # noqa: F401 (what plugins usually import is not their own time)
from flagcore.physics.collective_costs import topology_of
from flagcore.plugins import LoadedPlugins, Plugin, validation
from flagcore_testing.examples import example_calls


def process_state() -> dict[str, object]:
    """Return each part of the process state by its name in messages. The values are only meant for comparison."""
    return {what: read() for what, read in PARTS.items()}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of changed parts of the state, with the names of changed environment variables."""
    first, second = (each if isinstance(each, dict) else {} for each in (before["environment"], after["environment"]))
    names = ", ".join(sorted(name for name in {*first, *second} if first.get(name) != second.get(name)))
    changed_parts = (what for what in before if before[what] != after[what])
    return [f"{what} ({names})" if what == "environment" else what for what in changed_parts]


def _logging() -> object:
    root, known = logging.root, logging.root.manager.loggerDict
    flagcore_logger = known.get("flagcore")
    handlers = flagcore_logger.handlers if isinstance(flagcore_logger, logging.Logger) else []
    return root.level, tuple(map(id, root.handlers)), tuple(map(id, handlers)), root.manager.disable


def _numpy_random() -> object:
    name, keys, *other_state = np.random.get_state(legacy=True)
    return name, bytes(np.asarray(keys)), tuple(other_state)


SIGNALS = sorted(signal.valid_signals())
_HANDLER = importlib.import_module("_signal").getsignal
"""Without an Enum per signal, for each hook of each chip."""
PARTS: Mapping[str, Callable[[], object]] = {
    "environment": lambda: dict(os.environ),
    "working directory": os.getcwd,
    "import path": lambda: list(sys.path),
    "logging of the program": _logging,
    "filters of warnings": lambda: [str(each) for each in warnings.filters],
    "error handling of numpy": np.geterr,
    "signal handlers": lambda: [*map(_HANDLER, SIGNALS)],
    "random numbers of random": random.getstate,
    "random numbers of numpy": _numpy_random,
}
IMPORT = "its import"
STARTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
"""Events of Python when a program is started."""
_PR_SET_PDEATHSIG = 1


def seconds_without_waiting(process: int | str = "self") -> float:
    """Return the seconds of a monotonic clock without those in which a process waited for a processor.

    On a busy machine, a difference of two results is the time that a step would take on a quiet one.
    """
    waited = 0.0
    with suppress(OSError, ValueError, IndexError):  # the process has ended, or the kernel does not count
        waited = int(Path(f"/proc/{process}/schedstat").read_text("ascii").split()[1]) * 1e-9
    return time.monotonic() - waited


def main(entry: str) -> int:
    """Import the plugin, call its hooks, and return 0."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    logging.lastResort, logging.root.manager.emittedNoHandlerWarning = None, True
    for record in _records(entry):
        report.write(json.dumps(record) + "\n")
    return 0


def _records(entry: str) -> Iterator[dict[str, object]]:
    module, _, attribute = entry.partition(":")
    yield {"begins": IMPORT}
    before = {*sys.modules}
    started: list[str] = []
    sys.addaudithook(lambda event, arguments: started.append(str(arguments[0])) if event in STARTS else None)
    imported = _observe(partial(importlib.import_module, module))
    if started:
        imported["changed"] = [*imported["changed"], f"processes: it starts {started[0]}"]
    package = module.partition(".")[0]
    own_modules = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] == package]
    files = sorted(file for each in own_modules if (file := getattr(each, "__file__", None)))
    loaded = sorted({name.partition(".")[0] for name in {*sys.modules} - before})
    yield {"hook": IMPORT, "arguments": [], "loaded": loaded, "files": files, **imported}
    if not imported["raised"]:
        hooks: object = sys.modules[module]
        loaded_plugins = LoadedPlugins.of({"plugin_under_test": getattr(hooks, attribute) if attribute else hooks})
        for plugin in loaded_plugins.plugins:
            yield from _call_hook(plugin, loaded_plugins)
    yield {"ends": entry}


def _call_hook(plugin: Plugin, loaded: LoadedPlugins) -> Iterator[dict[str, object]]:
    for hook, arguments in _hook_calls(loaded):
        if hook in plugin.hooks:
            yield {"begins": hook}
            frozen_arguments = _frozen_copies(arguments)
            record = _observe(partial(_answer, plugin, hook, arguments))
            modified = [name for name, value in _frozen_copies(arguments).items() if value != frozen_arguments[name]]
            yield {"hook": hook, "arguments": modified, **record}


def _answer(plugin: Plugin, hook: str, arguments: Mapping[str, object]) -> None:
    """Call a hook, and the methods of the object that it returns."""
    answer = plugin.call(hook, arguments)
    if answer is not None and hook in USES:
        with suppress(BadPlugin):  # another check reports it
            USES[hook](answer, arguments)


USES: Mapping[str, Callable[[Any, Mapping[str, Any]], object]] = {
    "flagcore_memory_model": lambda answer, arguments: validation.memory_model(answer),
    "flagcore_kernel_costs": lambda answer, arguments: validation.kernel_costs(answer),
    "flagcore_collective_costs": lambda answer, arguments: validation.collective_costs(
        answer, topology_of(arguments["group"])
    ),
    "flagcore_telemetry": lambda answer, arguments: answer.sample(),
}
"""Maps a hook to a function that uses the object that the hook returns."""


def _observe(call: Callable[[], object]) -> dict[str, Any]:
    """Call a function and return its side effects."""
    state, threads = process_state(), _threads()
    error_text, start = "", seconds_without_waiting()
    with _captured_output() as file:
        try:
            call()
        except BaseException as error:
            error_text = one_line(error)
        seconds = seconds_without_waiting() - start
        sys.stdout.flush()
        sys.stderr.flush()
        file.seek(0)
        output = file.read().decode("utf-8", "replace").strip()
    changes = changed(state, process_state())
    if _threads() > threads:
        changes.append("threads: a thread still runs")
    return {"seconds": seconds, "printed": output, "changed": changes, "raised": error_text}


def _threads() -> int:
    """Return the number of threads, without those in which the core runs code of plugins."""
    return sum(each.name != THREAD for each in threading.enumerate())


def _hook_calls(loaded: LoadedPlugins) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each hook with the arguments that the core passes, once per chip and engine."""
    yield "flagcore_chips", {"name": ""}
    yield "flagcore_devices", {"environment": {**os.environ}}
    yield "flagcore_vendor", {"environment": {}}
    for chip in loaded.chips():
        yield from example_calls(chip)


def _frozen_copies(arguments: Mapping[str, object]) -> dict[str, bytes]:
    copies_by_name = {}
    for name, value in arguments.items():
        try:
            copies_by_name[name] = pickle.dumps(value)
        except Exception:  # another check reports it
            copies_by_name[name] = repr(value).encode()
    return copies_by_name


@contextmanager
def _captured_output() -> Iterator[IO[bytes]]:
    """Capture the output to stdout and stderr within this context, also of native code and child processes."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        copies = {number: os.dup(number) for number in (1, 2)}
        for number in copies:
            os.dup2(file.fileno(), number)
        try:
            yield file
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in copies.items():
                os.dup2(copy, number)
                os.close(copy)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a hook may never return, and the check may be ended
    sys.path[:0] = json.loads(sys.argv[2])
    os._exit(main(sys.argv[1]))  # threads that the plugin started may not keep it alive
