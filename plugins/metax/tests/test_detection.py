"""Devices that the tool lists; the kit reads the transcripts in `smi`."""

from pathlib import Path

from flagcore_metax.discover import DETECTOR
from flagcore_testing import fakes


def test_uuids_are_queried_if_visible_devices_use_them() -> None:
    table = fakes.prints((Path(__file__).parent / "smi/mx-smi-1.txt").read_text("utf-8"))
    lines = "\n".join(f"GPU#{index}  MXC500  0000:2b:00.0  Available (UUID: GPU-{index}abc)" for index in range(8))
    script = f'if [ "$1" = -L ]; then\n{fakes.prints(lines)}\nelse\n{table}\nfi'
    with fakes.machine({"mx-smi": script}, CUDA_VISIBLE_DEVICES="GPU-5abc,GPU-1abc"):
        assert [device.index for device in DETECTOR.devices()] == [5, 1]
