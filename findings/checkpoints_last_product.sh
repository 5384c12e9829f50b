#!/bin/sh
# Full activation checkpoints of torch compute 75% of Qwen3's forward again, and all of it with Gemma 3 or reentrant ones.
#
# Topic: Training
# Package: torch 2.13.0, with transformers 5.24.0
# Expected: All of a layer's forward runs again, a third more operations, for all models and both kinds of checkpoints.
# Seen: Checkpoints that are not reentrant, the default of transformers 5, stop as soon as each tensor that the forward
#   stored is there again. Nobody needs the output of a layer's last product, a quarter of its operations. In Gemma 3 a
#   norm after it does, in a mixture of experts the sum of the experts. torchtitan turns the early stop off, but compiled
#   layers leave the product out, too.
# Hurts: Who computes HFU or the cost of checkpoints as a forward more, or compares trainers of both kinds: 6% of a step.
# Date: 2026-11-30
# Output:
#     torch 2.13.0, transformers 5.24.0
#     Qwen3: 75% of the forward run again, 99% with reentrant checkpoints
#     Gemma 3: 99% of the forward run again, 99% with reentrant checkpoints
#     Qwen3-MoE: 99% of the forward run again, 99% with reentrant checkpoints
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the share of the forward's operations that checkpoints of all layers compute again."""
    from importlib.metadata import version

    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    tokens = torch.zeros(1, 256, dtype=torch.int64)

    def operations(model: torch.nn.Module) -> tuple[int, int]:
        with FlopCounterMode(display=False) as counter:
            logits = model(input_ids=tokens, use_cache=False).logits
            forward = counter.get_total_flops()
            logits.sum().backward()
        return forward, counter.get_total_flops() - forward

    print(f"torch {version('torch').partition('+')[0]}, transformers {version('transformers')}")
    shares = {}
    for name, config in (
        ("Qwen3", Qwen3Config(**sizes)),
        ("Gemma 3", Gemma3TextConfig(**sizes)),
        ("Qwen3-MoE", Qwen3MoeConfig(**sizes, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2)),
    ):
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()
        forward, backward = operations(model)
        for reentrant in (None, True):
            kwargs = {"use_reentrant": True} if reentrant else None
            model.gradient_checkpointing_enable(kwargs)
            model.enable_input_require_grads()
            shares[name, reentrant] = (operations(model)[1] - backward) / forward
        print(
            f"{name}: {shares[name, None]:.0%} of the forward run again, "
            f"{shares[name, True]:.0%} with reentrant checkpoints"
        )
    assert shares.pop(("Qwen3", None)) < 0.8
    assert min(shares.values()) > 0.98


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
