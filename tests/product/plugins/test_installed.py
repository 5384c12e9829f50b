"""All plugins and engines together."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.plugins import ENGINES, LoadedPlugins, here, load_plugins, names
from tests.plugins.conftest import Install

PLUGINS = Path(__file__).parents[3] / "plugins"
X1 = Chip(name="X1", vendor="acme", devices_per_node=8)
RUNS = EngineSupport(support=Support.YES, device_type="acme", distributed_backend="accl")


def test_devices_are_measured_for_an_engine_of_flagcore_first(install: Install) -> None:
    *_, before = here.target(load_plugins())
    source = "import copy\nfrom flagcore_megatron.engine import ENGINE\nENGINE = copy.copy(ENGINE)\n"
    install("flagcore-acme", {"acme": "flagcore_acme:ENGINE"}, {"flagcore_acme": source}, group=ENGINES)
    assert names(ENGINES)[0] == "acme"
    *_, engine = here.target(load_plugins())
    assert engine == before


def test_engines_that_cannot_run_on_a_chip_do_not_say_how_to_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "best_chip", lambda *arguments: X1)
    device, trains = Device(index=0, chip="X1"), replace(RUNS, preload=("torch_acme",))
    loaded = SimpleNamespace(
        devices=lambda: (device,),
        find_chip=lambda name: X1,
        engine_support=lambda chip, engine: (
            trains if engine == "megatron" else replace(RUNS, support=Support.IMPOSSIBLE, reason="no serving")
        ),
    )
    assert here.target(cast("LoadedPlugins", loaded)) == (X1, trains, (device,), "megatron")


def test_all_plugins_load_together_and_share_no_chip_name() -> None:
    vendors = [file.parent.name for file in PLUGINS.glob("*/pyproject.toml")]
    assert {"cpu", "nvidia", "metax", "iluvatar", "cambricon"} <= set(vendors)
    loaded = LoadedPlugins.of(
        {vendor: importlib.import_module(f"flagcore_{vendor}.hooks").plugin for vendor in vendors}
    )
    assert {chip.vendor for chip in loaded.chips()} == set(vendors)
    assert loaded.failures == ()
