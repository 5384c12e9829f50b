"""Checks of the plugin's module: loading, imports, reproducible answers, and side effects.

The side effects of its import and of its hooks are observed in a separate process.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from flagcore.plugins import LoadedPlugins
from flagcore_testing.examples import group_of, task_on
from flagcore_testing.hook_runner import seconds_without_waiting
from flagcore_testing.kit import Items, Problem, Problems, Skip, Subject, check, need, once

PUBLIC_PACKAGES = ("contracts", "domain", "errors", "files", "hooks", "physics", "testing")
"""Packages of flagcore that a plugin may import, beside the kit flagcore_vendorkit."""
KIT = "flagcore_vendorkit"
FIX_OF_IMPORT = "correct pyproject.toml or the import; `python -c` with the entry point's module shows the traceback"
FIX_OF_MODULE = (
    "import it inside the hook that needs it, or run it in another process (flagcore_vendorkit.machine): a plugin must "
    "load on every machine; name what it always needs in dependencies of pyproject.toml"
)
FIX_OF_HOOKS = "correct the object that the entry point names; docs/hooks.md lists all hooks"
MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


@check()
def plugin_loads(plugin: Subject) -> Problems:
    for failure in plugin.loaded.failures:
        if failure.stage in ("load", "check"):
            missing = MISSING.search(failure.reason)
            fix = FIX_OF_IMPORT if failure.stage == "load" else FIX_OF_HOOKS
            fix = FIX_OF_MODULE if missing and not missing[1].startswith("flagcore") else fix
            yield True, f"{plugin.name}: {failure.reason}", fix


@check(f"import only flagcore's {', '.join(PUBLIC_PACKAGES)}, {KIT}, and no other plugin")
def imports_only_public_modules(plugin: Subject) -> Problems:
    need((plugin.package_folder / "__init__.py").is_file(), "the plugin is a module, not a package")
    for path in sorted(plugin.package_folder.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text("utf-8"), filename=str(path)))
        for name, line in (each for node in nodes for each in _imports_of(node)):
            root, _, inner = name.partition(".")
            room = inner.partition(".")[0]
            is_other_plugin = root.startswith("flagcore_") and root not in (plugin.package, KIT)
            is_private = root == "flagcore" and room and room not in PUBLIC_PACKAGES
            yield is_other_plugin or is_private, f"{path.name}:{line} imports {name}"


@check("compute the answer from the arguments only")
def answers_are_reproducible(plugin: Subject) -> Problems:
    again = LoadedPlugins.of({plugin.name: plugin.hooks})
    first, second = (_answers(plugin, loaded) for loaded in (plugin.loaded, again))
    for hook, answer in first.items():
        yield answer != second[hook], f"{hook} returns another answer on the second call"


def _answers(plugin: Subject, loaded: LoadedPlugins) -> dict[str, object]:
    pairs = [(chip, engine) for chip in plugin.chips for engine in plugin.engines]
    return {  # of chips without figures: these, such as this machine's clock, may change
        "flagcore_chips": [
            (each.name, each.vendor, each.aliases, each.devices_per_node, [*each.figures]) for each in loaded.chips()
        ],
        "flagcore_topology": [loaded.topology(group_of(chip)) for chip in plugin.chips],
        "flagcore_engine_support": [loaded.engine_support(*pair) for pair in pairs],
        "flagcore_check_task": [loaded.check_task(task_on(*pair)) for pair in pairs],
        "flagcore_environment": [loaded.environment(*pair) for pair in pairs],
    }


def _imports_of(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each module that a statement imports from another package, with its line number."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        inner = [f"flagcore.{alias.name}" for alias in node.names] if node.module == "flagcore" else [node.module]
        yield from ((name, node.lineno) for name in inner)


ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "LANG", "LC_ALL")
"""Environment variables of the separate process."""
IMPORT_SECONDS = 5.0
"""Time limit of the import in seconds, without flagcore's own imports."""
SECONDS = 12.0
"""Time limit of one call of a hook in seconds, without those in which it waits for a processor. A command calls each
hook once per chip."""
TOTAL_SECONDS = 45.0
"""Time limit of the whole process in the same seconds: its start, which imports flagcore, and all hooks."""
POLL_SECONDS = 0.1
Record = dict[str, Any]


def _import_record(plugin: Subject) -> Items:
    """Return the record of the import. It is empty if the import ended the process, which another check reports."""
    return [(f"{plugin.package}: import {plugin.hooks_module} ", plugin, record) for record in _records(plugin)[0][:1]]


def _hook_records(plugin: Subject) -> Items:
    return [(record["hook"], record) for record in _records(plugin)[0][1:]]


@check(FIX_OF_MODULE, each=_import_record)
def import_loads_no_framework(plugin: Subject, record: Record) -> Problems:
    fix = "import everything that the module uses"
    yield record["raised"], f"fails in a new process: {record['raised']}", fix
    imports = [
        Problem(f"{path.name}:{line} imports {name} when the module is loaded", FIX_OF_MODULE)
        for path in map(Path, record["files"])
        for name, line in _top_level_imports(ast.parse(path.read_text("utf-8")).body)
        if not _is_allowed(plugin, name)
    ]
    yield from imports
    loaded = [name for name in record["loaded"] if not _is_allowed(plugin, name)]
    yield loaded and not imports, f"loads {', '.join(loaded)}"


