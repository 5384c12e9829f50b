#!/bin/sh
# `Trainer(bf16=True)` trains a checkpoint of bf16 without fp32 weights: Adam's two moments have bf16 too.
#
# Topic: Training memory
# Package: transformers 5.24.0
# Expected: As up to transformers 4: fp32 weights and moments, and bf16 only in operations, 16 bytes per parameter.
# Seen: Since transformers 5, `from_pretrained` keeps the type of the checkpoint, and `bf16=True` changes no weights. A
#   parameter takes 8 bytes with its gradient. Updates below half of a bf16 step are lost.
# Hurts: Who plans memory by 16 or 18 bytes per parameter, or compares the loss with older runs.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, accelerate 1.15.0, torch 2.13.0
#     checkpoint bfloat16: weights bfloat16, moments bfloat16 and bfloat16
#     checkpoint float32: weights float32, moments float32 and float32
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print the types of a weight and of its states after two steps."""
    from importlib.metadata import version

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    packages = ("transformers", "accelerate", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    kinds = {}
    for kind in (torch.bfloat16, torch.float32):
        with tempfile.TemporaryDirectory() as folder:
            Qwen3ForCausalLM(config).to(kind).save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder)
            arguments = TrainingArguments(
                folder, bf16=True, use_cpu=True, max_steps=2, report_to=[], save_strategy="no"
            )
            trainer = Trainer(model, arguments, train_dataset=[{"input_ids": [1] * 16, "labels": [1] * 16}] * 8)
            trainer.remove_callback(transformers.ProgressCallback)  # prints the metrics
            trainer.train()
        weights = model.lm_head.weight
        states = trainer.optimizer.optimizer.state[weights]
        kinds[kind] = [weights.dtype, states["exp_avg"].dtype, states["exp_avg_sq"].dtype]
        names = [str(name).removeprefix("torch.") for name in (kind, *kinds[kind])]
        print("checkpoint {}: weights {}, moments {} and {}".format(*names))
    assert kinds[torch.bfloat16] == [torch.bfloat16] * 3
    assert kinds[torch.float32] == [torch.float32] * 3


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
