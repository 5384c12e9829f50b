"""The module of hooks: that it loads, what it knows of flagcore, and that asking it has no effects."""

from __future__ import annotations

import ast
import io
import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

from flagcore.domain.chip import Chip
from flagcore.plugins import LoadedPlugins
from flagcore.testing.facts import facts_of
from flagcore.testing.kit import Problem, Skip
from flagcore.testing.subject import Subject

ROOMS = ("contracts", "domain", "errors", "files", "hooks", "physics", "testing", "vendorkit")
"""What a plugin may import of flagcore."""
SECONDS = 15.0
"""Far above what a hook may take; a command asks it once a chip."""


def the_plugin_loads_and_implements_known_hooks(plugin: Subject) -> Iterator[Problem]:
    for failure in plugin.loaded.failures:
        if failure.stage in ("discover", "load", "check"):
            yield Problem(
                message=f"{plugin.name}: {failure.reason}",
                fix="mend the function in the module that the entry point names; docs/hooks.md has all hooks",
            )


def it_imports_of_flagcore_only_what_plugins_may(plugin: Subject) -> Iterator[Problem]:
    package = plugin.package
    for path in _modules(plugin.package_folder):
        for name, line in _imports(path):
            root, _, inner = name.partition(".")
            room = inner.partition(".")[0]
            stranger = root.startswith("flagcore_") and root != package
            if stranger or (root == "flagcore" and room and room not in ROOMS):
                yield Problem(
                    message=f"{path.name}:{line} imports {name}",
                    fix=f"a plugin knows flagcore's {', '.join(ROOMS)} alone, and no other plugin",
                )


def asking_it_twice_gives_the_same_answer(plugin: Subject) -> Iterator[Problem]:
    again = LoadedPlugins.of({plugin.name: plugin.hooks})
    for hook, first, second in _answers(plugin, again):
        if first != second:
            yield Problem(
                message=f"{hook} answers otherwise when it is asked again", fix="let it depend on nothing else"
            )


def hooks_answer_within_seconds(plugin: Subject) -> Iterator[Problem]:
    again = LoadedPlugins.of({plugin.name: plugin.hooks})
    start = time.monotonic()
    again.devices()
    took = {"flagcore_devices": time.monotonic() - start}
    for chip in plugin.chips:
        start = time.monotonic()
        again.kernel_costs(chip, "megatron")
        took["flagcore_kernel_costs"] = time.monotonic() - start
    for hook, seconds in took.items():
        if seconds > SECONDS:
            yield Problem(message=f"{hook} took {seconds:.0f} s", fix=f"it must take less than {SECONDS:.0f} s")


def asking_it_leaves_the_process_as_it_was(plugin: Subject) -> Iterator[Problem]:
    before = _state()
    with redirect_stderr(io.StringIO()) as printed:  # the core sends there what hooks print
        list(_answers(plugin, LoadedPlugins.of({plugin.name: plugin.hooks})))
    if words := printed.getvalue().strip():
        yield Problem(
            message=f"asking its hooks prints {words[:60]!r}", fix="print nothing; what a user should know is logged"
        )
    for what, value in _state().items():
        if value != before[what]:
            yield Problem(
                message=f"asking its hooks changes the {what}",
                fix="variables for trials are the answer of flagcore_environment; nothing else may change",
            )


def what_it_answers_can_be_sent_to_another_process(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.chips:
        try:
            if pickle.loads(pickle.dumps(chip)) != chip:
                yield Problem(message=f"chip {chip.name} is another one after pickle", fix="use plain dicts and tuples")
        except Exception as error:
            yield Problem(message=f"chip {chip.name} cannot be pickled: {error}", fix="use plain dicts and tuples")


def _answers(plugin: Subject, again: LoadedPlugins) -> Iterator[tuple[str, object, object]]:
    first = plugin.loaded
    yield "flagcore_chips", [_told(chip) for chip in first.chips()], [_told(chip) for chip in again.chips()]
    for chip in plugin.chips:
        group = plugin.group(chip)
        yield "flagcore_topology", first.topology(group), again.topology(group)
        for engine in plugin.engines:
            yield "flagcore_engine_support", first.engine_support(chip, engine), again.engine_support(chip, engine)
            yield "flagcore_environment", first.environment(chip, engine), again.environment(chip, engine)
            patterns = first.failure_patterns(chip, engine)
            yield "flagcore_failure_patterns", patterns, again.failure_patterns(chip, engine)


def _told(chip: Chip) -> object:
    """Return what must not change: a figure may, where it is this machine's own clock."""
    return chip.name, chip.vendor, chip.aliases, chip.devices_per_node, [key for key, _ in facts_of(chip)]


def _state() -> dict[str, object]:
    return {"environment": dict(os.environ), "working directory": os.getcwd(), "import path": list(sys.path)}


def _modules(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    if not (folder / "__init__.py").is_file():
        raise Skip("the plugin is a single module, not a package")
    return found


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "flagcore" else [node.module]
            )
            yield from ((name, node.lineno) for name in names)
