#!/bin/sh
# A layer of a hybrid model without the kernels of fla or mamba_ssm keeps 13 to 18 times the results of its products.
#
# Topic: Training memory
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: A slower layer, as its message says ("correct but much slower"), with about the memory of the kernels, which
#   keep the results of products, and states of chunks: one to two times those results.
# Seen: The reference implementations work in fp32 on copies of queries, keys and values for each head, and keep the
#   products of all positions of a chunk with each other. The gated delta net of Qwen3-Next keeps 183 KB for each token
#   of this small layer (width 1024), and Mamba-2 of Nemotron-H 258 KB.
# Hurts: Who fine-tunes Qwen3-Next, Qwen3.5 or Nemotron-H where the kernels do not build, as on other chips: 8192 tokens
#   of a layer of Qwen3-Next take 3 GB, and full checkpoints hold as much for one layer at a time.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0
#     gated delta net: 183 KB kept per token, results of its products 14.4 KB
#     Mamba-2: 258 KB kept per token, results of its products 14.4 KB
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes that a layer keeps for the backward pass, per token, and those of the results of its products."""
    from importlib.metadata import version

    import torch
    from transformers import NemotronHConfig, Qwen3NextConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    hidden, tokens = 1024, 1024
    of_delta = Qwen3NextConfig(
        hidden_size=hidden, linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128,
    )  # fmt: skip
    of_mamba = NemotronHConfig(
        hidden_size=hidden, mamba_num_heads=32, mamba_head_dim=64, ssm_state_size=128, n_groups=8
    )  # fmt: skip
    packages = ("transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    for name, layer in (
        ("gated delta net", Qwen3NextGatedDeltaNet(of_delta, 0)),
        ("Mamba-2", NemotronHMamba2Mixer(of_mamba, 0)),
    ):
        layer = layer.bfloat16()
        weights, kept = {each.untyped_storage().data_ptr() for each in layer.parameters()}, {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = tensor  # also keeps the storage, so that no other has its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True))
        size = sum(each.untyped_storage().nbytes() for each in kept.values()) / tokens
        products = 2 * sum(each.out_features for each in layer.modules() if isinstance(each, torch.nn.Linear))
        print(f"{name}: {size / 1e3:.0f} KB kept per token, results of its products {products / 1e3:.1f} KB")
        assert size > 8 * products


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
