"""`find_executable_batch_size` multiplies the batch size by 0.9: from 64 it settles on 28, after seven failures.

Topic: Tuners
Package: accelerate 1.15.0
Expected: Half of the batch size after each failure: 64, 32, 16.
Seen: It tries 57, 51, 45, 40, 36, 32 and 28. Sizes are odd and divide no global batch, and each failure compiles and
  allocates again. `Trainer` uses it for `auto_find_batch_size`.
Hurts: Who compares runs by steps: the global batch, the number of steps and the learning rate per sample change.
Date: 2026-11-28
Output:
    accelerate 1.15.0
    tried, where 30 samples fit: [64, 57, 51, 45, 40, 36, 32, 28]
"""

import os
import subprocess
import sys
import tempfile
import textwrap

PACKAGES = ["accelerate==1.15.0", "torch==2.13.0"]


def look() -> None:
    """Print the batch sizes that the search tries, where 30 samples fit."""
    import accelerate
    from accelerate.utils import find_executable_batch_size

    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 30:
            raise RuntimeError("CUDA out of memory.")

    train()
    print("accelerate", accelerate.__version__)
    print("tried, where 30 samples fit:", tried)
    assert len(tried) == 8


def main() -> None:
    """Install the packages in a temporary folder, look, and compare with the output in the docstring."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        seen = subprocess.run(
            [python, __file__, "look"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": folder},
        ).stdout
    print(seen, end="")
    assert seen == textwrap.dedent(__doc__.split("Output:\n")[1]), "the output changed"


if __name__ == "__main__":
    look() if sys.argv[1:] else main()
