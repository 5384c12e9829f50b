#!/bin/sh
# The collator that packs samples by their positions keeps them apart in attention, and not in recurrent layers.
#
# Topic: Data
# Package: transformers 5.24.0
# Expected: The logits of a sample are the same alone and after another one in a packed sequence, as with Qwen3.
# Seen: Attention reads from `position_ids` where a sample begins. The convolutions and states of Qwen3-Next, Granite 4,
#   Nemotron-H and MiniMax go on from the sample before, without a warning. `return_seq_idx=True` would tell all but
#   MiniMax, and is off by default.
# Hurts: Who trains a hybrid model without padding, with this collator or with positions of their own: each sample starts
#   from what the one before it left.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0
#     qwen3: the same
#     qwen3_next: depends on the sample before
#     granitemoehybrid: depends on the sample before
#     nemotron_h: depends on the sample before
#     minimax: depends on the sample before
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print by family whether the logits of a sample depend on the sample before it in a packed sequence."""
    from importlib.metadata import version

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    families = {
        "qwen3": {},
        "qwen3_next": {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "granitemoehybrid": {
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "mamba_n_heads": 8,
            "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
        },
        "nemotron_h": {
            "ssm_state_size": 16, "hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 16,
            "n_groups": 1,
        },
        "minimax": {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"] * 2},
    }  # fmt: skip
    packages = ("transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    torch.manual_seed(0)
    pack, seen = DataCollatorWithFlattening(), {}
    first, second = (torch.randint(3, 250, (24,)).tolist() for _ in range(2))
    for family, own in families.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **own})).eval()
        batch = pack([{"input_ids": first}, {"input_ids": second}])
        batch.pop("labels")
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([second]), use_cache=False).logits
            packed = model(**batch, use_cache=False).logits[:, len(first) :]
        seen[family] = bool((alone - packed).abs().max() < 1e-5 * alone.abs().max())
        print(f"{family}: {'the same' if seen[family] else 'depends on the sample before'}")
    assert seen == {family: family == "qwen3" for family in families}


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
