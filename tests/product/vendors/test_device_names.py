"""Which chip a name of a driver means, over the catalogues of all vendors: the right one, or none."""

import importlib

import pytest

from flagcore.plugins import LoadedPlugins

VENDORS = ("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin", "cpu")


@pytest.fixture(scope="module")
def loaded() -> LoadedPlugins:
    return LoadedPlugins.of({name: importlib.import_module(f"flagcore_{name}.hooks").plugin for name in VENDORS})


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
    "P800": "P800 OAM|Kunlunxin P800|P800",
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
)
PAIRS = [(chip, name) for chip, names in NAMES.items() for name in names.split("|")]


@pytest.mark.parametrize(("chip", "name"), [*PAIRS, *((None, name) for name in OTHER_NAMES)])
def test_a_name_identifies_its_chip_or_none(loaded: LoadedPlugins, name: str, chip: str | None) -> None:
    found = loaded.find_chip(name)
    assert (found and found.name) == chip
    assert [each.name for each in loaded.chips() if each.has_name(name)] == ([chip] if chip else [])
