"""FSDP2 on 16 ranks divides the experts of transformers 5 among 8 of them: half of the ranks hold no experts.

Topic: Training memory
Package: torch 2.13.0
Expected: A sixteenth of the experts on each rank, as FSDP1 with its flat parameters.
Seen: `fully_shard` divides the first dimension of a parameter. That of stacked experts is their number, 8. Ranks 0 to
  7 have an eighth of them each, with gradients and optimizer states, and ranks 8 to 15 have none. More ranks do not
  help.
Hurts: Who divides weights and states by the number of ranks for a model with few experts, such as Mixtral.
Date: 2026-11-28
Output:
    torch 2.13.0
    rank 0: (1, 64, 32) of (8, 64, 32)
    rank 7: (1, 64, 32) of (8, 64, 32)
    rank 8: (0, 64, 32) of (8, 64, 32)
    rank 15: (0, 64, 32) of (8, 64, 32)
"""

import os
import subprocess
import sys
import tempfile
import textwrap

PACKAGES = ["torch==2.13.0", "numpy==2.4.6"]


def look() -> None:
    """Print what four of 16 ranks hold of a parameter of stacked experts."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    print("torch", torch.__version__.split("+")[0])
    shapes = {}
    for rank in (0, 7, 8, 15):
        dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
        layer = torch.nn.Module()
        layer.experts = torch.nn.Parameter(torch.zeros(8, 64, 32))
        fully_shard(layer, mesh=init_device_mesh("cpu", (16,)))
        shapes[rank] = tuple(layer.experts.to_local().shape)
        print(f"rank {rank}: {shapes[rank]} of {tuple(layer.experts.shape)}")
        dist.destroy_process_group()
    assert shapes[0][0] == 1
    assert shapes[15][0] == 0


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
