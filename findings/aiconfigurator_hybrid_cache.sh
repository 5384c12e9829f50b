#!/bin/sh
# aiconfigurator gives all 52 layers of Nemotron 3 Nano keys and values, of which 6 have attention: 9 times the cache.
#
# Topic: Planners
# Package: aiconfigurator-core 0.12.0
# Expected: Keys and values of the layers with attention, and states of the others, as for the hybrid models of Qwen3.5.
# Seen: Each layer of Nemotron 3, also one with states, with experts or with a dense network, has keys and values. Only
#   a ninth to a fifth of the tokens that fit are planned. States are not counted.
# Hurts: Who sizes a server of Nemotron 3 or Nemotron-H: concurrent requests and devices follow from the cache.
# Date: 2026-11-30
# Output:
#     aiconfigurator-core 0.12.0
#     Qwen3.5-35B-A3B: 10 of 40 layers have attention, 20480 bytes for each token; planned: 1.00 times
#     NVIDIA-Nemotron-3-Nano-30B-A3B-BF16: 6 of 52 layers have attention, 6144 bytes for each token; planned: 8.67 times
#     Nemotron-H-56B-Base-8K: 10 of 118 layers have attention, 40960 bytes for each token; planned: 11.80 times
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile aiconfigurator-core==0.12.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the cache of a token on a rank as planned, and keys and values of the layers with attention."""
    import json
    from importlib.metadata import version
    from pathlib import Path

    import aiconfigurator_core
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    print("aiconfigurator-core", version("aiconfigurator-core"))
    found = {}
    for name in ("Qwen3.5-35B-A3B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-H-56B-Base-8K"):
        owner = "Qwen" if name.startswith("Qwen") else "nvidia"
        file = Path(aiconfigurator_core.__file__).parent / f"model_configs/{owner}--{name}_config.json"
        config = json.loads(file.read_text())
        config = config.get("text_config", config)
        layers = config.get("layer_types") or [*config["hybrid_override_pattern"]]
        attention = sum(each in ("full_attention", "*") for each in layers)
        plan = estimate_kv_cache(
            f"{owner}/{name}", "h200_sxm", "vllm", "0.24.0", max_num_tokens=8192, max_batch_size=256,
            memory_fraction_kind="of_total", memory_fraction_value=0.9,
        )  # fmt: skip
        planned = plan["total_kv_size_bytes"] / plan["total_kv_size_tokens"]
        width = config.get("head_dim") or config["attention_head_dim"]
        token = 2 * config["num_key_value_heads"] * width * 2  # keys and values in bf16
        found[name] = planned / (attention * token)
        print(
            f"{name}: {attention} of {len(layers)} layers have attention, {attention * token} bytes for each token; "
            f"planned: {found[name]:.2f} times"
        )
    qwen, nano, large = found.values()
    assert 1 <= qwen < 1.01
    assert min(nano, large) > 8


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
