#!/bin/sh
# In training with SDPA, layers with a window of 64 keep nearly twice the memory of layers that attend to all tokens.
#
# Topic: Training memory
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: As much memory: activations do not depend on the window, and the causal mask is never built.
# Seen: SDPA has no argument for a window. So a mask of the square of the sequence is built, and with a mask the keys and
#   values are repeated for all query heads. Both are kept for the backward pass.
# Hurts: Who trains Gemma 3, gpt-oss or other models of windows on long sequences without FlashAttention.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0
#     512 tokens, sdpa: 5.3 MB without, 6.8 MB with a window
#     2048 tokens, sdpa: 21.2 MB without, 39.6 MB with a window
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes that the forward pass of a sequence keeps for the backward pass, by kind of layer."""
    import weakref
    from importlib.metadata import version

    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    class Kept:
        """A tensor that autograd keeps as long as it keeps this object."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    packages = ("transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    sizes = {}
    for tokens in (512, 2048):
        for kind in ("full_attention", "sliding_attention"):
            config = Gemma3TextConfig(
                vocab_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=8, num_key_value_heads=2,
                head_dim=16, num_hidden_layers=2, sliding_window=64, layer_types=[kind] * 2,
            )  # fmt: skip
            model = Gemma3ForCausalLM(config).bfloat16()
            weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
            graph: weakref.WeakSet[Kept] = weakref.WeakSet()

            def keep(tensor: torch.Tensor, graph=graph) -> Kept:
                kept = Kept(tensor)
                graph.add(kept)
                return kept

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
                result = model(torch.randint(0, 64, (1, tokens)), use_cache=False)
            storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage() for kept in graph}
            size = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)
            del result
            sizes[kind] = size
        print(
            f"{tokens} tokens, {config._attn_implementation}: {sizes['full_attention'] / 1e6:.1f} MB without, "
            f"{sizes['sliding_attention'] / 1e6:.1f} MB with a window"
        )
    assert sizes["sliding_attention"] > 1.7 * sizes["full_attention"]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
