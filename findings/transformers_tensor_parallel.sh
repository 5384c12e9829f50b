#!/bin/sh
# `tp_plan="auto"` divides only the embedding and the head of gpt-oss; of DeepSeek-V3, the attention stays whole.
#
# Topic: Tensor parallelism
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: Two ranks hold half of the weights of attention and experts each, as with Llama and Qwen3.
# Seen: A plan by layer names says what is divided, and a layer that is not named is whole on each rank, without a
#   warning. The plan of gpt-oss names the embedding and the head, but no layer. That of DeepSeek-V3 names experts and
#   dense networks, but no attention.
# Hurts: Who divides the weights by the ranks: gpt-oss-120b needs the memory of one rank on each of eight.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0, accelerate 1.15.0
#     qwen3_moe: 50% of the embedding, 50% of attention, 50% of the experts, 50% of the head
#     deepseek_v3: 50% of the embedding, 100% of attention, 50% of the experts, 50% of the head
#     gpt_oss: 50% of the embedding, 100% of attention, 100% of the experts, 50% of the head
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    transformers==5.24.0 torch==2.13.0 accelerate==1.15.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import os
import tempfile


def look() -> None:
    """Print the share of each kind of weights on the first of two ranks."""
    from importlib.metadata import version

    import torch.distributed as dist
    import transformers as hf
    from torch.testing._internal.distributed.fake_pg import FakeStore

    common = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 0, "n_group": 1}
    configs = (
        hf.Qwen3MoeConfig(**common, head_dim=16, num_experts=8, moe_intermediate_size=32),
        hf.DeepseekV3Config(**common, **latent, **experts, topk_group=1),
        hf.GptOssConfig(**common, head_dim=16, num_local_experts=8),
    )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    packages = ("transformers", "torch", "accelerate")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    seen = {}
    for config in configs:
        model = hf.AutoModelForCausalLM.from_config(config)
        whole = {name: weights.numel() for name, weights in model.named_parameters()}
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = hf.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
        dist.destroy_process_group()
        held = {name: getattr(weights, "_local_tensor", weights).numel() for name, weights in model.named_parameters()}
        shares = []
        for kind in ("embed", "attn", "experts", "lm_head"):
            names = [name for name in whole if kind in name and "norm" not in name]
            shares.append(sum(map(held.__getitem__, names)) / sum(map(whole.__getitem__, names)))
        seen[config.model_type] = shares
        print(
            "{}: {:.0%} of the embedding, {:.0%} of attention, {:.0%} of the experts, {:.0%} of the head".format(
                config.model_type, *shares
            )
        )
    assert seen["qwen3_moe"] == [0.5] * 4
    assert seen["gpt_oss"][1:3] == [1, 1]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
