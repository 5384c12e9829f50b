"""Importing the module of hooks, tried in a process of its own: every command of flagcore imports it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

DRIVERS = (
    *("torch", "torch_mlu", "torch_npu", "torch_musa", "pynvml", "pymxsml", "pyixml", "pycndev", "tensorflow", "jax"),
    *("cupy", "vllm", "sglang", "megatron", "triton"),
)
REAL_VARIABLES = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "LANG", "LC_ALL")
"""Variables that the other process has."""
SECONDS = 5.0
"""Time limit of the import, without flagcore's own imports."""

_TRY = """
import contextlib, importlib, io, json, os, sys, threading, time
module, package, drivers = sys.argv[1], sys.argv[2], sys.argv[3].split()
sys.path[:0] = json.loads(sys.argv[4])
import flagcore.physics.device_memory, flagcore.vendorkit.chip_file, flagcore.vendorkit.cost_file
from flagcore.testing.state import changed, process_state
ours, state, start = sys.stdout, process_state(), time.monotonic()
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
    importlib.import_module(module)
seconds = time.monotonic() - start
own = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] == package]
print(json.dumps({
    "drivers": [name for name in drivers if name in sys.modules],
    "files": sorted(each.__file__ for each in own if getattr(each, "__file__", None)),
    "printed": (out.getvalue() + errors.getvalue()).strip(),
    "seconds": seconds,
    "changed": changed(state, process_state()),
    "threads": threading.active_count() - 1,
}), file=ours, flush=True)
os._exit(0)
"""


def import_loads_no_framework(plugin: Subject) -> Iterator[Problem]:
    report = _imported(plugin)
    fix = "import it inside the hook that needs it, or run it in another process (vendorkit.machine)"
    if isinstance(report, str):
        message = f"{plugin.package}: import {plugin.hooks_module} fails in a new process: {report}"
        yield Problem(message, "import everything that the module uses")
        return
    if report["drivers"]:
        loads = ", ".join(report["drivers"])
        yield Problem(f"{plugin.package}: import {plugin.hooks_module} loads {loads}", fix)
    for path in map(Path, report["files"]):
        for name, line in _at_import(ast.parse(path.read_text("utf-8")).body):
            if name in DRIVERS and name not in report["drivers"]:  # it is not installed here
                yield Problem(f"{path.name}:{line} imports {name} if it is installed", fix)


def import_has_no_side_effects(plugin: Subject) -> Iterator[Problem]:
    report = _imported(plugin)
    if isinstance(report, str):
        return
    what = f"{plugin.package}: import {plugin.hooks_module}"
    if report["printed"]:
        yield Problem(
            f"{what} prints {report['printed'][:60]!r}", "print nothing; log from a hook what users should know"
        )
    if report["seconds"] > SECONDS and not report["drivers"]:
        yield Problem(f"{what} takes {report['seconds']:.1f} s", "do that work in the hook that needs it")
    for each in report["changed"] if not report["drivers"] else []:
        fix = "change no state of the process; return variables for trials from flagcore_environment"
        yield Problem(f"{what} changes the {each}", fix)
    if report["threads"]:
        yield Problem(f"{what} starts {report['threads']} threads", "start threads only in hooks")


def _imported(plugin: Subject) -> dict[str, Any] | str:
    """Return the report of the other process, or why the import failed there."""
    if "imported" not in plugin.memory:
        arguments = [plugin.hooks_module, plugin.package, " ".join(DRIVERS), json.dumps([*filter(None, sys.path)])]
        argv = [sys.executable, "-c", _TRY, *arguments]
        environment = {name: os.environ[name] for name in REAL_VARIABLES if name in os.environ}
        try:
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
            last = (done.stdout.strip().splitlines() or ["{}"])[-1]
            wrong = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            plugin.memory["imported"] = json.loads(last) if done.returncode == 0 and "drivers" in last else wrong
        except subprocess.TimeoutExpired:
            plugin.memory["imported"] = "it hangs"
    found: dict[str, Any] | str = plugin.memory["imported"]
    return found


def _at_import(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield the packages that are imported with the module, with their lines."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno
        elif isinstance(node, ast.Try):
            yield from _at_import([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _at_import([*node.body, *node.orelse])
