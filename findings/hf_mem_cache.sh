#!/bin/sh
# hf-mem estimates half the cache of Qwen3-0.6B for its GGUF file, and 25 times the cache of DeepSeek-V3.
#
# Topic: Planners
# Package: hf-mem 0.5.6
# Expected: 112 KiB a token for Qwen3-0.6B in both formats, and the latents of DeepSeek-V3: 1,152 bytes a layer.
# Seen: For a GGUF file, the width of a head is that of the model divided by its heads, 64 instead of 128, though the file
#   states it as `key_length`. For safetensors, latent attention counts as 128 heads, and the recurrent layers of
#   Qwen3-Next as layers with keys and values: four times its cache. The weights are right.
# Hurts: Who looks up with it whether a model and a context fit: the GGUF file of Qwen3-32B needs 1.6 times the cache that
#   was planned, and DeepSeek-V3 seems to need 268 GiB for one context that takes 11.
# Date: 2026-11-30
# Output:
#     hf-mem 0.5.6
#     Qwen3-0.6B: safetensors 112 KiB a token, GGUF 56 KiB
#     DeepSeek-V3: 1708 KiB a token, of which vLLM, SGLang and llama.cpp store 69
#     Qwen3-Next-80B-A3B: 96 KiB a token, of which its 12 layers with attention store 24
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile hf-mem==0.5.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes of the cache for each token, from the sizes of public models."""
    from importlib.metadata import version

    from hf_mem.gguf.kv_cache import compute_gguf_kv_cache_size
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

    context = 4096

    def stored(config: dict) -> int:
        return compute_safetensors_kv_cache_size(config, "BF16", context) // context

    small = {
        "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    }  # fmt: skip
    file = {
        "block_count": 28, "embedding_length": 1024, "head_count": 16, "head_count_kv": 8, "context_length": context,
        "key_length": 128, "value_length": 128,
    }  # fmt: skip
    latent = {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    hybrid = {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    }  # fmt: skip
    found = [stored(small), compute_gguf_kv_cache_size(file) // context, stored(latent), stored(hybrid)]
    right = [28 * 2 * 8 * 128 * 2, 28 * 2 * 8 * 128 * 2, 61 * (512 + 64) * 2, 12 * 2 * 2 * 256 * 2]
    print("hf-mem", version("hf-mem"))
    kib = [round(each / 1024) for each in (*found, *right)]
    print(f"Qwen3-0.6B: safetensors {kib[0]} KiB a token, GGUF {kib[1]} KiB")
    print(f"DeepSeek-V3: {kib[2]} KiB a token, of which vLLM, SGLang and llama.cpp store {kib[6]}")
    print(f"Qwen3-Next-80B-A3B: {kib[3]} KiB a token, of which its 12 layers with attention store {kib[7]}")
    assert found[0] == right[0]
    assert found[1] == right[1] / 2
    assert found[2] > 20 * right[2]
    assert found[3] == 4 * right[3]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
