#!/bin/sh
# torch's FlopCounterMode counts no products of the experts of transformers 5, so a measured MFU is too small.
#
# Topic: Metrics
# Package: torch 2.13.0, with transformers 5.24.0
# Expected: The operations of the chosen experts, the same for all implementations of the experts.
# Seen: The default implementation is a grouped product, for which the counter has no formula and no warning. With a
#   loop over the experts, or with batches of gathered weights, it counts them.
# Hurts: Who compares the MFU of a mixture of experts between trainers, or before and after an update.
# Date: 2026-11-28
# Output:
#     torch 2.13.0, transformers 5.24.0
#     default: grouped_mm, 14942208 operations
#     eager: 21233664 operations
#     batched_mm: 21233664 operations
#     products of the chosen experts: 6291456 operations
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print what the counter counts for a forward pass."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hidden, inner, layers, chosen, tokens = 64, 32, 2, 2, 128
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=128, moe_intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8,
        num_experts_per_tok=chosen,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    default = model.config._experts_implementation
    counted = {}
    for kind in (default, "eager", "batched_mm"):
        model.set_experts_implementation(kind)
        with FlopCounterMode(display=False) as counter:
            model(torch.randint(0, 512, (1, tokens)))
        counted[kind] = counter.get_total_flops()
    experts = layers * tokens * chosen * 3 * 2 * hidden * inner
    assert counted["eager"] - counted[default] == experts
    print(f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
    for kind, number in counted.items():
        print(f"{f'default: {kind},' if kind == default else f'{kind}:'} {number} operations")
    print(f"products of the chosen experts: {experts} operations")


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
