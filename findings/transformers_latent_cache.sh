#!/bin/sh
# transformers caches the latents of DeepSeek-V3: 1,152 bytes per token and layer instead of 81,920.
#
# Topic: Caches
# Package: transformers 5.24.0
# Expected: Keys and values of all heads, as with transformers 4 and the code that was released with the model.
# Seen: The cache has one head with the latent of 512 and the part of 64 with positions, as in vLLM and SGLang.
# Hurts: Who plans rollouts or evaluation with transformers from heads: 70 times the memory that the cache takes.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0
#     keys (1, 1, 8, 512), values (1, 1, 8, 64): 1152 bytes per token
#     keys and values of 128 heads: 81920 bytes per token
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the shape of the cache of a layer with the attention of DeepSeek-V3, after a prompt of 8 tokens."""
    from importlib.metadata import version

    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, first_k_dense_replace=1,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).bfloat16()
    with torch.no_grad():
        (layer,) = model(torch.zeros(1, 8, dtype=torch.long), use_cache=True).past_key_values.layers
    packages = ("transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    size = (layer.keys.nbytes + layer.values.nbytes) // 8
    whole = 2 * config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    print(f"keys {tuple(layer.keys.shape)}, values {tuple(layer.values.shape)}: {size} bytes per token")
    print(f"keys and values of {config.num_attention_heads} heads: {whole} bytes per token")
    assert size == 2 * (config.kv_lora_rank + config.qk_rope_head_dim)


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
