"""The plugin itself: that it loads, what it imports, and that its answers are reproducible."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

from flagcore.domain.chip import Chip
from flagcore.plugins import LoadedPlugins
from flagcore.testing.facts import facts_of
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject

ROOMS = ("contracts", "domain", "errors", "files", "hooks", "physics", "testing", "vendorkit")
"""What a plugin may import of flagcore."""


def plugin_loads(plugin: Subject) -> Iterator[Problem]:
    for failure in plugin.loaded.failures:
        if failure.stage in ("discover", "load", "check"):
            yield Problem(
                f"{plugin.name}: {failure.reason}",
                "correct the object that the entry point names; docs/hooks.md lists all hooks",
            )


def imports_only_public_modules(plugin: Subject) -> Iterator[Problem]:
    package = plugin.package
    for path in _modules(plugin.package_folder):
        for name, line in _imports(path):
            root, _, inner = name.partition(".")
            room = inner.partition(".")[0]
            stranger = root.startswith("flagcore_") and root != package
            if stranger or (root == "flagcore" and room and room not in ROOMS):
                yield Problem(
                    f"{path.name}:{line} imports {name}",
                    f"import only flagcore's {', '.join(ROOMS)}, and no other plugin",
                )


def answers_are_reproducible(plugin: Subject) -> Iterator[Problem]:
    again = LoadedPlugins.of({plugin.name: plugin.hooks})
    for hook, first, second in _answers(plugin, again):
        if first != second:
            yield Problem(f"{hook} gives another answer the second time", "compute it from the arguments only")


def chips_can_be_pickled(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.chips:
        try:
            if pickle.loads(pickle.dumps(chip)) != chip:
                yield Problem(f"chip {chip.name} differs after pickle", "use plain dicts and tuples")
        except Exception as error:
            yield Problem(f"chip {chip.name} cannot be pickled: {error}", "use plain dicts and tuples")


def _answers(plugin: Subject, again: LoadedPlugins) -> Iterator[tuple[str, object, object]]:
    first = plugin.loaded
    yield "flagcore_chips", [_stable(chip) for chip in first.chips()], [_stable(chip) for chip in again.chips()]
    for chip in plugin.chips:
        group = plugin.group(chip)
        yield "flagcore_topology", first.topology(group), again.topology(group)
        for engine in plugin.engines:
            yield "flagcore_engine_support", first.engine_support(chip, engine), again.engine_support(chip, engine)
            yield "flagcore_environment", first.environment(chip, engine), again.environment(chip, engine)
            patterns = first.failure_patterns(chip, engine)
            yield "flagcore_failure_patterns", patterns, again.failure_patterns(chip, engine)


def _stable(chip: Chip) -> object:
    """Return what must not change; a figure may, such as this machine's clock."""
    return chip.name, chip.vendor, chip.aliases, chip.devices_per_node, [key for key, _ in facts_of(chip)]


def _modules(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    if not (folder / "__init__.py").is_file():
        raise Skip("the plugin is a module, not a package")
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
