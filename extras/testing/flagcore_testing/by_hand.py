"""Facts of a plugin that no check can confirm, because only the vendor knows them."""

from collections.abc import Iterator

from flagcore.domain.chip import Chip
from flagcore.vendorkit.detection import DeviceDetector
from flagcore_testing.checks.agreement import missing_variables
from flagcore_testing.kit import Subject

CHIPS = 3
"""Maximum number of chips that are listed."""
FIGURES = (
    ("link.bytes_per_second", "{:g} GB/s sent by one device in one direction", 1e9),
    ("memory_bandwidth_bytes_per_second", "{:g} GB/s of memory", 1e9),
    ("dense_flops_per_second.bf16", "{:g} TFLOP/s in bf16 without sparsity", 1e12),
    ("nic_bytes_per_second", "{:g} GB/s of network for each device", 1e9),
)
"""The key of each figure, its text, and the unit in which it is shown."""


def facts_by_hand(plugin: Subject) -> Iterator[str]:
    """Yield two lines for the detector, and one for each of the first chips."""
    detector = getattr(plugin.hooks, "detector", None)
    if isinstance(detector, DeviceDetector):
        variables = ", ".join(name for name in (detector.outer, *detector.visible) if name)
        yield f"PCI vendor {detector.pci_vendor:#06x} (lspci -nn), device files /{detector.device_file}"
        yield f"devices are selected by {variables}, and are torch.{detector.torch_device}"
        yield from missing_variables(plugin)
    for chip in plugin.chips[:CHIPS]:
        if facts := ", ".join(_facts(chip)):
            yield f"{chip.name}: {facts}"
    if len(plugin.chips) > CHIPS:
        yield f"the same of {len(plugin.chips) - CHIPS} more chips"


def _facts(chip: Chip) -> Iterator[str]:
    yield f"{chip.devices_per_node} devices per node"
    yield from (text.format(chip.figures[key].value / unit) for key, text, unit in FIGURES if key in chip.figures)
