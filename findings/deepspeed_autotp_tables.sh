#!/bin/sh
# DeepSpeed's AutoTP keeps an embedding whole on each rank unless it is also the head, and then divides both.
#
# Topic: Tensor parallelism
# Package: deepspeed 0.19.8, with transformers 5.24.0 and torch 2.13.0
# Expected: Two ranks hold half of the embedding and half of the head each, as in Megatron, or both are whole.
# Seen: AutoTP follows the plan of transformers, but skips `embedding_rowwise`: only a tied embedding is divided, with a
#   loss on divided logits. A head of its own is divided, and its logits are gathered on each rank. Plans with stacked
#   experts, as of Qwen3-MoE, are refused as a whole.
# Hurts: Who adds ranks to fit a large vocabulary: for Qwen2.5-72B, each rank keeps 2.5 GB of the embedding in bf16,
#   beside its gradients and states, and 5 GB of fp32 logits of 8192 tokens.
# Date: 2026-11-30
# Output:
#     deepspeed 0.19.8, transformers 5.24.0, torch 2.13.0
#     llama: 100% of the embedding, 50% of the head, 50% of a layer's products
#     qwen3, tied: 50% of the embedding, 50% of the head, 50% of a layer's products
#     qwen3_moe: refused
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    deepspeed==0.19.8 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from typing import Any


def shares(name: str, **keys: Any) -> str:
    """Return what rank 0 of two holds of a small model, in percent of embedding, head and a layer's products."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32}
    config = AutoConfig.for_model(name, **sizes, num_attention_heads=8, num_key_value_heads=4, **keys)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    whole = {name: weight.numel() for name, weight in model.named_parameters()}
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}}
    settings["zero_allow_untested_optimizer"] = True
    try:
        deepspeed.initialize(model=model, config=settings, optimizer=torch.optim.AdamW(model.parameters()))
    except ValueError:
        return "refused"
    held = {name: weight.numel() for name, weight in model.named_parameters()}
    embedding = held["model.embed_tokens.weight"] / whole["model.embed_tokens.weight"]
    head = held["lm_head.weight"] / whole["lm_head.weight"] if "lm_head.weight" in held else embedding
    products = [name for name in whole if "layers.0." in name and "_proj" in name]
    layer = sum(held[name] for name in products) / sum(whole[name] for name in products)
    return f"{embedding:.0%} of the embedding, {head:.0%} of the head, {layer:.0%} of a layer's products"


def look() -> None:
    """Print the shares of three models."""
    from importlib.metadata import version

    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sys.modules[f"{deepspeed.__name__}.comm.torch"].build_shm_op = lambda: None  # needs no compiler, and is not used
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    found = {
        "llama": shares("llama", tie_word_embeddings=False),
        "qwen3, tied": shares("qwen3", tie_word_embeddings=True),
        "qwen3_moe": shares("qwen3_moe", tie_word_embeddings=False, **moe),
    }
    packages = ("deepspeed", "transformers", "torch")
    lines = [", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages)]
    lines += [f"{name}: {text}" for name, text in found.items()]
    print(*lines, sep="\n", file=sys.__stdout__)
    assert found["llama"].startswith("100% of the embedding, 50% of the head")
    assert found["qwen3, tied"].startswith("50% of the embedding, 50% of the head")
    assert found["qwen3_moe"] == "refused"


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    with redirect_stdout(StringIO()):  # DeepSpeed logs there
        look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
