"""The module of the plugin: loading, imports, and reproducible answers."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

from flagcore.domain.chip import Chip
from flagcore.plugins import LoadedPlugins
from flagcore.testing.examples import group_of, task_on
from flagcore.testing.kit import Problems, Skip, Subject, check

PUBLIC_PACKAGES = ("contracts", "domain", "errors", "files", "hooks", "physics", "testing", "vendorkit")
"""Packages of flagcore that a plugin may import."""


@check("correct the object that the entry point names; docs/hooks.md lists all hooks")
def plugin_loads(plugin: Subject) -> Problems:
    for failure in plugin.loaded.failures:
        if failure.stage in ("discover", "load", "check"):
            yield f"{plugin.name}: {failure.reason}"


@check(f"import only flagcore's {', '.join(PUBLIC_PACKAGES)}, and no other plugin")
def imports_only_public_modules(plugin: Subject) -> Problems:
    if not (plugin.package_folder / "__init__.py").is_file():
        raise Skip("the plugin is a module, not a package")
    for path in sorted(plugin.package_folder.rglob("*.py")):
        for name, line in _imports(path):
            root, _, inner = name.partition(".")
            room = inner.partition(".")[0]
            is_other_plugin = root.startswith("flagcore_") and root != plugin.package
            if is_other_plugin or (root == "flagcore" and room and room not in PUBLIC_PACKAGES):
                yield f"{path.name}:{line} imports {name}"


@check("compute the answer from the arguments only")
def answers_are_reproducible(plugin: Subject) -> Problems:
    first, second = (
        _answers(plugin, loaded) for loaded in (plugin.loaded, LoadedPlugins.of({plugin.name: plugin.hooks}))
    )
    for hook, answer in first.items():
        if answer != second[hook]:
            yield f"{hook} returns another answer on the second call"


@check("use plain dicts and tuples")
def chips_can_be_pickled(plugin: Subject) -> Problems:
    for chip in plugin.chips:
        try:
            if pickle.loads(pickle.dumps(chip)) != chip:
                yield f"chip {chip.name} differs after pickle"
        except Exception as error:
            yield f"chip {chip.name} cannot be pickled: {error}"


def _answers(plugin: Subject, loaded: LoadedPlugins) -> dict[str, object]:
    chips = loaded.chips()
    pairs = [(chip, engine) for chip in plugin.chips for engine in plugin.engines]
    return {
        "flagcore_chips": [_stable_values(chip) for chip in chips],
        "flagcore_topology": [loaded.topology(group_of(chip)) for chip in plugin.chips],
        "flagcore_engine_support": [loaded.engine_support(*pair) for pair in pairs],
        "flagcore_check_task": [loaded.check_task(task_on(chip)) for chip in plugin.chips],
        "flagcore_environment": [loaded.environment(*pair) for pair in pairs],
        "flagcore_failure_patterns": [loaded.failure_patterns(*pair) for pair in pairs],
    }


def _stable_values(chip: Chip) -> object:
    """Return the values that must not change between calls. Figures, such as this machine's clock, may change."""
    return chip.name, chip.vendor, chip.aliases, chip.devices_per_node, list(chip.figures)


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"flagcore.{alias.name}" for alias in node.names] if node.module == "flagcore" else [node.module]
            yield from ((name, node.lineno) for name in inner)
