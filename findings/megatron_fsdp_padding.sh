#!/bin/sh
# Megatron-FSDP pads the attention of gpt-oss by 33% on 64 ranks and by 78% on 256: its rows of 2880 and 4096 differ.
#
# Topic: Training memory
# Package: megatron-core 0.19.2, with torch 2.13.0
# Expected: A layer is padded to a multiple of the ranks, as in FSDP1, or at most by a row for each matrix.
# Seen: A bucket is padded to the ranks times the least common multiple of the rows of its matrices. Rows of 2880 and
#   4096 give 184,320 elements, those of Qwen2.5-3B's layer 88,064, and rows of 4096 and 12288 only 12,288.
# Hurts: Who divides weights, gradients and states by the ranks for models whose widths share few factors.
# Date: 2026-11-29
# Output:
#     megatron-core 0.19.2, torch 2.13.0
#     attention of gpt-oss: 1.00 on 8 ranks, 1.33 on 64, 1.78 on 256
#     layer of Qwen2.5-3B: 1.01 on 8 ranks, 1.02 on 64, 1.17 on 256
#     layer of Qwen3-8B: 1.00 on 8 ranks, 1.00 on 64, 1.01 on 256
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
    """Print the sizes of the buffers of a layer, in its weights."""
    from importlib.metadata import version

    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    strategy = "optim_grads_params"
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    policy = fsdp.BucketingPolicy(None, [torch.nn.Module], strategy)
    packages = ("megatron-core", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    sizes = {}
    for name, shapes in {
        "attention of gpt-oss": [(5120, 2880), (2880, 4096)],
        "layer of Qwen2.5-3B": [(2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)],
        "layer of Qwen3-8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
    }.items():
        layer = torch.nn.Module()
        for i, shape in enumerate(shapes):
            layer.register_parameter(str(i), torch.nn.Parameter(torch.empty(shape, device="meta")))
        (group,) = fsdp._get_parameter_groups(layer, policy, {})[0]
        sizes[name] = []
        for ranks in (8, 64, 256):
            bucket = fsdp.build_data_parallel_buffer_index(
                [p.shape for p in group.params], 0, ranks, True, config, chunk_size_factor=group.chunk_size_factor
            )[1]
            sizes[name].append(bucket.size / sum(p.numel() for p in group.params))
        print("{}: {:.2f} on 8 ranks, {:.2f} on 64, {:.2f} on 256".format(name, *sizes[name]))
    assert sizes["attention of gpt-oss"][2] > 1.7
    assert sizes["layer of Qwen3-8B"][2] < 1.02


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" PYTHONPATH="$folder/megatron" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
