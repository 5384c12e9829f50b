"""The plugins of this repository, side by side."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from flagcore import __version__
from flagcore.plugins import LoadedPlugins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDERS = sorted(path.parent for path in (Path(__file__).parents[2] / "plugins").glob("*/pyproject.toml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_distribution_names_its_hooks_and_the_flagcore_it_goes_with(folder: Path) -> None:
    content: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())
    project, vendor = content["project"], folder.name
    assert project["name"] == f"flagcore-{vendor}"
    assert project["entry-points"] == {"flagcore.plugins": {vendor: f"flagcore_{vendor}.hooks:plugin"}}
    (needed,) = (expected for expected in map(Requirement, project["dependencies"]) if expected.name == "flagcore")
    assert needed.specifier.contains(__version__)
    assert set(content["tool"]) == {"hatch"}, "tool settings belong to the root"


def test_all_plugins_load_together_and_share_no_chip_name() -> None:
    vendors = [folder.name for folder in FOLDERS]
    assert {"cpu", "nvidia", "metax", "iluvatar", "cambricon"} <= set(vendors)
    loaded = LoadedPlugins.of(
        {vendor: importlib.import_module(f"flagcore_{vendor}.hooks").plugin for vendor in vendors}
    )
    assert {chip.vendor for chip in loaded.chips()} == set(vendors)
    assert loaded.failures == ()
