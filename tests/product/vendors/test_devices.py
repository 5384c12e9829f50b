"""What is reported of each vendor's devices: the chip of a name, processes, UUIDs and links."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from flagcore_cambricon.hooks import plugin as cambricon
from flagcore_cambricon.hooks import x8_topology
from flagcore_nvidia.hooks import plugin as nvidia
from flagcore_testing import fakes
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import with_own_adapters

from flagcore import api
from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup
from flagcore.physics.collective_costs import topology_of
from flagcore.plugins import LoadedPlugins
from tests.product.tasks import VENDORS
from tests.product.vendors.test_simulated_nodes import CAMBRICON, ILUVATAR, METAX

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
    for vendor in VENDORS:
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
    [("mx-smi", METAX + PROCESSES), ("ixsmi", ILUVATAR + PROCESSES), ("cnmon", CAMBRICON + MLU_PROCESSES)],
)
def test_processes_below_the_table_are_reported(tool: str, printed: str) -> None:
    devices = found({tool: fakes.prints(printed)})
    assert [each["use"] for each in devices] == [
        None,
        "4711 python3 -m vllm (20.5 GiB); 4712 ray::IDLE (0.0 GiB)",
        None,
        None,
    ]


@pytest.mark.parametrize(("tool", "printed"), [("ixsmi", ILUVATAR + PROCESSES), ("cnmon", CAMBRICON + MLU_PROCESSES)])
def test_an_exclusive_device_with_a_process_is_blocked(tool: str, printed: str) -> None:
    devices = found({tool: fakes.prints(printed.replace("Default", "Exclusive"))})
    assert ["compute mode" in (each["use"] or "") for each in devices] == [False, True, False, False]


def test_a_full_mesh_of_ht_links_is_one_island() -> None:
    plugin = import_module("flagcore_metax.hooks").plugin
    (chip,) = (chip for chip in plugin.flagcore_chips("") if chip.name == "C500")
    with fakes.machine({"ht-smi": fakes.prints(HT_MESH)}):
        topology = plugin.flagcore_topology(NodeGroup(chip=chip, nodes=1, devices_per_node=8))
    assert [level.devices for level in topology.levels] == [8]


def test_the_plugin_of_an_uncatalogued_chip_is_named() -> None:
    (device, *_) = found({"mx-smi": fakes.prints(METAX.replace("MetaX C500", "MetaX C999"))})
    assert (device["chip"], device["plugin"]) == (None, "metax")


H200 = saved_outputs(Path(__file__).parents[3] / "plugins/nvidia/tests/smi")["nvidia-smi-5.txt"]


def chip(plugin: Any, name: str) -> Chip:
    return next(each for each in plugin.flagcore_chips("") if each.name == name)


def adapters(root: Path, gigabits: float) -> Path:
    for number in range(8):
        folder = root / f"sys/class/infiniband/mlx5_{number}/ports/1"
        folder.mkdir(parents=True)
        (folder / "rate").write_text(f"{gigabits:g} Gb/sec (2X NDR)\n")
    return root


@pytest.fixture
def two_nodes() -> NodeGroup:
    return NodeGroup(chip=chip(nvidia, "H200"), nodes=2, devices_per_node=8)


def test_a_machines_own_adapters_are_the_network_of_its_cluster(tmp_path: Path, two_nodes: NodeGroup) -> None:
    own = with_own_adapters(two_nodes, H200, adapters(tmp_path, 200))
    assert own is not None
    assert topology_of(own).levels[-1].bytes_per_second == 25e9
    assert topology_of(two_nodes).levels[-1].bytes_per_second == 50e9


@pytest.mark.parametrize(("nodes", "devices", "rate"), [(1, 8, None), (2, 4, None), (2, 8, 1e9)])
def test_other_nodes_and_a_rate_of_the_user_keep_the_chips_figure(
    nodes: int, devices: int, rate: float | None, tmp_path: Path, two_nodes: NodeGroup
) -> None:
    other = NodeGroup(chip=with_network(two_nodes.chip, rate), nodes=nodes, devices_per_node=devices)
    assert with_own_adapters(other, H200, adapters(tmp_path, 200)) is None


def test_adapters_without_a_known_rate_are_no_network(tmp_path: Path, two_nodes: NodeGroup) -> None:
    assert with_own_adapters(two_nodes, H200, tmp_path) is None
    assert with_own_adapters(two_nodes, None, tmp_path) is None


def test_bridge_groups_of_mlus_are_those_that_cnmon_shows() -> None:
    group = NodeGroup(chip=chip(cambricon, "MLU370-X8"), nodes=1, devices_per_node=16)
    names = [f"MLU{n}" for n in range(16)]
    rows = [
        [name, *("X" if a == b else "MLK" if a // 4 == b // 4 else "CPU" for b in range(16)), "0-31"]
        for a, name in enumerate(names)
    ]
    matrix = "\n".join("  ".join(row) for row in [["", *names, "CPU Affinity"], *rows])
    default, shown = x8_topology(group), x8_topology(group, matrix)
    assert default is not None
    assert shown is not None
    assert [level.devices for level in default.levels] == [8, 16]
    assert [level.devices for level in shown.levels] == [4, 16]


@pytest.fixture(scope="module")
def loaded() -> LoadedPlugins:
    return LoadedPlugins.of({name: import_module(f"flagcore_{name}.hooks").plugin for name in (*VENDORS, "cpu")})


# fmt: off
NAMES = {
    "H100-SXM": "NVIDIA H100 80GB HBM3|nvidia h100  80gb hbm3|NVIDIA-H100-80GB-HBM3|H100 80GB HBM3",
    "H100-PCIe": "NVIDIA H100 PCIe", "A800-80GB": "NVIDIA A800-SXM4-80GB", "A100-40GB": "NVIDIA A100-SXM4-40GB",
    "A100-80GB": "A100-SXM4-80GB|NVIDIA A100-SXM4-80GB", "A100-40GB-PCIe": "NVIDIA A100-PCIE-40GB",
    "H20": "NVIDIA H20", "H200": "NVIDIA H200", "H200-NVL": "NVIDIA H200 NVL", "L4": "NVIDIA L4",
    "B200": "NVIDIA B200", "GB200": "NVIDIA GB200", "B300": "NVIDIA B300|NVIDIA B300 SXM6 AC",
    "GB300": "NVIDIA GB300", "L40": "NVIDIA L40", "A100-80GB-PCIe": "NVIDIA A100 80GB PCIe",
    "H100-NVL": "NVIDIA H100 NVL", "L40S": "NVIDIA L40S|nvidia l40s", "A10": "NVIDIA A10", "A30": "NVIDIA A30",
    "A40": "NVIDIA A40", "A6000": "NVIDIA RTX A6000", "V100-16GB": "Tesla V100-SXM2-16GB",
    "V100-32GB": "Tesla V100-SXM2-32GB", "T4": "Tesla T4", "RTX-3090": "NVIDIA GeForce RTX 3090",
    "RTX-5090": "NVIDIA GeForce RTX 5090", "RTX-PRO-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "H20-3e": "NVIDIA H20-3e", "RTX-4090": "NVIDIA GeForce RTX 4090|GeForce RTX 4090",
    "C500": "MetaX C500|metax  c500|MXC500", "C550": "MetaX MXC550", "C600-A": "MXC600-A",
    "BI-V150S": "Iluvatar BI-V150S", "BI-V150": "BI-V150", "BI-V100": "Iluvatar BI-V100",
    "MR-V100": "Iluvatar MR-V100", "MR-V100-DUO": "Iluvatar MR-V100 DUO", "MR-V50": "Iluvatar MR-V50",
    "MLU370-X8": "MLU370-X8|Cambricon MLU370-X8", "MLU370-X4": "mlu370 x4", "MLU590-M9": "MLU590-M9",
    "MLU590-M9D": "MLU590-M9DK", "MLU580": "Cambricon MLU580",
    "MI300X": "AMD Instinct MI300X|AMD Instinct MI300X OAM", "MI308X": "AMD Instinct MI308X", "MI355X": "MI355X",
    "MI250X": "AMD Instinct MI250X", "MI250": "AMD Instinct MI250X/MI250", "910B3": "Ascend910B3", "910B2": "910B2C",
    "910B4-1": "910B4-1", "910C": "Ascend910_9391|Ascend910", "MTT-S5000": "MTT S5000",
    "MTT-S4000": "Moore Threads MTT S4000", "BW1000": "BW|BW1000 64G|BW200, UBB BW1000", "K100-AI": "K100_AI",
    "P800": "P800 OAM|Kunlunxin P800|P800", "S60": "Enflame S60|S60", "PPU-ZW810E": "PPU-ZW810E",
    "ZW-M890P": "ZW-M890P", "950PR": "Ascend950PR|Ascend950PR_9589", "Atlas-350": "Ascend950PR_957b",
    "950DT": "Ascend950DT", "MI455X": "AMD Instinct MI455X", "GB10": "NVIDIA GB10", "C600": "MetaX C600",
}
# fmt: on
"""The names that drivers report of each chip, separated by bars."""


OTHER_NAMES = (
    *("NVIDIA H100", "NVIDIA A100-SXM...", "NVIDIA A100", "NVIDIA H200 Z", "NVIDIA GeForce RTX 4090 D"),
    *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 4000 Ada Generation", "NVIDIA H800 PCIe", "NVIDIA B100"),
    *("NVIDIA A100-SXM-64GB", "GRID A100D-40C", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Tesla P100-SXM2..."),
    *("MetaX C550-PL", "MetaX C5000", "Mars X201", "MetaX", "NVIDIA C500", "MetaX C500 VF"),
    *("Iluvatar BI-V150X", "Iluvatar", "MetaX BI-V150", "BI", "MR-V200"),
    *("MLU590", "MLU370", "MLU270-S4", "MLU370-X9", "MLU590-M9X", "MLUXXX-XX", "", "ERR!", "AMD Instinct MI100"),
    *("S60G", "Enflame L300", "PPU-ZW610E", "PPU"),
)
PAIRS = [(chip, name) for chip, names in NAMES.items() for name in names.split("|")]


@pytest.mark.parametrize(("chip", "name"), [*PAIRS, *((None, name) for name in OTHER_NAMES)])
def test_a_name_identifies_its_chip_or_none(loaded: LoadedPlugins, name: str, chip: str | None) -> None:
    found = loaded.find_chip(name)
    assert (found and found.name) == chip
    assert [each.name for each in loaded.chips() if each.has_name(name)] == ([chip] if chip else [])
