#!/bin/sh
# HRA with the rank 8 keeps 55 bytes for each weight of the model, LoHa and FourierFT 4: PEFT builds whole matrices.
#
# Topic: Adapters
# Package: peft 0.21.2, with transformers 5.24.0
# Expected: As with LoRA, what grows with the tokens: the adapter's own weights are as few.
# Seen: LoHa, LoKr and FourierFT compute the change of a layer's weights as a whole matrix, and it is kept for the
#   backward pass on any number of tokens. HRA multiplies reflections of the width by each other, and keeps them all.
#   MiSS and C3A keep none. The shapes are an eighth of Qwen3-8B's. Checkpoints of activations bring it down to the
#   matrices of one layer.
# Hurts: Who turns from LoRA to another method with as few weights: HRA of the rank 8 keeps 380 GB for Qwen3-8B.
# Date: 2026-11-29
# Output:
#     peft 0.21.2, transformers 5.24.0, torch 2.13.0, accelerate 1.15.0
#     LoRA, rank 8: 0.0 bytes for each weight
#     MiSS, rank 8: 0.0 bytes for each weight
#     C3A: 0.0 bytes for each weight
#     LoHa, rank 8: 3.7 bytes for each weight
#     LoKr, rank 8: 3.7 bytes for each weight
#     FourierFT: 3.7 bytes for each weight
#     HRA, rank 2: 23.4 bytes for each weight
#     HRA, rank 8: 54.8 bytes for each weight
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print what each adapter keeps for the backward pass for each weight of the linear layers, on any input."""
    import weakref
    from importlib.metadata import version

    import peft
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from transformers import Qwen3Config, Qwen3ForCausalLM

    class Kept:
        """Has a tensor that the backward pass needs."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def kept_bytes(model: torch.nn.Module, tokens: int) -> int:
        alive: weakref.WeakSet[Kept] = weakref.WeakSet()

        def keep(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            alive.add(kept)
            return kept

        inputs = torch.zeros(1, tokens, dtype=torch.long)
        with saved_tensors_hooks(keep, lambda kept: kept.tensor):
            result = model(input_ids=inputs, labels=inputs)
        storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage().nbytes() for kept in alive}
        del result
        own = {weights.untyped_storage().data_ptr() for weights in model.parameters()}
        return sum(size for at, size in storages.items() if at not in own)

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = Qwen3Config(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    packages = ("peft", "transformers", "torch", "accelerate")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    seen = {}
    for name, adapter in {
        "LoRA, rank 8": peft.LoraConfig(r=8, target_modules=layers),
        "MiSS, rank 8": peft.MissConfig(r=8, target_modules=layers),
        "C3A": peft.C3AConfig(block_size=32, target_modules=layers),
        "LoHa, rank 8": peft.LoHaConfig(r=8, target_modules=layers),
        "LoKr, rank 8": peft.LoKrConfig(r=8, target_modules=layers),
        "FourierFT": peft.FourierFTConfig(n_frequency=100, target_modules=layers),
        "HRA, rank 2": peft.HRAConfig(r=2, target_modules=layers),
        "HRA, rank 8": peft.HRAConfig(r=8, target_modules=layers),
    }.items():
        model = Qwen3ForCausalLM(config).bfloat16()
        linear = sum(w.numel() for part in model.model.layers.modules() for w in part.parameters(False) if w.dim() > 1)
        model = peft.get_peft_model(model, adapter)
        few, many = (kept_bytes(model, tokens) for tokens in (64, 128))
        seen[name] = (2 * few - many) / linear
        print(f"{name}: {seen[name]:.1f} bytes for each weight")
    assert seen["LoRA, rank 8"] < 0.1
    assert seen["LoHa, rank 8"] > 3
    assert seen["HRA, rank 8"] > 40


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
