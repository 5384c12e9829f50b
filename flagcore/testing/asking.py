"""Asks every hook of a plugin in a process of its own, and tells what each one did beside answering.

`python -m flagcore.testing.asking MODULE PATHS` runs in an empty folder, and prints a line of JSON for each hook before
it is asked, `{"begins": HOOK}`, the last one `{"ends": MODULE}`, and after each hook: `hook`, `seconds`, `printed`,
`changed` (of the process), `arguments` (those that are not as they were given), `raised`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from flagcore.domain.chip import Chip, Device
from flagcore.domain.launch import Launch
from flagcore.plugins import WORKLOADS, LoadedPlugins, kind_of, names
from flagcore.plugins.installed import one_line
from flagcore.testing.examples import group_of, task_on
from flagcore.testing.state import changed, process_state


def main(module: str) -> int:
    """Ask, and return 0."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    logging.lastResort, logging.root.manager.emittedNoHandlerWarning = None, True
    hooks = importlib.import_module(module)
    loaded = LoadedPlugins.of({"plugin_under_test": hooks})
    for plugin in loaded.plugins:
        for hook, arguments in _questions(loaded):
            if hook in plugin.hooks:
                ours.write(json.dumps({"begins": hook}) + "\n")
                ours.write(json.dumps(_asked(plugin.ask, hook, arguments)) + "\n")
    ours.write(json.dumps({"ends": module}) + "\n")
    return 0


def _asked(ask: Any, hook: str, arguments: Mapping[str, object]) -> dict[str, object]:
    before, state, threads = _frozen(arguments), process_state(), threading.active_count()
    raised, start = "", time.monotonic()
    with _written() as file:
        try:
            ask(hook, arguments)
        except BaseException as error:
            raised = one_line(error)
        seconds = time.monotonic() - start
        sys.stdout.flush()
        sys.stderr.flush()
        file.seek(0)
        printed = file.read().decode("utf-8", "replace").strip()
    given = [name for name, value in _frozen(arguments).items() if value != before[name]]
    said = changed(state, process_state())
    if threading.active_count() > threads:
        said.append("threads, of which it leaves one running")
    return {
        "hook": hook,
        "seconds": seconds,
        "printed": printed,
        "changed": said,
        "arguments": given,
        "raised": raised,
    }


def _questions(loaded: LoadedPlugins) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each hook with the arguments that the core gives it, once for each chip and each engine."""
    yield "flagcore_chips", {}
    yield "flagcore_devices", {}
    yield "flagcore_maturity", {}
    for chip in loaded.chips():
        yield from _of_chip(chip)


def _of_chip(chip: Chip) -> Iterator[tuple[str, Mapping[str, object]]]:
    group, task = group_of(chip), task_on(chip)
    yield "flagcore_topology", {"group": group}
    yield "flagcore_telemetry", {"device": Device(index=0, chip=chip.name)}
    yield "flagcore_pruning_rules", {"task": task}
    launch = Launch(argv=("echo", "the command"), folder="trial", environment={"KEEP": "me"})
    yield "flagcore_prepare_launch", {"launch": launch, "task": task}
    for engine in names(WORKLOADS):
        about = {"chip": chip, "engine": engine, "engine_version": None}
        kind = kind_of(engine)
        yield "flagcore_memory_model", {"group": group, "engine": engine, "kind": kind}
        yield "flagcore_kernel_costs", {"chip": chip, "engine": engine, "kind": kind}
        yield "flagcore_collective_costs", {"group": group, "engine": engine}
        yield "flagcore_engine_support", {**about, "kind": kind}
        yield "flagcore_knobs", about
        yield "flagcore_environment", {**about, "task": task, "kind": kind}
        yield "flagcore_failure_patterns", about


def _frozen(arguments: Mapping[str, object]) -> dict[str, bytes]:
    found = {}
    for name, value in arguments.items():
        try:
            found[name] = pickle.dumps(value)
        except Exception:  # another check tells
            found[name] = repr(value).encode()
    return found


@contextmanager
def _written() -> Iterator[IO[bytes]]:
    """Take what is written to stdout and stderr meanwhile, by Python or below it."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = {number: os.dup(number) for number in (1, 2)}
        for number in kept:
            os.dup2(file.fileno(), number)
        try:
            yield file
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)


if __name__ == "__main__":
    sys.path[:0] = json.loads(sys.argv[2])
    os._exit(main(sys.argv[1]))  # threads that the plugin started may not keep it alive
