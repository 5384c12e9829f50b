"""The import contracts of pyproject.toml cover every package and module of flagcore."""

import pkgutil
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import flagcore

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOMS = {f"flagcore.{each.name}" for each in pkgutil.iter_modules(flagcore.__path__)}
VENDORS = "a plugin knows hooks, vendorkit, contracts, domain, errors and physics only"


@pytest.fixture(scope="module")
def contracts() -> dict[str, dict[str, Any]]:
    file = Path(__file__).resolve().parent.parent / "pyproject.toml"
    listed = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    return {contract["name"]: contract for contract in listed}


@pytest.mark.parametrize(
    ("name", "field", "exceptions"),
    [
        ("the core knows no vendor", "source_modules", ""),
        (VENDORS, "forbidden_modules", "hooks vendorkit contracts domain errors physics"),
        ("the core knows no torch", "source_modules", ""),
    ],
)
def test_import_contracts_cover_every_package(
    contracts: dict[str, dict[str, Any]], name: str, field: str, exceptions: str
) -> None:
    listed = {each for each in contracts[name][field] if each.partition(".")[0] == "flagcore"}
    expected = {"flagcore"} if "flagcore" in listed else ROOMS - {f"flagcore.{each}" for each in exceptions.split()}
    assert listed == expected


def test_the_core_names_no_engine_importer_or_vendor() -> None:
    groups = ("flagcore.engines", "flagcore.importers", "flagcore.plugins")
    names = {point.name for group in groups for point in entry_points(group=group)} - {"cpu", "command"}
    package = Path(flagcore.__file__).parent
    words = {file: {*re.findall(r"[a-z0-9]+", file.read_text("utf-8").lower())} for file in package.rglob("*.py")}
    assert len(names) > 10
    assert {(file, name) for file in words for name in names & words[file]} == set()
