"""Which devices are found without the tool; with it, the kit looks at the transcripts in `smi`."""

from flagcore_iluvatar.discover import DETECTOR

from flagcore.testing import WithoutTool


class TestIluvatar(WithoutTool):
    detector = DETECTOR
    device_file, pci_vendor = "dev/iluvatar0", 0x1E3E
    chip, memory_bytes = "Iluvatar BI-V150", 32 << 30
    version = "2.7.1+corex.4.4.0"
    kind, attributes = "cuda", ("corex",)
