#!/bin/sh
# When replicas synchronize, DiLoCo of torchft holds 28 bytes for each weight, though its backup is on the host.
#
# Topic: Training memory
# Package: torchft 0.2.0, with torch 2.13.0
# Expected: 16 bytes as without it, or 20 with the momentum of the outer optimizer: the documentation says that what the
#   algorithm needs beside them, a copy of the weights, is in the memory of the host.
# Seen: The last gradients of the step stay while pseudo-gradients are built beside them, and the weights are copied to be mixed
#   with the averaged ones, also if `fragment_update_alpha` is 0 and nothing is mixed. Two fragments halve both.
# Hurts: Who turns on torchtitan's `fault_tolerance.semi_sync_method=diloco` for a job that fits: 96 GB more in all on the ranks
#   of each replica for a model of 8 billion weights, and after one synchronization 32 GB.
# Date: 2026-12-01
# Output:
#     torchft 0.2.0, torch 2.13.0
#     before the first synchronization: 16 bytes for each weight
#     in a synchronization: 28 bytes; of two fragments: 24 bytes
#     after it: 20 bytes; of two fragments: 20 bytes
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torchft==0.2.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import os
import weakref
from importlib.metadata import version

import torch
from torch.distributed import TCPStore
from torch.utils._python_dispatch import TorchDispatchMode
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in ("torchft", "torch")))


class Held(TorchDispatchMode):
    """Adds up the bytes of the storages of results, and keeps the largest sum."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0
        self.host: set[int] = set()

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self.host:
            return
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key, None)
        self.most = max(self.most, sum(self.sizes.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(each, torch.Tensor):
                self.note(each)
        return result


def look(fragments: int) -> list[float]:
    """Return the bytes for each weight before, in, and after a synchronization, without the backup on the host."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id="replica",
        hostname="127.0.0.1",
        lighthouse_addr=lighthouse.address(),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    linear = [torch.nn.Linear(64, 64, bias=False) for _ in range(128)]
    parts = [torch.nn.Sequential(*linear[each::fragments]) for each in range(fragments)]
    model = torch.nn.Sequential(*parts)
    weights = sum(each.numel() for each in model.parameters())
    inner = torch.optim.AdamW(model.parameters(), foreach=False)
    outers = [torch.optim.SGD(each.parameters(), 0.7, momentum=0.9, nesterov=True, foreach=False) for each in parts]
    figures = []
    diloco = DiLoCo(manager, parts, inner, outers, sync_every=2 * fragments)
    held = Held()
    backup = [each for part in diloco._fragments for each in part.original_parameters.values()]
    held.host = {each.untyped_storage().data_ptr() for each in backup}
    with held, diloco:
        for each in model.parameters():
            held.note(each.detach())
        for step in range(4 * fragments + 1):
            inner.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            if step == 1:
                figures.append(sum(held.sizes.values()) / weights)
            held.most = 0
            inner.step()
            if step == 4 * fragments - 1:
                figures.append(held.most / weights)
        figures.append(sum(held.sizes.values()) / weights)
    manager.shutdown()
    lighthouse.shutdown()
    return figures


one, two = look(1), look(2)
print(f"before the first synchronization: {one[0]:.0f} bytes for each weight")
print(f"in a synchronization: {one[1]:.0f} bytes; of two fragments: {two[1]:.0f} bytes")
print(f"after it: {one[2]:.0f} bytes; of two fragments: {two[2]:.0f} bytes")
assert one[0] < 17 < 27 < one[1]
assert one[2] < 21
END
HOME="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen" 2> "$folder/log" || { cat "$folder/log" >&2; exit 1; }
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
