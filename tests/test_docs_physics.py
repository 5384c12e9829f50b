"""The page of formulas lists every constant with its source; the site adds the values from the code."""

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


def test_site_adds_the_values_of_constants() -> None:
    text = "- `flagcore/physics/kernels/roofline.py`\n    - `BLOCK`: a source\n\nText.\n    - `BLOCK`: no list\n"
    assert constants.fill(text) == text.replace("BLOCK`: a source", "BLOCK = 128.0`: a source")


MODULES = [each.name for each in pkgutil.walk_packages(physics.__path__, "flagcore.physics.") if not each.ispkg]


@pytest.mark.parametrize("module", MODULES)
def test_every_constant_of_physics_is_on_the_page(module: str) -> None:
    found = importlib.import_module(module)
    held, source = vars(found), Path(str(found.__file__)).read_text(encoding="utf-8")
    own = {
        name for line in re.findall(r"^([A-Z][A-Z_, ]*)(?:: .*)? = ", source, re.MULTILINE) for name in line.split(", ")
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
