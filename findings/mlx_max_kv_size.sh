#!/bin/sh
# mlx-lm's `--max-kv-size` limits no cache of Llama, Gemma 3 and fifty other families: they keep all tokens.
#
# Topic: Caches
# Package: mlx-lm 0.32.2
# Expected: No layer keeps more than 64 tokens, as with Qwen3, and as the option's help says.
# Seen: A model that makes its caches itself, as it may have windows or recurrent layers, is not told the limit,
#   and there is no warning. The cache of each layer without a window grows with the context, by 256 tokens at a time.
# Hurts: Who sets the limit so that a long chat fits a machine with little memory.
# Date: 2026-11-29
# Output:
#     mlx-lm 0.32.2
#     qwen3: [64, 64] tokens, after 501
#     llama: [512, 512] tokens, after 501
#     gemma3_text: [64, 512] tokens, after 501
#     53 files of models make caches of their own
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print for how many tokens the caches of two layers have room after a prompt, with a limit of 64."""
    from importlib import import_module
    from importlib.metadata import version
    from pathlib import Path

    import mlx.core as mx
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    common = {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "rope_theta": 1e4, "tie_word_embeddings": True, "sliding_window": 64,
        "sliding_window_pattern": 2,
    }  # fmt: skip
    print("mlx-lm", version("mlx-lm"))
    kept = {}
    for name in ("qwen3", "llama", "gemma3_text"):
        module = import_module(f"mlx_lm.models.{name}")
        model = module.Model(module.ModelArgs.from_dict({"model_type": name, **common}))
        cache = make_prompt_cache(model, max_kv_size=64)
        for tokens in (500, 1):
            mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=cache))
        kept[name] = [layer.keys.shape[2] for layer in cache]
        print(f"{name}: {kept[name]} tokens, after 501")
    families = sum("def make_cache" in file.read_text() for file in Path(mlx_lm.__file__).parent.glob("models/*.py"))
    print(f"{families} files of models make caches of their own")
    assert kept["qwen3"] == [64, 64]
    assert min(kept["llama"]) > 501


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
