"""Costs and knobs of Iluvatar's chips, and the output of ixsmi on real machines (tests/smi)."""

from pathlib import Path

import pytest
from flagcore_iluvatar import discover, hooks
from flagcore_iluvatar.hooks import plugin
from flagcore_testing import PluginConformance
from flagcore_testing.examples import task_on
from flagcore_testing.package import saved_outputs

from flagcore.domain.engine import RefusedValues
from flagcore.plugins import LoadedPlugins
from tests.checks import collective_seconds, collectives


class TestIluvatar(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


def test_a_contradictory_figure_is_left_out() -> None:
    (chip,) = (chip for chip in plugin.flagcore_chips("") if chip.name == "MR-V100")
    assert "int8" not in chip.dense_flops_per_second


def test_chips_without_published_collectives_use_those_of_the_same_library_and_link() -> None:
    costs = [collectives(plugin, chip.name) for chip in plugin.flagcore_chips("") if chip.link]
    times = [[collective_seconds(each, "all_reduce", 2**24, ranks) for ranks in (2, 8)] for each in costs]
    assert times == [times[0]] * 4


def test_published_collectives_of_two_devices_are_predicted_and_more_devices_take_longer() -> None:
    costs = collectives(plugin, "BI-V150", devices_per_node=16)
    two, four, sixteen = (collective_seconds(costs, "all_reduce", 2**24, ranks) for ranks in (2, 4, 16))
    assert two == pytest.approx(2163.9e-6, rel=0.001)
    assert 1.5 * two < four < sixteen < 6 * two
    assert collective_seconds(costs, "send", 2**26, 2) == pytest.approx(3056.4e-6, rel=0.001)


def test_vllm_gets_the_variable_for_graphs_and_captures_decoding_only() -> None:
    (chip,) = (chip for chip in plugin.flagcore_chips("") if chip.name == "BI-V150")
    loaded = LoadedPlugins.of({"iluvatar": plugin})
    assert loaded.environment(chip, "vllm")["VLLM_ENFORCE_CUDA_GRAPH"] == "1"
    rules = loaded.check_task(task_on(chip, "vllm")).rules
    refused = {value for each in rules if isinstance(each, RefusedValues) for value in each.values}
    assert {"PIECEWISE", "FULL", "FULL_AND_PIECEWISE"} <= refused
    assert not {"NONE", "FULL_DECODE_ONLY"} & refused


def test_tensor_parallel_overlap_is_a_knob_of_split_layers() -> None:
    knobs = {knob.name: knob for knob in plugin.flagcore_knobs(plugin.flagcore_chips("")[0], "megatron", None) or ()}
    overlap = knobs["iluvatar_tp_overlap"]
    assert [(each.knob, each.at_least) for each in overlap.requires] == [("tensor_model_parallel_size", 2)]
    assert overlap.effects[True].environment["ENABLE_TORCH_TP_OVERLAP"] == "1"
    assert knobs["iluvatar_zero_bubble"].effects["zb-h1"].flags == ("--enable-zbh1-pipeline",)


def test_uuids_are_listed_by_index() -> None:
    assert discover.uuids("0, GPU-1a2b\n1, GPU-3c4d\nN/A\n") == {0: "GPU-1a2b", 1: "GPU-3c4d"}


TABLE = saved_outputs(Path(__file__).parent / "smi")["ixsmi-5.txt"]


def test_a_name_without_the_vendor_is_unchanged() -> None:
    named = TABLE.replace("Iluvatar MR-V100 DUO", "BI-V100             ")
    assert {row.device.chip for row in discover.read(named).rows} == {"BI-V100"}


def test_a_device_whose_memory_is_an_error_is_left_out_and_reported() -> None:
    listing = discover.read(TABLE.replace("68MiB / 32768MiB     |", "ERR!                 |", 1))
    assert [row.device.index for row in listing.rows] == [1]
    assert ["00000000:35:00.0" in line for line in listing.left_out] == [True]
