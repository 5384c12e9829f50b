#!/bin/sh
# If FSDP2 shards a square matrix, torch's Muon gathers it 15 times in each step; both passes gather it twice.
#
# Topic: Training
# Package: torch 2.13.0
# Expected: One gather of the momentum, from which each rank computes its rows of the update, or its share of the matrices.
# Seen: Each product of the five Newton-Schulz iterations is one of sharded tensors, which gathers its right-hand matrix, three
#   in each iteration. For matrices with more rows than columns, it adds up partial products instead, two in each.
# Hurts: Who replaces AdamW by Muon with `fully_shard`, on several hosts above all: for the 2.4 GB of Qwen3-8B's query and
#   output projections in bf16, a rank receives 36 GB in each update.
# Date: 2026-12-01
# Output:
#     torch 2.13.0
#     AdamW, 512 x 512: 0 gathers, 0 reductions
#     Muon, 512 x 512: 15 gathers of the whole matrix in bf16, 0 reductions
#     Muon, 2048 x 512: 0 gathers, 10 reductions of a quarter of the matrix in bf16
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
from importlib.metadata import version

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

print("torch", version("torch").partition("+")[0])
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
mesh = torch.distributed.init_device_mesh("cpu", (8,))
packets = torch.ops._c10d_functional


class Sent(TorchDispatchMode):
    """Notes the collectives of local tensors that are more than a number, with their bytes."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (packets.all_gather_into_tensor, packets.all_reduce) and result.numel() > 1:
            name = "gather" if function.overloadpacket is packets.all_gather_into_tensor else "reduction"
            self.seen.append((name, result.nbytes))
        return result


def look(optimizer: type[torch.optim.Optimizer], rows: int, columns: int) -> list[tuple[str, float]]:
    """Print the collectives of one step with a matrix, and return them with their bytes for each of its weights."""
    layer = torch.nn.Linear(columns, rows, bias=False)
    fully_shard(layer, mesh=mesh)
    updates = optimizer(layer.parameters(), lr=0.02)
    layer(torch.ones(1, columns)).sum().backward()
    with Sent() as sent:
        updates.step()
    found = [(name, size / (rows * columns)) for name, size in sent.seen]
    parts = []
    for name in ("gather", "reduction"):
        sizes = {size for each, size in found if each == name}
        text = {(2.0,): " of the whole matrix in bf16", (0.5,): " of a quarter of the matrix in bf16"}
        parts.append(f"{len([each for each, _ in found if each == name])} {name}s{text.get(tuple(sizes), '')}")
    print(f"{optimizer.__name__}, {rows} x {columns}: {', '.join(parts)}")
    return found


assert look(torch.optim.AdamW, 512, 512) == []
assert look(torch.optim.Muon, 512, 512) == [("gather", 2.0)] * 15
assert look(torch.optim.Muon, 2048, 512) == [("reduction", 0.5)] * 10
torch.distributed.destroy_process_group()
END
HOME="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
