"""Which chip a name of a driver means, over the catalogues of all vendors: the right one, or none."""

import importlib

import pytest

from flagcore.plugins import LoadedPlugins

VENDORS = ("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin", "cpu")


@pytest.fixture(scope="module")
def loaded() -> LoadedPlugins:
    return LoadedPlugins.of({name: importlib.import_module(f"flagcore_{name}.hooks").plugin for name in VENDORS})


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("nvidia h100  80gb hbm3", "H100-SXM"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM"),
        ("H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        *(("NVIDIA H20", "H20"), ("NVIDIA H200", "H200"), ("NVIDIA H200 NVL", "H200-NVL"), ("NVIDIA L4", "L4")),
        *(("NVIDIA B200", "B200"), ("NVIDIA GB200", "GB200"), ("NVIDIA B300", "B300"), ("NVIDIA GB300", "GB300")),
        *(("NVIDIA B300 SXM6 AC", "B300"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA L40", "L40")),
        *(("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"), ("NVIDIA H100 NVL", "H100-NVL"), ("NVIDIA L40S", "L40S")),
        *(("NVIDIA A10", "A10"), ("NVIDIA A30", "A30"), ("NVIDIA A40", "A40"), ("NVIDIA RTX A6000", "A6000")),
        *(("Tesla V100-SXM2-16GB", "V100-16GB"), ("Tesla V100-SXM2-32GB", "V100-32GB"), ("Tesla T4", "T4")),
        *(("NVIDIA GeForce RTX 3090", "RTX-3090"), ("NVIDIA GeForce RTX 5090", "RTX-5090")),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA H20-3e", "H20-3e"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("GeForce RTX 4090", "RTX-4090"),
        ("nvidia l40s", "L40S"),
        ("MetaX C500", "C500"),
        ("metax  c500", "C500"),
        ("MXC500", "C500"),
        ("MetaX MXC550", "C550"),
        ("MXC600-A", "C600-A"),
        ("Iluvatar BI-V150S", "BI-V150S"),
        ("BI-V150", "BI-V150"),
        ("Iluvatar BI-V100", "BI-V100"),
        ("Iluvatar MR-V100", "MR-V100"),
        ("Iluvatar MR-V100 DUO", "MR-V100-DUO"),
        ("Iluvatar MR-V50", "MR-V50"),
        ("MLU370-X8", "MLU370-X8"),
        ("Cambricon MLU370-X8", "MLU370-X8"),
        ("mlu370 x4", "MLU370-X4"),
        ("MLU590-M9", "MLU590-M9"),
        ("MLU590-M9DK", "MLU590-M9D"),
        ("Cambricon MLU580", "MLU580"),
        *(("AMD Instinct MI300X", "MI300X"), ("AMD Instinct MI300X OAM", "MI300X"), ("AMD Instinct MI308X", "MI308X")),
        *(("MI355X", "MI355X"), ("AMD Instinct MI250X", "MI250X"), ("AMD Instinct MI250X/MI250", "MI250")),
        *(("Ascend910B3", "910B3"), ("910B2C", "910B2"), ("910B4-1", "910B4-1"), ("Ascend910_9391", "910C")),
        *(("Ascend910", "910C"), ("MTT S5000", "MTT-S5000"), ("Moore Threads MTT S4000", "MTT-S4000")),
        *(("BW", "BW1000"), ("BW1000 64G", "BW1000"), ("BW200, UBB BW1000", "BW1000"), ("K100_AI", "K100-AI")),
        *(("P800 OAM", "P800"), ("Kunlunxin P800", "P800"), ("P800", "P800")),
    ],
)
def test_a_name_identifies_its_chip(loaded: LoadedPlugins, name: str, chip: str) -> None:
    found = loaded.find_chip(name)
    assert found is not None
    assert found.name == chip
    assert [each.name for each in loaded.chips() if each.has_name(name)] == [chip]


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA H100", "NVIDIA A100-SXM...", "NVIDIA A100", "NVIDIA H200 Z", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 4000 Ada Generation", "NVIDIA H800 PCIe", "NVIDIA B100"),
        *("NVIDIA A100-SXM-64GB", "GRID A100D-40C", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Tesla P100-SXM2..."),
        *("MetaX C550-PL", "MetaX C5000", "Mars X201", "MetaX", "NVIDIA C500", "MetaX C500 VF"),
        *("Iluvatar BI-V150X", "Iluvatar", "MetaX BI-V150", "BI", "MR-V200"),
        *("MLU590", "MLU370", "MLU270-S4", "MLU370-X9", "MLU590-M9X", "MLUXXX-XX", "", "ERR!", "AMD Instinct MI100"),
    ],
)
def test_a_name_outside_the_catalogue_identifies_no_chip(loaded: LoadedPlugins, name: str) -> None:
    assert loaded.find_chip(name) is None
    assert not [each.name for each in loaded.chips() if each.has_name(name)]
