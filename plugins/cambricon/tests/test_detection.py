"""Which devices are found without the tool; with it, the kit looks at the transcripts in `smi`."""

from flagcore_cambricon.discover import DETECTOR

from flagcore.testing import WithoutTool


class TestCambricon(WithoutTool):
    detector = DETECTOR
    device_file, pci_vendor = "dev/cambricon_dev0", 0xCABC
    chip, memory_bytes = "MLU590-M9", 96 << 30
    version = "2.7.1+cpu"
    kind, attributes = "mlu", ("mlu",)
