#!/bin/sh
# aiconfigurator divides the weights by the pipeline stages, but each stage has the cache of all layers.
#
# Topic: Planners
# Package: aiconfigurator-core 0.12.0
# Expected: With two stages, a rank caches half of the layers: half of the bytes per token, and twice as many tokens.
# Seen: The weights of a rank halve, and the bytes per token stay those of all 36 layers. The estimate is half of the
#   tokens that fit.
# Hurts: Who compares pipeline with tensor parallelism, or takes the number of concurrent requests from the plan.
# Date: 2026-11-28
# Output:
#     aiconfigurator-core 0.12.0
#     1 stage: weights 16380854272 bytes, cache 147456 bytes per token, 782475 tokens
#     2 stages: weights 8190427136 bytes, cache 147456 bytes per token, 838020 tokens
#     keys and values of all layers: 147456 bytes per token
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile aiconfigurator-core==0.12.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the estimates of Qwen3-8B on a rank of one and of two pipeline stages."""
    from importlib.metadata import version

    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    print("aiconfigurator-core", version("aiconfigurator-core"))
    sizes = []
    for stages in (1, 2):
        found = estimate_kv_cache(
            "Qwen/Qwen3-8B", "h200_sxm", "vllm", "0.24.0", max_num_tokens=8192, max_batch_size=256,
            memory_fraction_kind="of_total", memory_fraction_value=0.9, pp_size=stages,
        )  # fmt: skip
        sizes.append(found["kv_size_per_token_bytes"])
        print(
            f"{stages} stage{'s' * (stages > 1)}: weights {found['memory_breakdown']['weights_bytes']} bytes, "
            f"cache {sizes[-1]} bytes per token, {found['total_kv_size_tokens']} tokens"
        )
    every = 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, width, bytes
    print(f"keys and values of all layers: {every} bytes per token")
    assert sizes == [every, every]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
