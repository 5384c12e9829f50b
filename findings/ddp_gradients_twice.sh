#!/bin/sh
# DDP in accelerate and Trainer keeps each gradient twice on each rank: in the weight's `.grad`, and in a bucket.
#
# Topic: Training memory
# Package: accelerate 1.15.0, with torch 2.13.0
# Expected: 16 bytes for each weight of fp32 training with Adam, also with several ranks: DDP only adds communication.
# Seen: Buckets are as large as all gradients and stay from the first backward pass on. `gradient_as_bucket_view` makes the
#   gradients views of them. It is off by default, and Trainer has no argument for it.
# Hurts: Who takes what fits on one device to several: Qwen3-1.7B with weights in fp32 needs 7 GB more on each rank.
# Date: 2026-11-30
# Output:
#     accelerate 1.15.0, torch 2.13.0
#     default: gradients and buckets take 2.00 times the weights
#     with gradient_as_bucket_view: gradients and buckets take 1.00 times the weights
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import os


def train(rank: int, port: int) -> None:
    """Print the storages of gradients and buckets after two steps, in those of the weights."""
    from importlib.metadata import version

    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    if rank == 0:
        packages = ("accelerate", "torch")
        print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    shares = []
    for handlers in ([], [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]):
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
        model = accelerator.prepare(model)
        buckets: dict[int, int] = {}

        def note(group, bucket, buckets: dict[int, int] = buckets):
            storage = bucket.buffer().untyped_storage()
            buckets[storage.data_ptr()] = storage.nbytes()
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, note)
        for _ in range(2):
            buckets.clear()  # they are built anew after the first step
            accelerator.backward(model(torch.ones(1, 512)).sum())
        storages = [weight.grad.untyped_storage() for weight in model.parameters()]
        held = {**buckets, **{each.data_ptr(): each.nbytes() for each in storages}}
        shares.append(sum(held.values()) / sum(weight.nbytes for weight in model.parameters()))
        if rank == 0:
            name = "with gradient_as_bucket_view" if handlers else "default"
            print(f"{name}: gradients and buckets take {shares[-1]:.2f} times the weights")
        accelerator.free_memory()
    assert shares[0] > 1.9
    assert shares[1] < 1.1
    accelerator.end_training()


if __name__ == "__main__":
    import socket

    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=2)
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
