#!/bin/sh
# Under autocast to bf16, the products of the experts of transformers 5 are computed in fp32 if the weights are in fp32.
#
# Topic: Training
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: bf16 for all products of linear layers, those of experts included, as with transformers 4.
# Seen: The default, `grouped_mm`, is no operator that autocast knows: transformers casts the input to the type of the
#   weights. With `eager` and `batched_mm`, the same experts are computed in bf16.
# Hurts: Who trains a mixture of experts with `bf16=True` and weights in fp32, without FSDP or DeepSpeed: most of its
#   operations run at the rate of fp32, a fifteenth of that of bf16 on an H100.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0
#     default: grouped_mm
#     eager: mm bfloat16
#     batched_mm: bmm bfloat16, mm bfloat16
#     grouped_mm: _grouped_mm float32, mm bfloat16
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the types in which the products of the forward and backward pass of two layers are computed."""
    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    class Products(TorchDispatchMode):
        """Notes the types of the first operand of products."""

        def __init__(self) -> None:
            super().__init__()
            self.types: dict[str, set[str]] = {}

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = operator._schema.name.removeprefix("aten::")
            if name in ("mm", "bmm", "_grouped_mm"):
                self.types.setdefault(name, set()).add(str(args[0].dtype).removeprefix("torch."))
            return operator(*args, **(kwargs or {}))

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    print(f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}")
    print("default:", model.config._experts_implementation)
    tokens, seen = torch.randint(512, (2, 64)), {}
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        with Products() as products:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        seen[name] = products.types
        print(f"{name}:", ", ".join(f"{each} {'+'.join(sorted(types))}" for each, types in sorted(products.types.items())))
    assert seen["grouped_mm"]["_grouped_mm"] == {"float32"}
    assert seen["eager"]["mm"] == {"bfloat16"}


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
