"""What `flag devices` reports of each vendor's devices beyond their chips: their UUIDs and processes."""

from importlib import import_module
from typing import Any

import pytest
from flagcore_testing import fakes

from flagcore import api
from flagcore.domain.cluster import NodeGroup
from tests.vendors.test_simulated_nodes import CAMBRICON, ILUVATAR, METAX

PROCESSES = """\
+-----------------------------------------------------------------------------+
| Process:                                                         GPU Memory |
|  GPU        PID      Process name                                Usage(MiB) |
|  1         4711      python3 -m vllm                             20992      |
|  1         4712      ray::IDLE                                   12         |
+-----------------------------------------------------------------------------+
"""
MLU_PROCESSES = """\
| Processes:                                                                  |
|  Card  VF  PID    Command Line                             MLU Memory Usage |
|  1     /   4711   python3 -m vllm                                 20992 MiB |
|  1     /   4712   ray::IDLE                                          12 MiB |
"""
NVIDIA_GPUS = """\
0, NVIDIA H100 80GB HBM3, 81559, 570.1, GPU-aaaa, 0x233010DE, Disabled, 4, 70, 700, 31, 0, 345
1, NVIDIA H100 80GB HBM3, 81559, 570.1, GPU-bbbb, 0x233010DE, Disabled, 20992, 90, 700, 31, 0, 345
"""
NVIDIA = """
case "$1$2" in
  --query-gpu=index,name*memory.used*) printf '%s' '{gpus}' ;;
  --query-gpu=index,name*) printf '%s' '{gpus}' | cut -d, -f1-7 ;;
  --query-gpu=*)
    echo 0, GPU-aaaa, Default, Disabled, Enabled
    echo 1, GPU-bbbb, Exclusive_Process, Disabled, Disabled ;;
  --query-compute-apps=*) echo GPU-bbbb, 4711, /usr/bin/python3, 20992 ;;
  topo-m) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n' ;;
esac
"""
HT_MESH = "\n".join(
    ["     " + " ".join(f"GPU{n}" for n in range(8))]
    + [f"GPU{a} " + " ".join("X" if a == b else "HT" for b in range(8)) for a in range(8)]
)


@pytest.fixture(autouse=True)
def clear_caches() -> None:
    """Forget the answers of earlier tests' tools, which plugins keep for a while."""
    for vendor in ("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin"):
        import_module(f"flagcore_{vendor}.hooks").plugin.__dict__.pop("_readings", None)


def found(tools: dict[str, str]) -> list[dict[str, Any]]:
    with fakes.machine(tools):
        return [each for each in api.devices() if each["plugin"] != "cpu"]


def test_use_mode_and_pending_changes_of_nvidia_gpus_are_reported() -> None:
    idle, busy = found({"nvidia-smi": NVIDIA.format(gpus=NVIDIA_GPUS)})
    assert idle["uuid"] == "GPU-aaaa"
    assert "MIG" in idle["use"]
    assert busy["in_use_gib"] == pytest.approx(20.5)
    assert busy["use"].startswith("4711 python3 (20.5 GiB); is in compute mode Exclusive_Process")


@pytest.mark.parametrize(
    ("tool", "printed"),
    [
        ("mx-smi", METAX + PROCESSES),
        ("ixsmi", ILUVATAR + PROCESSES),
        ("cnmon", CAMBRICON + MLU_PROCESSES),
    ],
)
def test_processes_below_the_table_are_reported(tool: str, printed: str) -> None:
    devices = found({tool: fakes.prints(printed)})
    assert [each["use"] for each in devices] == [
        None,
        "4711 python3 -m vllm (20.5 GiB); 4712 ray::IDLE (0.0 GiB)",
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("tool", "printed"),
    [("ixsmi", ILUVATAR + PROCESSES), ("cnmon", CAMBRICON + MLU_PROCESSES)],
)
def test_an_exclusive_device_with_a_process_is_blocked(tool: str, printed: str) -> None:
    devices = found({tool: fakes.prints(printed.replace("Default", "Exclusive"))})
    assert ["compute mode" in (each["use"] or "") for each in devices] == [False, True, False, False]


def test_a_full_mesh_of_ht_links_is_one_island() -> None:
    plugin = import_module("flagcore_metax.hooks").plugin
    (chip,) = (chip for chip in plugin.flagcore_chips() if chip.name == "C500")
    with fakes.machine({"ht-smi": fakes.prints(HT_MESH)}):
        topology = plugin.flagcore_topology(NodeGroup(chip=chip, nodes=1, devices_per_node=8))
    assert [level.devices for level in topology.levels] == [8]


def test_the_plugin_of_an_uncatalogued_chip_is_named() -> None:
    (device, *_) = found({"mx-smi": fakes.prints(METAX.replace("MetaX C500", "MetaX C999"))})
    assert (device["chip"], device["plugin"]) == (None, "metax")
