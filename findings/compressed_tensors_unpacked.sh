#!/bin/sh
# transformers loads a compressed-tensors checkpoint in 4 bits, and turns all weights to bf16 at the first forward pass.
#
# Topic: Quantization
# Package: transformers 5.24.0, with compressed-tensors 0.20.1 and torch 2.13.0
# Expected: Weights stay packed, as those of bitsandbytes do, and a layer converts its own when it computes.
# Seen: Loaded, the model has the size of its checkpoint. The first forward pass replaces the packed weights of all
#   layers by bf16, which stays. Nothing but a progress bar says so.
# Hurts: Who evaluates, or trains adapters on, a W4A16 checkpoint of llm-compressor: what fits after loading takes 3.7
#   times the memory a moment later.
# Date: 2026-11-30
# Output:
#     transformers 5.24.0, compressed-tensors 0.20.1, torch 2.13.0
#     the checkpoint: 0.27 of the model in bf16
#     loaded: 0.27
#     after the first forward pass: 1.01
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    transformers==5.24.0 compressed-tensors==0.20.1 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print the memory of the weights of a checkpoint of 4 bits after loading and after the first forward pass."""
    import json
    from importlib.metadata import version
    from pathlib import Path

    import torch
    import transformers
    from compressed_tensors.compressors import pack_to_int32
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    transformers.logging.set_verbosity_error()
    packages = ("transformers", "compressed-tensors", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    sizes = {
        "vocab_size": 128, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    }  # fmt: skip
    config = Qwen3Config(**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole = sum(weights.nbytes for weights in model.parameters())
    packed = {}
    for name, weights in model.state_dict().items():
        if "proj" not in name:
            packed[name] = weights
            continue
        rows, columns = weights.shape
        numbers = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
        packed[f"{name}_packed"] = pack_to_int32(numbers, 4)
        packed[f"{name}_scale"] = torch.full((rows, columns // 128), 0.01, dtype=torch.bfloat16)
        packed[f"{name}_shape"] = torch.tensor([rows, columns])
    form = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    quantized = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": form}}, "ignore": ["lm_head"],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        given = {**config.to_dict(), "dtype": "bfloat16", "architectures": ["Qwen3ForCausalLM"]}
        Path(folder, "config.json").write_text(json.dumps({**given, "quantization_config": quantized}, default=str))
        save_file(packed, Path(folder, "model.safetensors"), {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder)

    def share() -> float:
        return sum(each.nbytes for each in (*model.parameters(), *model.buffers())) / whole

    print(f"the checkpoint: {sum(each.nbytes for each in packed.values()) / whole:.2f} of the model in bf16")
    loaded = share()
    print(f"loaded: {loaded:.2f}")
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.long))
    print(f"after the first forward pass: {share():.2f}")
    assert loaded < 0.3
    assert share() > 0.99


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
