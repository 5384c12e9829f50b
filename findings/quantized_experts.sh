#!/bin/sh
# `load_in_4bit` leaves the experts of a mixture of experts in bf16: the model keeps more than nine tenths of its size.
#
# Topic: Quantization
# Package: transformers 5.24.0, with bitsandbytes 0.50.2
# Expected: All weights but embeddings, head, norms and routers in 4 bits: about a third of this small model.
# Seen: bitsandbytes converts `nn.Linear`. Since transformers 5, the experts of a layer are two parameters with three
#   dimensions, which are loaded in bf16 without a warning.
# Hurts: Who plans QLoRA of a mixture of experts, whose experts are nearly all of its weights.
# Date: 2026-11-28
# Output:
#     transformers 5.24.0, bitsandbytes 0.50.2, accelerate 1.15.0, torch 2.13.0
#     self_attn.q_proj.weight uint8
#     mlp.experts.gate_up_proj bfloat16
#     mlp.experts.down_proj bfloat16
#     bf16: 2037312 bytes; 4 bits: 1889920 bytes, with all linear layers in 4 bits 710272 bytes
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    transformers==5.24.0 bitsandbytes==0.50.2 accelerate==1.15.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print the types of weights of a layer, and the size of the model."""
    from importlib.metadata import version

    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        four = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="cpu"
        )
    packages = ("transformers", "bitsandbytes", "accelerate", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    weights = {name.removeprefix("model.layers.0."): p for name, p in four.named_parameters() if ".0." in name}
    for name in ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        print(name, str(weights[name].dtype).removeprefix("torch."))
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    sizes = model.get_memory_footprint(), four.get_memory_footprint()
    print(
        f"bf16: {sizes[0]} bytes; 4 bits: {sizes[1]} bytes, "
        f"with all linear layers in 4 bits {sizes[1] - experts + experts // 4} bytes"
    )
    assert sizes[1] > 0.9 * sizes[0]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
