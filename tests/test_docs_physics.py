"""The page of formulas says of every constant what the code says, and leaves none out."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from flagcore import physics

PAGE = (Path(__file__).parent.parent / "docs" / "physics.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(flagcore/[\w/]+)\.py` \| `([A-Z_]+)` \| `(.+?)` \|", PAGE, re.MULTILINE)
NO_PHYSICS = {"OCTAVES", "MOST_RANKS", "MOST_CHOICES", "SHORTEST", "LARGEST", "MANTISSA"}
"""Sizes of tables and of floats."""


@pytest.mark.parametrize(("module", "name", "value"), ROWS)
def test_constant_on_the_page_is_that_of_the_code(module: str, name: str, value: str) -> None:
    assert getattr(importlib.import_module(module.replace("/", ".")), name) == ast.literal_eval(value)


MODULES = [each.name for each in pkgutil.walk_packages(physics.__path__, "flagcore.physics.") if not each.ispkg]


@pytest.mark.parametrize("module", MODULES)
def test_every_constant_of_physics_is_on_the_page(module: str) -> None:
    found = importlib.import_module(module)
    held, source = vars(found), Path(str(found.__file__)).read_text(encoding="utf-8")
    own = {
        name for line in re.findall(r"^([A-Z][A-Z_, ]*)(?:: .*)? = ", source, re.MULTILINE) for name in line.split(", ")
    }
    numbers = {name for name in own - NO_PHYSICS if _is_number(held[name])}
    assert numbers == {name for place, name, _ in ROWS if place == module.replace(".", "/")}


def _is_number(value: object) -> bool:
    """Whether a constant is a number, or numbers by name or in order."""
    if isinstance(value, dict):
        return all(map(_is_number, value.values()))
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float)
