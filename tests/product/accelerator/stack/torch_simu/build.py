"""Builds the C++ part of torch_simu: `python build.py FOLDER`. It takes a minute of one core."""

import fcntl
import os
import sys
from pathlib import Path

from torch.utils import cpp_extension

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "1")
    sources = sorted(str(path) for path in Path(__file__).parent.glob("*.cpp"))
    with (folder / "builds").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own lock, on which it waits for ever if a build was killed
        cpp_extension.load("torch_simu_c", sources, extra_cflags=["-O1"], build_directory=str(folder))
