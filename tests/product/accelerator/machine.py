"""A machine with simulated accelerators of a made-up vendor, on which the trial program takes the path of a device.

`stack/` is the vendor's software: `torch_simu` registers the device `simu` with torch, as torch_musa and torch_npu do
(PrivateUse1), and `simu_patch` redirects Megatron's calls of torch.cuda, as musa_patch does. `plugin.txt` has what the
vendor changes in the files of `flag plugins new`, and `simu_smi.py` is the management tool.

What it shows: flagcore's calls of a device's torch module, the import and the order of the vendor's modules, the
collective backend by its name, memory that torch's allocator counts (which equals the prediction) and that runs out,
devices that variables restrict, a driver that does not survive a fork, and the processes that the tool lists. All
operators run, with the results of the CPU.

What it cannot show: speed (a device is a core of the host, and calls return when their kernel has ended, so nothing
overlaps), the vendor's kernels and their precision, fragmentation, the memory of communicators, and what a vendor's
patch of Megatron leaves out or changes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing.package import joined_texts

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "torch_simu"
"""The folder of the built library, which later sessions use again."""
TORCH = "2.13."
DEVICES, MEMORY_BYTES = 4, 2 << 30
SCAFFOLD = (
    *("simu", "--vendor", "Simu", "--chip", "S1", "--tool", "simu-smi", "--visible", "SIMU_VISIBLE_DEVICES"),
    *("--torch-device", "simu", "--backend", "simuccl", "--preload", "torch_simu"),
)


def build() -> None:
    """Build the vendor's extension of torch, unless it is current. Without a compiler, the tests that need it are
    skipped. With a release of torch that it is not written for, they fail."""
    for tool in ("c++", "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"building the simulated device needs {tool}")
    if not version("torch").startswith(TORCH):
        pytest.fail(f"the simulated device is written for torch {TORCH}, not {version('torch')}", pytrace=False)
    subprocess.run([sys.executable, str(HERE / "stack" / "torch_simu" / "build.py"), str(BUILD)], check=True)


class Machine:
    """A machine with simulated devices, its variables, and the vendor's software and plugin installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        site, programs, self.driver = folder / "site", folder / "bin", folder / "driver"
        for path in (site, programs, self.driver):
            path.mkdir()
        self.set_memory(MEMORY_BYTES)
        tool = programs / "simu-smi"
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{HERE / "simu_smi.py"}" "$@"\n')
        tool.chmod(0o755)
        path = (site, HERE / "stack", HERE / "site", *os.environ["PYTHONPATH"].split(os.pathsep))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GEMS_", "CUDA_"))},
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "FLAGCORE_HOME": str(folder / "home"),
            "SIMU_DRIVER": str(self.driver),
            "SIMU_BUILD": str(BUILD),
            "OMP_NUM_THREADS": "1",
        }
        self.plugin = self._write_plugin(site)

    def set_memory(self, size: int) -> None:
        """Set the bytes of memory of each device."""
        machine = {"count": DEVICES, "name": "Simu S1", "memory_bytes": size}
        (self.driver / "devices.json").write_text(json.dumps(machine))

    def _write_plugin(self, site: Path) -> Path:
        """Write the vendor's plugin as the tutorial does, and install it. Return its folder."""
        self.flag("plugins", "new", *SCAFFOLD)
        project = self.folder / "flagcore-simu"
        changes = joined_texts((HERE / "plugin.txt").read_text())
        for name, text in {**changes, "tests/smi/simu-smi-1.txt": self.run("simu-smi").stdout}.items():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text(text)
        (site / "flagcore_simu").symlink_to(project / "flagcore_simu")
        info = site / "flagcore_simu-0.1.0.dist-info"
        info.mkdir()
        text = (project / "pyproject.toml").read_text()
        points = re.search(r'entry-points."flagcore.plugins"\]\n(\w+) = "(\S+)"', text)
        assert points, text
        metadata = "Metadata-Version: 2.1\nName: flagcore-simu\nVersion: 0.1.0\nRequires-Dist: flagcore>=0.1,<0.2\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[flagcore.plugins]\n{points[1]} = {points[2]}\n")
        return project

    def run(
        self, *argv: str, status: int = 0, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine."""
        pipes: Any = {"input": stdin, "capture_output": True, "text": True, "check": False, "timeout": 280}
        try:
            done = subprocess.run(argv, env={**self.environment, **variables}, cwd=self.folder, **pipes)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{error.stdout!r:.3000}\n{error.stderr!r:.6000}") from None
        assert done.returncode == status, f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done

    def flag(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `flag` on the machine."""
        return self.run(sys.executable, "-c", "from flagcore.cli import main; main()", *arguments, **options)
