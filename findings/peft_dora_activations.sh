#!/bin/sh
# DoRA keeps 1.7 times the activations of LoRA: each adapted layer keeps two more results of its full width.
#
# Topic: Adapters
# Package: peft 0.21.2, with transformers 5.24.0
# Expected: Those of LoRA: DoRA adds one vector of magnitudes to each layer.
# Seen: The vector scales the result of the frozen layer and that of the adapter, so autograd keeps both: 6 bytes for each
#   element of the layer's output, in bf16 and fp32, where LoRA keeps a tensor of its rank.
# Hurts: Who turns on `use_dora` in a recipe that fits, as its parameters are nearly those of LoRA.
# Date: 2026-11-29
# Output:
#     peft 0.21.2, transformers 5.24.0, torch 2.13.0
#     LoRA: 32768 trained parameters, 4489216 bytes kept
#     DoRA: 34816 trained parameters, 7659008 bytes kept
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the trained parameters, and the bytes that a forward pass keeps for the backward pass."""
    import weakref
    from importlib.metadata import version

    import peft
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip

    class Kept:
        """A tensor that autograd keeps as long as it keeps this object."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    packages = ("peft", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    sizes = []
    for use_dora in (False, True):
        recipe = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=use_dora)
        model = peft.get_peft_model(Qwen3ForCausalLM(config).bfloat16(), recipe)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        graph: weakref.WeakSet[Kept] = weakref.WeakSet()

        def keep(tensor: torch.Tensor, graph=graph) -> Kept:
            kept = Kept(tensor)
            graph.add(kept)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            result = model(torch.randint(0, 64, (1, 256)), use_cache=False)
        storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage() for kept in graph}
        size = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)
        del result
        sizes.append(size)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"{'DoRA' if use_dora else 'LoRA'}: {trained} trained parameters, {sizes[-1]} bytes kept")
    assert sizes[1] > 1.6 * sizes[0]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
