#!/bin/sh
# With Muon, Megatron's buffers of weights and gradients grow with the ranks: 1.9 times Qwen3-8B on 64, 3.7 on 256.
#
# Topic: Training memory
# Package: megatron-core 0.19.2, with torch 2.13.0
# Expected: A buffer of the size of the weights on each rank, padded by less than a percent as with Adam.
# Seen: A shard of the layer-wise optimizer holds whole matrices, and all shards of a bucket are padded to the largest. A
#   bucket is full at 1,000,000 elements per rank, or at 0.9 times the ranks times its largest matrix. With few
#   layers, the last bucket is mostly padding.
# Hurts: Who adds ranks to save memory: 6 bytes per weight (bf16 weights, fp32 gradients) become 22 on 256 ranks.
# Date: 2026-11-29
# Output:
#     megatron-core 0.19.2, torch 2.13.0
#     8 ranks: Adam 1.000, Muon 1.072 times the weights
#     64 ranks: Adam 1.000, Muon 1.855 times the weights
#     256 ranks: Adam 1.000, Muon 3.710 times the weights
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 packaging==26.0 triton==3.7.1
# The wheel asks for Python 3.12. Its Python files run on 3.11 too.
"$folder/bin/python" -m pip install --quiet --no-compile --no-deps --only-binary=:all: --python-version=3.12 \
    --ignore-requires-python --target "$folder/megatron" megatron-core==0.19.2
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the size of the buffers of the layers of Qwen3-8B, in their weights, by the number of ranks."""
    from importlib.metadata import version

    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    hidden, inner, width = 4096, 12288, 128
    shapes = [((32 + 2 * 8) * width, hidden), (hidden, 32 * width), (2 * inner, hidden), (hidden, inner)]
    weights = [torch.nn.Parameter(torch.empty(shape, device="meta")) for _ in range(36) for shape in shapes]
    number = sum(map(torch.numel, weights))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    packages = ("megatron-core", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    sizes = []
    for ranks in (8, 64, 256):
        of_bucket = max(40_000_000, 1_000_000 * ranks)  # as DistributedDataParallel sets it
        layouts = [
            kind._compute_per_buffer_param_layout(weights, of_bucket, ranks, config)
            for kind in (DistributedOptimizer, LayerWiseDistributedOptimizer)
        ]
        sizes.append([layout.bucket_indices[-1][1] / number for layout in layouts])
        print(f"{ranks} ranks: Adam {sizes[-1][0]:.3f}, Muon {sizes[-1][1]:.3f} times the weights")
    assert all(adam < 1.01 for adam, _ in sizes)
    assert sizes[-1][1] > 3


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" PYTHONPATH="$folder/megatron" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
