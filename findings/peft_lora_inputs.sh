#!/bin/sh
# LoRA beside all linear layers keeps a third more activations than training all weights: its inputs are cast to fp32.
#
# Topic: Adapters
# Package: peft 0.21.2, with transformers 5.24.0
# Expected: Fewer: a frozen layer needs no input for its backward pass, and an adapter one of the rank.
# Seen: The adapters of a bf16 model have fp32. Each adapted layer casts its input for its first matrix, and autograd
#   keeps the copy: three of one tensor for query, key and value, two for gate and up. Under autocast, which casts back,
#   there are three copies of bf16, and LoRA saves nothing. With `autocast_adapter_dtype=False`, it saves a sixth.
# Hurts: Who turns to LoRA to fit a longer sequence. Without FSDP or DeepSpeed, which cast adapters to bf16 themselves,
#   only weights, gradients and states become smaller.
# Date: 2026-11-29
# Output:
#     peft 0.21.2, transformers 5.24.0, torch 2.13.0
#     all weights: 50.6 kB kept for each token
#     LoRA, fp32 adapters: 66.9 kB kept for each token
#     LoRA, fp32 adapters, autocast: 51.0 kB kept for each token
#     LoRA, bf16 adapters: 41.9 kB kept for each token
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes that a forward pass keeps for the backward pass, without weights, for each token."""
    import weakref
    from importlib.metadata import version

    import peft
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    class Kept:
        """A tensor that autograd keeps as long as it keeps this object."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    config = Qwen3Config(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    recipe = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    packages = ("peft", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    sizes = {}
    for name, fp32, autocast in (
        ("all weights", None, False),
        ("LoRA, fp32 adapters", True, False),
        ("LoRA, fp32 adapters, autocast", True, True),
        ("LoRA, bf16 adapters", False, False),
    ):
        model = Qwen3ForCausalLM(config).bfloat16()
        if fp32 is not None:
            model = peft.get_peft_model(model, recipe, autocast_adapter_dtype=fp32)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        graph: weakref.WeakSet[Kept] = weakref.WeakSet()

        def keep(tensor: torch.Tensor, graph=graph) -> Kept:
            kept = Kept(tensor)
            graph.add(kept)
            return kept

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            result = model(torch.randint(0, 64, (1, 256)), use_cache=False)
        storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage() for kept in graph}
        sizes[name] = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)
        del result
        print(f"{name}: {sizes[name] / 256 / 1000:.1f} kB kept for each token")
    assert sizes["LoRA, fp32 adapters"] > 1.2 * sizes["all weights"]
    assert sizes["LoRA, fp32 adapters, autocast"] > sizes["all weights"]
    assert sizes["LoRA, bf16 adapters"] < 0.9 * sizes["all weights"]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
