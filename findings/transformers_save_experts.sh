#!/bin/sh
# Saving a mixture of experts with transformers 5 copies all gate and up projections first: memory for 64% of the model.
#
# Topic: Training memory
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: No copy, as for a dense model, or one of a file's size: experts are slices of what is stored together.
# Seen: Before the first file is written, `save_pretrained` brings the whole model into the form of its checkpoint, and
#   halves of gate and up projection become tensors of their own, on the device of the weights. `max_shard_size` changes
#   nothing. `save_original_format=False` copies nothing, and writes stacked experts.
# Hurts: Who saves what just fits, as after merging adapters: 39 GB more for Qwen3-30B-A3B, on the device or host.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0
#     Qwen3, files of 50GB: copies of 0% of the model
#     Qwen3, files of 2MB: copies of 0% of the model
#     Qwen3-MoE, files of 50GB: copies of 64% of the model
#     Qwen3-MoE, files of 2MB: copies of 64% of the model
#     Qwen3-MoE, files of 2MB, not in the original format: copies of 0% of the model
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print the memory of copies that are alive at the same time while a model is saved."""
    import weakref

    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    class Copies(TorchDispatchMode):
        """Notes the largest memory of tensors that operators have made, without views of others."""

        def __init__(self) -> None:
            super().__init__()
            self.bytes = self.peak = 0

        def freed(self, size: int) -> None:
            self.bytes -= size

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            if operator._schema.name in ("aten::clone", "aten::_to_copy"):
                self.bytes += result.nbytes
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(result, self.freed, result.nbytes)
            return result

    sizes = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    experts = {"moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 2}
    print(f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}")
    shares = []
    for name, config in (("Qwen3", Qwen3Config(**sizes)), ("Qwen3-MoE", Qwen3MoeConfig(**sizes, **experts))):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for limit, original in (("50GB", True), ("2MB", True), ("2MB", False))[: 3 if name == "Qwen3-MoE" else 2]:
            with tempfile.TemporaryDirectory() as folder, Copies() as copies:
                model.save_pretrained(folder, max_shard_size=limit, save_original_format=original)
            shares.append(copies.peak / sum(weights.nbytes for weights in model.parameters()))
            form = "" if original else ", not in the original format"
            print(f"{name}, files of {limit}{form}: copies of {100 * shares[-1]:.0f}% of the model")
    assert shares[0] == shares[4] == 0
    assert min(shares[2:4]) > 0.6


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
