#!/bin/sh
# LoRA on the experts of transformers 5 keeps a second copy of all experts until the backward pass.
#
# Topic: Adapters
# Package: peft 0.21.2, with transformers 5.24.0
# Expected: Activations of the adapters only: the tokens times the rank, as beside a linear layer.
# Seen: The experts of a layer are one parameter. PEFT adds the product of the adapter's matrices to this parameter, for
#   all experts, in each forward pass, and autograd keeps the sums of all layers. Without activation checkpoints, a
#   fine-tune of a mixture of experts needs its experts twice.
# Hurts: Who plans LoRA on `all-linear` for a mixture of experts from the size of the adapters.
# Date: 2026-11-28
# Output:
#     peft 0.21.2, transformers 5.24.0, torch 2.13.0
#     experts: 1572864 bytes
#     kept for the backward pass, adapters on attention: 0 bytes of the size of experts
#     kept for the backward pass, adapters on all layers: 1572864 bytes of the size of experts
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile peft==0.21.2 transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes of tensors of the size of experts that a forward pass keeps, without parameters."""
    from importlib.metadata import version

    import peft
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=32, num_experts_per_tok=2,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (1, 16))
    packages = ("peft", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    kept = {}
    for where, targets in (("attention", ["q_proj", "v_proj"]), ("all layers", "all-linear")):
        model = Qwen3MoeForCausalLM(config).bfloat16()
        experts = [p.nbytes for name, p in model.named_parameters() if "experts" in name]
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, parameters=parameters, saved=saved) -> torch.Tensor:
            if (pointer := tensor.untyped_storage().data_ptr()) not in parameters:
                saved[pointer] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, labels=tokens)
        kept[where] = sum(t.nbytes for t in saved.values() if t.untyped_storage().nbytes() in experts)
    print(f"experts: {sum(experts)} bytes")
    for where, size in kept.items():
        print(f"kept for the backward pass, adapters on {where}: {size} bytes of the size of experts")
    assert kept["all layers"] == sum(experts)


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
