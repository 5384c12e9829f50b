"""The module of hooks: that it loads, what it knows of flagcore, and that it answers the same again."""

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
                message=f"{plugin.name}: {failure.reason}",
                fix="mend the function in the module that the entry point names; docs/hooks.md has all hooks",
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
                    message=f"{path.name}:{line} imports {name}",
                    fix=f"a plugin knows flagcore's {', '.join(ROOMS)} alone, and no other plugin",
                )


def answers_are_reproducible(plugin: Subject) -> Iterator[Problem]:
    again = LoadedPlugins.of({plugin.name: plugin.hooks})
    for hook, first, second in _answers(plugin, again):
        if first != second:
            yield Problem(
                message=f"{hook} answers otherwise when it is asked again", fix="let it depend on nothing else"
            )


def chips_can_be_pickled(plugin: Subject) -> Iterator[Problem]:
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
