#!/bin/sh
# `total_flos` of Trainer counts all experts of a mixture as computed: 7 times the operations of this small Qwen3-MoE.
#
# Topic: Metrics
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: Six operations for each token and each weight that it meets: 8 of 128 experts, and the head.
# Seen: Trainer multiplies the tokens by 6 and by all weights but those of the embedding. Of a model whose head is the
#   embedding, the products of the head are left out.
# Hurts: Who computes MFU from `total_flos` of `trainer_state.json`, or compares mixtures with dense models by it: 10 times
#   too much for Qwen3-30B-A3B, and a quarter too little for Qwen3-0.6B.
# Date: 2026-11-30
# Output:
#     transformers 5.24.0, torch 2.13.0, accelerate 1.15.0
#     128 experts of which 8 compute, own head: 7.1 times the operations
#     no experts, head tied to the embedding: 0.6 times the operations
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 accelerate==1.15.0
cat > "$folder/look.py" << 'END'
def ratio(name: str, **keys: object) -> float:
    """Return `total_flos` after a step, divided by six operations for each token and weight of products."""
    import tempfile

    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 1024, "head_dim": 16}
    config = AutoConfig.for_model(name, **sizes, num_attention_heads=4, num_key_value_heads=2, **keys)
    model = AutoModelForCausalLM.from_config(config)
    tokens = list(range(128))
    data = [{"input_ids": tokens, "labels": tokens}]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(folder, max_steps=1, per_device_train_batch_size=1, report_to="none", use_cpu=True)
        trainer = Trainer(model, options, train_dataset=data)
        trainer.train()
    share = keys.get("num_experts_per_tok", 0) / keys.get("num_experts", 1)
    weights = model.lm_head.weight.numel()
    for part, weight in model.model.layers.named_parameters():
        weights += weight.numel() * (share if ".experts." in part else 1)
    return trainer.state.total_flos / (6 * len(tokens) * weights)


def look() -> None:
    """Print the ratio of a mixture of experts and of a dense model."""
    from contextlib import redirect_stdout
    from importlib.metadata import version
    from io import StringIO


    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 24, "tie_word_embeddings": False}
    with redirect_stdout(StringIO()):
        sparse, dense = ratio("qwen3_moe", **experts), ratio("qwen3", tie_word_embeddings=True)
    packages = ("transformers", "torch", "accelerate")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    print(f"128 experts of which 8 compute, own head: {sparse:.1f} times the operations")
    print(f"no experts, head tied to the embedding: {dense:.1f} times the operations")
    assert sparse > 5
    assert dense < 0.7


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
