"""The page of formulas lists every constant; the site adds values and docstrings from the code."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from docs.site import constants
from flagcore import physics

PAGE = (Path(__file__).parent.parent / "docs" / "physics.md").read_text(encoding="utf-8")
LISTED = constants.listed(PAGE)
NO_PHYSICS = {"OCTAVES", "MAX_RANKS", "MAX_CHOICES", "SHORTEST", "MAX_PAYLOAD", "MANTISSA"}
"""Sizes of tables and of floats, and limits of input."""


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_constant_on_the_page_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_site_adds_values_and_docstrings() -> None:
    filled = constants.fill("- `flagcore/physics/kernels/roofline.py`: `BLOCK`, `HOST_LATENCY`\n\nText with `BLOCK`.\n")
    heading, block, latency, *text = filled.splitlines()
    assert heading == "- `flagcore/physics/kernels/roofline.py`"
    assert block.startswith("    - `BLOCK = 128.0`: The number of queries")
    assert latency.startswith("    - `HOST_LATENCY = ")
    assert text == ["", "Text with `BLOCK`."]


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_each_listed_constant_has_a_docstring(module: str, name: str) -> None:
    filled = constants.fill(f"- `{module.replace('.', '/')}.py`: `{name}`")
    assert len(filled.splitlines()[1].partition("`: ")[2]) > 10


MODULES = [each.name for each in pkgutil.walk_packages(physics.__path__, "flagcore.physics.") if not each.ispkg]


@pytest.mark.parametrize("module", MODULES)
def test_every_constant_of_physics_is_on_the_page(module: str) -> None:
    found = importlib.import_module(module)
    held, source = vars(found), Path(str(found.__file__)).read_text(encoding="utf-8")
    own = {
        name
        for line in re.findall(r"^([A-Z][A-Z_0-9, ]*)(?:: .*)? = ", source, re.MULTILINE)
        for name in line.split(", ")
    }
    numbers = {name for name in own - NO_PHYSICS if _is_number(held[name])}
    assert numbers == {name for place, name in LISTED if place == module}


def _is_number(value: object) -> bool:
    """Whether a constant is a number, or numbers by name or in order."""
    if isinstance(value, dict):
        return all(map(_is_number, value.values()))
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float)
