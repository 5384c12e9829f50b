#!/bin/sh
# LoRA of the rank 8 on the fused experts of transformers 5 has the rank 16 beside gate and up projection.
#
# Topic: Adapters
# Package: peft 0.21.2, with transformers 5.24.0
# Expected: Matrices of the rank 8 beside the gate, up and down projection of each expert, as with transformers 4.
# Seen: Gate and up projection are one parameter with one adapter, whose rank is doubled so that adapters of
#   transformers 4 fit in. Its outer matrix spans both projections: a third more trained weights, gradients and
#   optimizer states.
# Hurts: Who computes the memory of adapters from their rank, or sets the largest rank of a server from the recipe.
# Date: 2026-11-28
# Output:
#     peft 0.21.2, transformers 5.24.0, torch 2.13.0
#     gate and up: A (64, 64), B (128, 64), rank 16 for each of 4 experts
#     down: A (32, 64), B (64, 32), rank 8 for each of 4 experts
#     trained weights: 16384, of separate projections 12288
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile peft==0.21.2 transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the shapes of the adapters beside the experts of a layer."""
    from importlib.metadata import version

    import peft
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    rank, hidden, inner, experts = 8, 64, 64, 4
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=128, moe_intermediate_size=inner, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and ".experts." in name}
    shapes = [tuple(p.shape) for p in found.values()]
    assert shapes[0][0] == 2 * rank * experts
    assert shapes[2][0] == rank * experts
    packages = ("peft", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    for name, first, second in (("gate and up", *shapes[:2]), ("down", *shapes[2:])):
        print(f"{name}: A {first}, B {second}, rank {first[0] // experts} for each of {experts} experts")
    separate = 3 * experts * rank * (hidden + inner)
    print(f"trained weights: {sum(p.numel() for p in found.values())}, of separate projections {separate}")


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
