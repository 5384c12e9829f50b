"""Asks every hook of a plugin in a process of its own, and tells what each one did beside answering.

`python -m flagcore.testing.asking ENTRY PATHS` runs in an empty folder, and prints a line of JSON for each hook before
it is asked, `{"begins": HOOK}`, the last one `{"ends": ENTRY}`, and after each hook: `hook`, `seconds`, `printed`,
`changed` (of the process), `arguments` (those that are not as they were modified), `raised`.
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

from flagcore.plugins import LoadedPlugins
from flagcore.plugins.installed import one_line
from flagcore.testing.examples import questions
from flagcore.testing.state import changed, process_state


def main(entry: str) -> int:
    """Ask, and return 0."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    logging.lastResort, logging.root.manager.emittedNoHandlerWarning = None, True
    module, _, attribute = entry.partition(":")
    hooks: object = importlib.import_module(module)
    hooks = getattr(hooks, attribute) if attribute else hooks
    loaded = LoadedPlugins.of({"plugin_under_test": hooks})
    for plugin in loaded.plugins:
        for hook, arguments in _questions(loaded):
            if hook in plugin.hooks:
                ours.write(json.dumps({"begins": hook}) + "\n")
                ours.write(json.dumps(_call(plugin.ask, hook, arguments)) + "\n")
    ours.write(json.dumps({"ends": entry}) + "\n")
    return 0


def _call(ask: Any, hook: str, arguments: Mapping[str, object]) -> dict[str, object]:
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
    modified = [name for name, value in _frozen(arguments).items() if value != before[name]]
    changes = changed(state, process_state())
    if threading.active_count() > threads:
        changes.append("threads, of which it leaves one running")
    return {
        "hook": hook,
        "seconds": seconds,
        "printed": printed,
        "changed": changes,
        "arguments": modified,
        "raised": raised,
    }


def _questions(loaded: LoadedPlugins) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each hook with the arguments that the core gives it, once for each chip and each engine."""
    yield "flagcore_chips", {}
    yield "flagcore_devices", {}
    yield "flagcore_maturity", {}
    for chip in loaded.chips():
        yield from questions(chip)


def _frozen(arguments: Mapping[str, object]) -> dict[str, bytes]:
    found = {}
    for name, value in arguments.items():
        try:
            found[name] = pickle.dumps(value)
        except Exception:  # another check reports it
            found[name] = repr(value).encode()
    return found


@contextmanager
def _written() -> Iterator[IO[bytes]]:
    """Take what is written to stdout and stderr meanwhile, by Python or below it."""
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
    sys.path[:0] = json.loads(sys.argv[2])
    os._exit(main(sys.argv[1]))  # threads that the plugin started may not keep it alive
