#!/bin/sh
# torch's `async_save` copies all replicated weights to the host on each rank, of which a rank then writes its share.
#
# Topic: Checkpoints
# Package: torch 2.13.0
# Expected: A rank copies what it writes: four ranks of data parallelism with all weights write a quarter each.
# Seen: The copy is made first, and only then do the ranks agree on who writes what.
# Hurts: Who saves in the background from DDP: 8 ranks of a host copy weights and states of a model of 8 billion
#   weights 8 times: 770 GB at 12 bytes for each weight.
# Date: 2026-11-29
# Output:
#     torch 2.13.0
#     written by the ranks: 0.25 0.25 0.25 0.25
#     copied by the ranks: 1.00 1.00 1.00 1.00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import os
import tempfile


def total(value) -> int:
    """Return the bytes of all tensors in nested dictionaries."""
    return sum(map(total, value.values())) if isinstance(value, dict) else value.nbytes


def save(rank: int, folder: str, port: int) -> None:
    """Save a model of which each rank has all weights, and print what the ranks copied and wrote."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    class Stager(DefaultStager):
        """Notes the size of the copy that is written while the training goes on."""

        def stage(self, state_dict, **options):
            self.copy = super().stage(state_dict, **options)
            return self.copy

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    stager = Stager(StagingOptions(False, False, False, False))  # those of async_save
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder, async_stager=stager).result()
    copies = [0] * 4
    dist.all_gather_object(copies, total(stager.copy))
    if rank == 0:
        size = total(model.state_dict())
        files = [os.path.getsize(f"{folder}/__{each}_0.distcp") for each in range(4)]
        print("torch", torch.__version__.partition("+")[0])
        print("written by the ranks:", " ".join(f"{each / size:.2f}" for each in files))
        print("copied by the ranks:", " ".join(f"{each / size:.2f}" for each in copies))
        assert max(files) < 0.4 * size
        assert copies == [size] * 4
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(save, (folder, port), 4)
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
