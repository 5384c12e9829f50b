"""Builds and loads the C++ part of torch_simu. The variable SIMU_BUILD names the folder of the built library."""

import os
from pathlib import Path
from types import ModuleType

from torch.utils import cpp_extension

SOURCES = sorted(str(path) for path in Path(__file__).parent.glob("*.cpp"))


def build(folder: Path) -> ModuleType:
    """Build the library in `folder`, unless it is current, and load it. It takes a minute of one core."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "1")
    return cpp_extension.load("torch_simu_c", SOURCES, extra_cflags=["-O1"], build_directory=str(folder))


def _load() -> ModuleType:
    folder = Path(os.environ["SIMU_BUILD"])
    if not (folder / "torch_simu_c.so").is_file():
        return build(folder)
    return cpp_extension._import_module_from_library("torch_simu_c", str(folder), is_python_module=True)


extension = _load()
