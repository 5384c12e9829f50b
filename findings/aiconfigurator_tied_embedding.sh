#!/bin/sh
# aiconfigurator counts the embedding of a model with tied embeddings twice: a quarter too much for Qwen3-0.6B.
#
# Topic: Planners
# Package: aiconfigurator-core 0.12.0
# Expected: 1.19 GB of weights in bf16, as vLLM stores one matrix for the embedding and the head.
# Seen: 1.50 GB. `tie_word_embeddings` of the configuration is not read, so the head has weights of its own.
# Hurts: Who plans small models, whose embeddings are a large part: the cache is planned too small.
# Date: 2026-11-28
# Output:
#     aiconfigurator-core 0.12.0
#     Qwen3-0.6B, tie_word_embeddings True
#     weights: 1503133696 bytes
#     by the configuration: 1191968768 bytes with one embedding, 1503133696 bytes with two
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile aiconfigurator-core==0.12.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the weights of a model, and those of the matrices of its configuration."""
    import json
    from importlib.metadata import version
    from pathlib import Path

    import aiconfigurator_core
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    estimate = estimate_kv_cache(
        "Qwen/Qwen3-0.6B", "h200_sxm", "vllm", "0.24.0", max_num_tokens=8192, max_batch_size=256,
        memory_fraction_kind="of_total", memory_fraction_value=0.9,
    )  # fmt: skip
    weights = estimate["memory_breakdown"]["weights_bytes"]
    folder = Path(aiconfigurator_core.__file__).parent / "model_configs"
    config = json.loads((folder / "Qwen--Qwen3-0.6B_config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * width * (config["num_attention_heads"] + config["num_key_value_heads"])
    layers = config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"])
    one, two = (2 * (layers + number * config["vocab_size"] * hidden) for number in (1, 2))
    print("aiconfigurator-core", version("aiconfigurator-core"))
    print("Qwen3-0.6B, tie_word_embeddings", config["tie_word_embeddings"])
    print(f"weights: {weights} bytes")
    print(f"by the configuration: {one} bytes with one embedding, {two} bytes with two")
    assert weights == two


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
