#!/bin/sh
# FSDP2 gives half of 16 ranks 5.7 billion weights of Mixtral 8x7B each, and the other half 0.1 billion.
#
# Topic: Training memory
# Package: torch 2.13.0, with transformers 5.24.0
# Expected: A sixteenth of the model on each rank, 2.9 billion weights, as FSDP1 with its flat parameters.
# Seen: `fully_shard` divides the first dimension of a parameter. In transformers 5, that of the experts of a layer is
#   their number, 8. Ranks 0 to 7 have one expert of each layer, with gradients and optimizer states, and ranks 8 to 15
#   have none. More ranks do not help.
# Hurts: Who divides weights and states by the number of ranks for a model with fewer experts than ranks.
# Date: 2026-11-29
# Output:
#     torch 2.13.0, transformers 5.24.0
#     rank 0: (1, 4096, 14336) of (8, 4096, 14336), 5.74 of 46.70 billion weights
#     rank 7: (1, 4096, 14336) of (8, 4096, 14336), 5.74 of 46.70 billion weights
#     rank 8: (0, 4096, 14336) of (8, 4096, 14336), 0.10 of 46.70 billion weights
#     rank 15: (0, 4096, 14336) of (8, 4096, 14336), 0.10 of 46.70 billion weights
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print what four of 16 ranks hold of a projection of a layer's experts, and of all weights."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import MixtralConfig, MixtralForCausalLM

    print(f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
    held = {}
    for rank in (0, 7, 8, 15):
        dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
        with torch.device("meta"):
            model = MixtralForCausalLM(MixtralConfig(num_local_experts=8))
        mesh = init_device_mesh("cpu", (16,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        experts = model.model.layers[0].mlp.experts.down_proj
        held[rank] = sum(weights.to_local().numel() for weights in model.parameters())
        whole = sum(weights.numel() for weights in model.parameters())
        print(
            f"rank {rank}: {tuple(experts.to_local().shape)} of {tuple(experts.shape)}, "
            f"{held[rank] / 1e9:.2f} of {whole / 1e9:.2f} billion weights"
        )
        dist.destroy_process_group()
    assert held[0] == held[7] > 1.9 * whole / 16
    assert held[8] == held[15] < 0.05 * whole / 16


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
