#!/bin/sh
# With accelerate's FSDP2, each rank holds all of QLoRA's 4-bit weights: only adapters and embedding are divided.
#
# Topic: Training memory
# Package: accelerate 1.15.0, with bitsandbytes 0.50.2 and transformers 5.24.0
# Expected: A quarter of the 4-bit weights on each of four ranks, or an error.
# Seen: By default, bitsandbytes stores them as `uint8`. accelerate leaves such weights out of FSDP2, with a warning.
#   With `bnb_4bit_quant_storage=torch.bfloat16`, they are divided.
# Hurts: Who adds ranks to fit a larger model with QLoRA: its weights do not become fewer.
# Date: 2026-11-29
# Output:
#     accelerate 1.15.0, bitsandbytes 0.50.2, peft 0.21.2, transformers 5.24.0, torch 2.13.0
#     uint8: 147456 of 147456 bytes of the 4-bit weights
#     uint8: 32768 of 131072 bytes of the adapters
#     uint8: 32768 of 131072 bytes of the embedding
#     bfloat16: 36864 of 147456 bytes of the 4-bit weights
#     bfloat16: 32768 of 131072 bytes of the adapters
#     bfloat16: 32768 of 131072 bytes of the embedding
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    accelerate==1.15.0 bitsandbytes==0.50.2 peft==0.21.2 transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
import os
import tempfile


def look() -> None:
    """Print the bytes of weights on the first of four ranks."""
    from importlib.metadata import version

    import accelerate
    import peft
    import torch
    import torch.distributed as dist
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    packages = ("accelerate", "bitsandbytes", "peft", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    parts = []
    for storage in (torch.uint8, torch.bfloat16):
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage)
        with tempfile.TemporaryDirectory() as folder:
            Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", quantization_config=four)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        whole = {name: weights.nbytes for name, weights in model.named_parameters()}
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        # An accelerator of CPUs does not prepare FSDP by itself.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
            transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        )  # fmt: skip
        model = fsdp2_prepare_model(accelerator, model)
        held = {name: getattr(weights, "_local_tensor", weights).nbytes for name, weights in model.named_parameters()}
        for kind, name in (("4-bit weights", ".base_layer."), ("adapters", ".lora_"), ("embedding", ".embed_tokens.")):
            sizes = [sum(size for key, size in of.items() if name in key) for of in (held, whole)]
            parts.append(sizes[0] / sizes[1])
            print(f"{str(storage).removeprefix('torch.')}: {sizes[0]} of {sizes[1]} bytes of the {kind}")
    assert parts == [1, 0.25, 0.25, 0.25, 0.25, 0.25]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
