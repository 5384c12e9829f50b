#!/bin/sh
# Autocast keeps a bf16 copy of all weights at the end of the forward pass, also with checkpoints of all layers.
#
# Topic: Training memory
# Package: torch 2.13.0
# Expected: With checkpoints, one layer's copies at a time: what a layer computes is dropped, and computed again.
# Seen: Autocast caches its casts of weights that are trained until it ends, which is after the loss, as Trainer and
#   accelerate run it. Without checkpoints, autograd keeps them until the layer's backward pass.
# Hurts: Who trains fp32 weights with `bf16=True` on one device or with DDP: 2 bytes for each weight beside the logits,
#   8 GB for a model of 4 billion weights, which counts of 16 bytes for each weight leave out.
# Date: 2026-11-30
# Output:
#     torch 2.13.0
#     without checkpoints: 2.0 bytes for each weight in autocast, 2.0 after it
#     with checkpoints: 2.0 bytes for each weight in autocast, 0.0 after it
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes that a forward pass of 8 layers on one token has allocated, for each weight."""
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    class Allocated(TorchDispatchMode):
        """Counts the bytes of storages that operators return and that are still in use."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            for each in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    if storage._cdata not in self.sizes:
                        self.sizes[storage._cdata] = storage.nbytes()
                        weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
            return result

    print("torch", torch.__version__.partition("+")[0])
    found = []
    for uses_checkpoints in (False, True):
        layers = torch.nn.ModuleList([torch.nn.Linear(512, 512, bias=False) for _ in range(8)])
        weights = sum(each.numel() for each in layers.parameters())
        values = torch.randn(1, 512, requires_grad=True)
        with Allocated() as allocated:
            with torch.autocast("cpu", torch.bfloat16):
                for layer in layers:
                    values = checkpoint(layer, values, use_reentrant=False) if uses_checkpoints else layer(values)
                inside = sum(allocated.sizes.values()) / weights
            after = sum(allocated.sizes.values()) / weights
        name = "with checkpoints" if uses_checkpoints else "without checkpoints"
        print(f"{name}: {inside:.1f} bytes for each weight in autocast, {after:.1f} after it")
        found.append((round(inside, 1), round(after, 1)))
    assert found == [(2.0, 2.0), (2.0, 0.0)]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
