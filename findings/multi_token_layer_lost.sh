#!/bin/sh
# A fine-tune of DeepSeek-V3 or GLM-4.5 has no layer for multi-token prediction, but its config.json announces one.
#
# Topic: Configurations
# Package: transformers 5.24.0
# Expected: The layer is kept as it was, or `num_nextn_predict_layers` becomes 0.
# Seen: transformers has no such layer. For the depths of the released models, its weights are dropped without a warning,
#   and `save_pretrained` writes the number of layers as it was read.
# Hurts: Who serves the fine-tune with multi-token prediction: the server finds no weights of the announced layer.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0
#     deepseek_v3: 0 unexpected weights reported, 0 of 1 saved, num_nextn_predict_layers 1
#     glm4_moe: 0 unexpected weights reported, 0 of 1 saved, num_nextn_predict_layers 1
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print what is left of a layer for multi-token prediction after loading and saving."""
    import json
    from importlib.metadata import version
    from pathlib import Path

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

    common = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
        "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    configs = DeepseekV3Config(**common, **latent, num_hidden_layers=61), Glm4MoeConfig(**common, num_hidden_layers=46)
    packages = ("transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    for config in configs:
        name = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            file = Path(folder, "model.safetensors")
            save_file({**load_file(file), name: torch.zeros(16, 32)}, file, {"format": "pt"})
            model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            model.save_pretrained(folder)
            announced = json.loads(Path(folder, "config.json").read_text())["num_nextn_predict_layers"]
            is_kept = name in load_file(file)
        print(
            f"{config.model_type}: {len(report['unexpected_keys'])} unexpected weights reported, "
            f"{is_kept:d} of 1 saved, num_nextn_predict_layers {announced}"
        )
        assert (announced, is_kept) == (1, False)
        assert not report["unexpected_keys"]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
