#!/bin/sh
# PEFT's preparation of a 4-bit mixture of experts casts the experts to fp32: QLoRA needs more memory than LoRA.
#
# Topic: Quantization
# Package: peft 0.21.2, with transformers 5.24.0 and bitsandbytes 0.50.2
# Expected: Norms and the output layer in fp32, as its documentation lists, and the other weights as they were loaded.
# Seen: `prepare_model_for_kbit_training` casts all parameters that are not 4-bit ones. Since transformers 5, these are
#   nearly all weights of a mixture of experts, whose experts stay in bf16 when the model is loaded.
# Hurts: Who fine-tunes a mixture of experts by PEFT's recipe, or by axolotl without `quantize_moe_experts`, FSDP or
#   ZeRO 3 (axolotl 0.19.0 calls it): a model of 30 billion weights takes 110 GiB before its first step.
# Date: 2026-11-29
# Output:
#     peft 0.21.2, transformers 5.24.0, bitsandbytes 0.50.2, accelerate 1.15.0, torch 2.13.0
#     self_attn.q_proj.weight uint8 uint8
#     mlp.experts.gate_up_proj bfloat16 float32
#     mlp.experts.down_proj bfloat16 float32
#     bf16: 2037312 bytes; loaded in 4 bits: 1889920 bytes; prepared: 3730560 bytes
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    peft==0.21.2 transformers==5.24.0 bitsandbytes==0.50.2 accelerate==1.15.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print the types of weights of a layer before and after the preparation, and the sizes of the model."""
    from importlib.metadata import version

    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="cpu"
        )
    packages = ("peft", "transformers", "bitsandbytes", "accelerate", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    sizes = [model.get_memory_footprint(), loaded.get_memory_footprint()]
    before = {name: weight.dtype for name, weight in loaded.named_parameters()}
    prepared = peft.prepare_model_for_kbit_training(loaded)
    after = {name: weight.dtype for name, weight in prepared.named_parameters()}
    for name in ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        types = (str(each[f"model.layers.0.{name}"]).removeprefix("torch.") for each in (before, after))
        print(name, *types)
    sizes.append(prepared.get_memory_footprint())
    print(f"bf16: {sizes[0]} bytes; loaded in 4 bits: {sizes[1]} bytes; prepared: {sizes[2]} bytes")
    assert sizes[2] > 1.7 * sizes[0]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
