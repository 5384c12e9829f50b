"""All plugins and engines together."""

import importlib
from pathlib import Path

from flagcore.api.commands import calibrate as calibration
from flagcore.plugins import ENGINES, LoadedPlugins, load_plugins, names
from tests.plugins.conftest import Install

PLUGINS = Path(__file__).parents[3] / "plugins"


def test_devices_are_measured_for_an_engine_of_flagcore_first(install: Install) -> None:
    *_, before = calibration.target(load_plugins())
    source = "import copy\nfrom flagcore_megatron.engine import ENGINE\nENGINE = copy.copy(ENGINE)\n"
    install("flagcore-acme", {"acme": "flagcore_acme:ENGINE"}, {"flagcore_acme": source}, group=ENGINES)
    assert names(ENGINES)[0] == "acme"
    *_, engine = calibration.target(load_plugins())
    assert engine == before


def test_all_plugins_load_together_and_share_no_chip_name() -> None:
    vendors = [file.parent.name for file in PLUGINS.glob("*/pyproject.toml")]
    assert {"cpu", "nvidia", "metax", "iluvatar", "cambricon"} <= set(vendors)
    loaded = LoadedPlugins.of(
        {vendor: importlib.import_module(f"flagcore_{vendor}.hooks").plugin for vendor in vendors}
    )
    assert {chip.vendor for chip in loaded.chips()} == set(vendors)
    assert loaded.failures == ()
