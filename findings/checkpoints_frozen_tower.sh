#!/bin/sh
# Checkpoints let the frozen vision tower of Gemma 3 and Qwen2.5-VL be differentiated: 2.3 times its operations.
#
# Topic: Training
# Package: transformers 5.24.0, with peft 0.21.2 and torch 2.13.0
# Expected: LoRA beside the language model runs the frozen tower forward only, with checkpoints as without them.
# Seen: Activation checkpoints let the output of each "input embedding" require a gradient, and that of the tower's patches is
#   one: layers run again, and the backward pass goes through them for a gradient that nobody reads. The towers of Gemma 3,
#   Llama 4, LLaVA, InternVL, Mistral 3 and Qwen2.5-VL have such an embedding, those of Qwen3-VL, Gemma 4 and GLM-4.5V none.
# Hurts: Who fine-tunes with a frozen tower: an image takes 4096 patches of Gemma 3's tower and 256 tokens of its language
#   model, so the tower has most of the operations of Gemma 3 4B on images.
# Date: 2026-12-01
# Output:
#     transformers 5.24.0, peft 0.21.2, torch 2.13.0
#     Gemma 3: gradients in 0 layers of the tower; with checkpoints in 6, and 2.4 times the operations
#     Qwen2.5-VL: gradients in 0 layers of the tower; with checkpoints in 6, and 2.3 times the operations
#     Qwen3-VL: gradients in 0 layers of the tower; with checkpoints in 0, and 1.0 times the operations
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 peft==0.21.2 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import logging
import warnings
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, Gemma3Config, Qwen2_5_VLConfig, Qwen3VLConfig

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
packages = ("transformers", "peft", "torch")
print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
sizes = {"hidden_size": 64, "intermediate_size": 128}
text = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
qwen = {"text_config": {**text, "head_dim": 16, "rope_parameters": rope}, "image_token_id": 490}
qwen.update(video_token_id=491, vision_start_token_id=492, vision_end_token_id=493)
tower = {**sizes, "depth": 6, "num_heads": 4, "out_hidden_size": 64}
siglip = {**sizes, "num_hidden_layers": 6, "num_attention_heads": 4, "image_size": 224, "patch_size": 14}
gemma_3 = Gemma3Config(
    text_config={**text, "head_dim": 16}, vision_config=siglip, mm_tokens_per_image=64, image_token_index=490
)
qwen_2 = Qwen2_5_VLConfig(vision_config={**tower, "fullatt_block_indexes": [1, 5], "window_size": 112}, **qwen)
qwen_3 = Qwen3VLConfig(
    vision_config={**tower, "deepstack_visual_indexes": [1], "num_position_embeddings": 256}, **qwen
)
ids = torch.full((1, 80), 5)
ids[0, 5] = 492
ids[0, 6:70] = 490  # an image of 256 patches
kinds = (ids == 490).int()
inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
patches = {"image_grid_thw": torch.tensor([[1, 16, 16]]), "mm_token_type_ids": kinds}
cases = {
    "Gemma 3": (gemma_3, {"pixel_values": torch.ones(1, 3, 224, 224), "token_type_ids": kinds}),
    "Qwen2.5-VL": (qwen_2, {"pixel_values": torch.ones(256, 3 * 2 * 14 * 14), **patches}),
    "Qwen3-VL": (qwen_3, {"pixel_values": torch.ones(256, 3 * 2 * 16 * 16), **patches}),
}


def look(config, images, checkpoints: bool) -> tuple[int, int]:
    """Return in how many layers of the frozen tower there were gradients, and the operations of the tower."""
    model = AutoModelForImageTextToText.from_config(config).train()
    if checkpoints:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=4, target_modules=r".*language_model.*q_proj"))
    name, frozen = next(each for each in model.named_modules() if each[0].endswith((".visual", ".vision_tower")))
    assert not any(weight.requires_grad for weight in frozen.parameters())
    seen = set()

    def note(layer, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.add(layer))

    for each, module in frozen.named_modules():
        if each.endswith(".mlp") and "merger" not in each:
            module.register_forward_hook(note)
    with FlopCounterMode(display=False) as counter:
        model(**inputs, **images).loss.backward()
    return len(seen), sum(counter.get_flop_counts()[f"PeftModel.{name}"].values())


found = {}
for name, (config, images) in cases.items():
    (before, once), (after, flops) = (look(config, images, checkpoints) for checkpoints in (False, True))
    found[name] = flops / once
    print(
        f"{name}: gradients in {before} layers of the tower; with checkpoints in {after}, "
        f"and {flops / once:.1f} times the operations"
    )
assert found["Gemma 3"] > 2
assert found["Qwen2.5-VL"] > 2
assert found["Qwen3-VL"] == 1
END
HOME="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
