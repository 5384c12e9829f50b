#!/bin/sh
# The cache of a layer with a window of 32 tokens keeps the whole prompt until the first decoded token.
#
# Topic: Caches
# Package: transformers 5.24.0
# Expected: Keys and values of 31 tokens after the prompt, as the shape of the cache says.
# Seen: The cache holds a slice of the prompt's tensors, whose memory stays whole. The peak of a long prompt is that of
#   a model without windows. The first decoded token copies the slice and frees the rest.
# Hurts: Who generates from long prompts with Gemma 3 or gpt-oss and measures or plans the peak from the windows.
# Date: 2026-11-28
# Output:
#     transformers 5.24.0, torch 2.13.0
#     window, after 1000 tokens of a prompt: shape (1, 2, 31, 16), memory 64000 bytes of 1984
#     no window, after 1000 tokens of a prompt: shape (1, 2, 1000, 16), memory 64000 bytes of 64000
#     window, after a decoded token: shape (1, 2, 31, 16), memory 2048 bytes of 1984
#     no window, after a decoded token: shape (1, 2, 1001, 16), memory 64064 bytes of 64064
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the shape of the keys of both layers, and the bytes that they keep alive."""
    from importlib.metadata import version

    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).bfloat16().eval()
    packages = ("transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    cache, kept = None, []
    for tokens, name in ((1000, "1000 tokens of a prompt"), (1, "a decoded token")):
        with torch.no_grad():
            cache = model(torch.randint(0, 128, (1, tokens)), past_key_values=cache, use_cache=True).past_key_values
        for layer, kind in zip(cache.layers, ("window", "no window"), strict=True):
            kept.append(layer.keys.untyped_storage().nbytes())
            print(
                f"{kind}, after {name}: shape {tuple(layer.keys.shape)}, memory {kept[-1]} bytes of {layer.keys.nbytes}"
            )
    assert kept[0] == kept[1]
    assert kept[2] < kept[0] / 30


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
