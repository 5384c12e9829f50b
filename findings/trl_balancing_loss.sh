#!/bin/sh
# TRL adds 3.6 to the loss of gpt-oss: 0.9 times a balancing loss that the configuration of the model turns off.
#
# Topic: Training
# Package: trl 1.16.0, with transformers 5.24.0 and torch 2.13.0
# Expected: The loss of transformers' Trainer, cross entropy alone, as the configuration has `output_router_logits: false`.
# Seen: TRL's SFT, DPO and GRPO turn it on for each mixture with a `router_aux_loss_coef`, which is 0.9 in the released
#   configurations of gpt-oss and 0.001 in Qwen3's. Perfectly balanced routers of four experts for a token have the loss 4.
#   `router_aux_loss_coef=0` turns it off, as does the value 0 in the configuration.
# Hurts: Who fine-tunes gpt-oss with TRL, or compares its losses and gradient norms with those of LLaMA-Factory, axolotl or
#   ms-swift, which are built on Trainer.
# Date: 2026-12-01
# Output:
#     trl 1.16.0, transformers 5.24.0, torch 2.13.0
#     Trainer: loss 6.2, norm of the gradient 0.9
#     SFTTrainer: loss 9.8, norm of the gradient 1.3, balancing loss 4.0
#     SFTTrainer with router_aux_loss_coef 0: loss 6.2, norm of the gradient 0.9
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile trl==1.16.0 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import logging
import os
import sys
import warnings
from importlib.metadata import version

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
disable_progress_bars()
shown, sys.stdout = sys.stdout, open(os.devnull, "w")  # the trainers print what they log
packages = ("trl", "transformers", "torch")
print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages), file=shown)
config = GptOssConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=500, num_local_experts=32, num_experts_per_tok=4, router_aux_loss_coef=0.9,
)  # fmt: skip
assert not config.output_router_logits
torch.manual_seed(0)
rows = [torch.randint(0, 500, (64,)).tolist() for _ in range(8)]
data = Dataset.from_list([{"input_ids": each, "labels": each} for each in rows])
words = Tokenizer(models.WordLevel({str(each): each for each in range(500)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2")
common = {
    "output_dir": os.environ["HOME"], "max_steps": 1, "per_device_train_batch_size": 8, "logging_steps": 1, "bf16": False,
    "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def look(name: str, more: dict[str, float] | None = None) -> float:
    """Train one step, by TRL with the settings `more` or by Trainer, print its figures, and return its loss."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config)(**config.to_dict()))
    if more is None:
        trainer = Trainer(model, TrainingArguments(**common), train_dataset=data)
    else:
        trainer = SFTTrainer(model, SFTConfig(**common, **more), train_dataset=data, processing_class=tokenizer)
    trainer.train()
    figures = trainer.state.log_history[0]
    balancing = f", balancing loss {figures['aux_loss']:.1f}" if "aux_loss" in figures else ""
    print(f"{name}: loss {figures['loss']:.1f}, norm of the gradient {figures['grad_norm']:.1f}{balancing}", file=shown)
    return figures["loss"]


plain, added = look("Trainer"), look("SFTTrainer", {})
without = look("SFTTrainer with router_aux_loss_coef 0", {"router_aux_loss_coef": 0.0})
assert added > plain + 3.5
assert abs(without - plain) < 0.01
END
HOME="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen" 2> "$folder/log" || { cat "$folder/log" >&2; exit 1; }
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
