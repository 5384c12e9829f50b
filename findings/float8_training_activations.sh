#!/bin/sh
# FP8 training with torchao saves no memory of activations: a layer keeps its input in bf16, and casts it again.
#
# Topic: Training memory
# Package: torchao 0.18.0, with torch 2.13.0
# Expected: Inputs of linear layers are kept in 8 bits for the backward pass, as Transformer Engine keeps them: half.
# Seen: With each recipe, the forward pass keeps exactly the tensors of bf16 training. The backward pass casts them again.
# Hurts: Who turns on float8 in torchtitan or accelerate to fit a longer sequence or a larger batch.
# Date: 2026-11-29
# Output:
#     torchao 0.18.0, torch 2.13.0
#     bf16: 294912 bytes
#     tensorwise: 294912 bytes
#     rowwise: 294912 bytes
#     rowwise_with_gw_hp: 294912 bytes
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes that the forward pass of a network keeps for the backward pass, without weights."""
    from dataclasses import replace
    from importlib.metadata import version

    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    packages = ("torchao", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    tokens = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    for recipe in (None, "tensorwise", "rowwise", "rowwise_with_gw_hp"):
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 1024, bias=False), torch.nn.SiLU(), torch.nn.Linear(1024, 256, bias=False)
        ).bfloat16()
        if recipe:
            # A processor has no FP8 products. They are emulated, and the tensors are the same.
            model = convert_to_float8_training(
                model, config=replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
            )
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, saved=saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens)
        kept.append(sum(tensor.nbytes for pointer, tensor in saved.items() if pointer not in weights))
        print(f"{recipe or 'bf16'}: {kept[-1]} bytes")
    assert len(set(kept)) == 1


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
