"""The page of the search lists every constant and every strategy."""

from __future__ import annotations

import importlib
import re
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest

from docs.site import constants
from tests.test_docs_physics import _is_number

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
LISTED = constants.listed(PAGE)
MODULES = sorted(
    {
        f"flagcore.{room}.{file.stem}"
        for room in ("learning", "strategies")
        for file in (ROOT / "flagcore" / room).glob("[a-z]*.py")
    }
    | {"flagcore.domain.search_state"}
)


def plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_constant_on_the_page_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", MODULES)
def test_every_constant_of_the_search_is_on_the_page(module: str) -> None:
    found = importlib.import_module(module)
    source = Path(str(found.__file__)).read_text(encoding="utf-8")
    own = {
        name
        for line in re.findall(r"^([A-Z][A-Z_0-9, ]*)(?:: .*)? = ", source, re.MULTILINE)
        for name in line.split(", ")
    }
    numbers = {name for name in own if plain(vars(found)[name]) and _is_number(plain(vars(found)[name]))}
    assert numbers == {name for place, name in LISTED if place == module}


def test_every_strategy_is_on_the_page() -> None:
    table = PAGE.split("## Strategies")[1].split("\n\n- ")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split('[project.entry-points."flagcore.strategies"]')[1].split("[")[0]
    assert listed == set(re.findall(r"^(\w+) = ", section, re.MULTILINE))
