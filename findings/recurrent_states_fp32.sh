#!/bin/sh
# In transformers, the recurrent states of a bf16 model have fp32: those of Qwen3-Next take twice the memory of bf16.
#
# Topic: Caches
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: States of bf16 beside keys and values of bf16, as the model has.
# Seen: States of linear attention and of Mamba stay in fp32, in which they are computed. Keys, values and the inputs of
#   convolutions have bf16.
# Hurts: Who computes the largest batch of a hybrid model from the type of its weights: for short contexts, the states
#   are most of the cache.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0
#     qwen3_next: keys bfloat16, inputs of convolutions bfloat16, states float32
#     falcon_h1: keys bfloat16, inputs of convolutions bfloat16, states float32
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the types of the cache of two hybrid models after a prompt."""
    import torch
    import transformers as hf

    common = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    linear = {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    print("transformers", hf.__version__)
    for config in (hf.Qwen3NextConfig(**common, **linear), hf.FalconH1Config(**common, **mamba)):
        model = hf.AutoModelForCausalLM.from_config(config).bfloat16().eval()
        with torch.no_grad():
            cache = model(torch.randint(0, 64, (1, 16)), use_cache=True).past_key_values
        keys, state, inputs = cache.layers[1].keys, cache.layers[0].recurrent_states[0], cache.layers[0].conv_states[0]
        kinds = [str(each.dtype).removeprefix("torch.") for each in (keys, inputs, state)]
        print("{}: keys {}, inputs of convolutions {}, states {}".format(config.model_type, *kinds))
        assert kinds == ["bfloat16", "bfloat16", "float32"]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