@check(
    "change no state of the process; do slow work, start threads and log in the hook that needs it", each=_import_record
)
def import_has_no_side_effects(plugin: Subject, record: Record) -> Problems:
    yield record["printed"], f"prints {record['printed'][:60]!r}"
    if all(_is_allowed(plugin, name) for name in record["loaded"]):  # otherwise another check reports the cause
        yield record["seconds"] > IMPORT_SECONDS, f"takes {record['seconds']:.1f} s"
        yield from (f"changes the {each}{_place_of_change(record['files'], each)}" for each in record["changed"])


def _place_of_change(files: Sequence[str], change: str) -> str:
    """Return the line that names a variable of a change, such as `: discover.py:12`, or an empty string."""
    for word in re.findall(r"[A-Z]\w+", change):
        for path in map(Path, files):
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                if word in line:
                    return f": {path.name}:{number}"
    return ""


def _is_allowed(plugin: Subject, module: str) -> bool:
    """Return whether a package is part of Python, flagcore, the plugin, or what one of the last two depends on."""
    return (
        module in sys.stdlib_module_names
        or module.startswith(("flagcore", "_"))  # a private module is part of another one, such as Cython's of numpy
        or module == plugin.package
        or module in _dependencies(plugin)
    )


@once
def _dependencies(plugin: Subject) -> set[str]:
    """Return the top-level modules of flagcore and the plugin, and of all that they require without extras."""
    wanted, found = ["flagcore"], set[str]()
    with suppress(Skip, InvalidRequirement):  # another check reports it
        wanted += [Requirement(text).name for text in plugin.packaged.requires]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):
                requirements = [Requirement(text) for text in requires(name) or ()]
                wanted += [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    names = packages_distributions().items()
    return {module for module, owners in names if found & {canonicalize_name(owner) for owner in owners}}


@check(f"it must take less than {SECONDS:.0f} s: give every wait a time limit")
def hooks_return_quickly(plugin: Subject) -> Problems:
    records, hanging, _ = _records(plugin)
    yield hanging, f"{hanging} took more than {SECONDS:.0f} s, or all hooks {TOTAL_SECONDS:.0f} s, or ended its process"
    for record in records[1:]:
        yield record["seconds"] > SECONDS, f"{record['hook']} took {record['seconds']:.0f} s"


@check(
    "change no state of the process, or restore it; return variables for trials from flagcore_environment",
    each=_hook_records,
)
def hooks_have_no_side_effects(record: Record) -> Problems:
    fix = "print nothing; log what users should know"
    yield record["printed"], f" prints {record['printed'][:60]!r}", fix
    yield from (f" changes the {what}" for what in record["changed"])


@check("return a new object: replace(chip, ...), {**environment, ...}", each=_hook_records)
def hooks_do_not_modify_arguments(record: Record) -> Problems:
    return (f" modifies its argument {name}" for name in record["arguments"])


@check("keep results in memory, or remove the file")
def hooks_write_no_files(plugin: Subject) -> Problems:
    return (f"a hook writes the file {name}" for name in _records(plugin)[2])


@once
def _records(plugin: Subject) -> tuple[list[Record], str, list[str]]:
    """Return the side effects of the import and of each hook in another process, the call that crashed or hung, and the
    files that were written."""
    package = plugin.package_folder
    with tempfile.TemporaryDirectory(prefix="flagcore-check-") as made:
        work_folder, home, scratch = (Path(made, name) for name in ("here", "home", "scratch"))
        for folder in (work_folder, home, scratch):
            folder.mkdir()
        files_before = _files(package)
        output = _run(plugin, work_folder, {"HOME": str(home), "TMPDIR": str(scratch)})
        written_files = [
            *_files(work_folder),
            *(name for name in _files(home) if not name.startswith(".")),
            *_files(scratch),
            *(f"{package.name}/{name}" for name in _files(package) - files_before),
        ]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    is_complete = bool(lines) and "ends" in lines[-1]
    hanging_call = "" if is_complete else lines[-1].get("begins", "what follows") if lines else "its start"
    return [line for line in lines if "hook" in line], hanging_call, written_files


def _run(plugin: Subject, folder: Path, more: dict[str, str]) -> str:
    """Run the hooks until the process ends, one of its steps exceeds SECONDS, or all of them TOTAL_SECONDS."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    paths = json.dumps([os.path.abspath(path) for path in sys.path if path])
    argv = [sys.executable, "-B", "-m", "flagcore_testing.hook_runner", plugin.entry, paths]
    with open(folder.parent / "records", "w+b") as records:
        quiet: Any = {"stdout": records, "stderr": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(argv, env={**environment, **more}, cwd=folder, **quiet)
        begin = step = now = seconds_without_waiting(process.pid)
        size = 0
        try:
            while process.poll() is None and now - step <= SECONDS and now - begin <= TOTAL_SECONDS:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                now = seconds_without_waiting(process.pid)
                if (written := os.stat(records.fileno()).st_size) != size:
                    size, step = written, now
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        records.seek(0)
        return records.read().decode("utf-8", "replace")


def _files(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files}


def _top_level_imports(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield each package that the module imports when it is loaded, with its line number."""
    for node in body:
        yield from ((name.partition(".")[0], line) for name, line in _imports_of(node))
        if isinstance(node, ast.Try):
            yield from _top_level_imports([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _top_level_imports([*node.body, *node.orelse])
