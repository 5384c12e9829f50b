#!/bin/sh
# `optim="adamw_8bit"` of Trainer keeps fp32 moments for the embedding: 4 times those that 8 bits would take.
#
# Topic: Training memory
# Package: transformers 5.24.0, with bitsandbytes 0.50.2
# Expected: Two bytes of moments for each weight, as `optim_bits=8` says: all but the small norms in 8 bits.
# Seen: `Trainer` exempts each `nn.Embedding`, and says so only in a log of the level INFO. Where the head is tied, its
#   moments are those of the embedding. A head of its own has 8 bits, so it is cheaper in this respect than a tied one.
# Hurts: Who plans small models with large vocabularies, such as Qwen3-0.6B: 3.6 bytes for each weight instead of 2.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, bitsandbytes 0.50.2, accelerate 1.15.0, torch 2.13.0
#     tied: embedding float32, layers uint8; 4.8 bytes of moments for each weight
#     not tied: embedding float32, layers uint8, head uint8; 3.9 bytes of moments for each weight
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    transformers==5.24.0 bitsandbytes==0.50.2 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import tempfile


def look() -> None:
    """Print the types of the optimizer's moments after a step, and their bytes."""
    from importlib.metadata import version

    import transformers
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    packages = ("transformers", "bitsandbytes", "accelerate", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    for tied in (True, False):
        config = Qwen3Config(
            vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, tie_word_embeddings=tied,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).bfloat16()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, optim="adamw_8bit", bf16=True, use_cpu=True, max_steps=1, report_to=[], save_strategy="no"
            )
            trainer = Trainer(model, arguments, train_dataset=[{"input_ids": [1] * 16, "labels": [1] * 16}] * 8)
            trainer.remove_callback(transformers.ProgressCallback)  # prints the metrics
            trainer.train()
        states = trainer.optimizer.optimizer.state
        kinds = {
            name: str(states[weights]["state1"].dtype).removeprefix("torch.")
            for name, weights in (
                ("embedding", model.model.embed_tokens.weight),
                ("layers", model.model.layers[0].mlp.up_proj.weight),
                ("head", model.lm_head.weight),
            )[: 2 if tied else 3]
        }
        moments = sum(states[weights][name].nbytes for weights in model.parameters() for name in ("state1", "state2"))
        each = moments / sum(weights.numel() for weights in model.parameters())
        shown = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        print(f"{'tied' if tied else 'not tied'}: {shown}; {each:.1f} bytes of moments for each weight")
        assert kinds["embedding"] == "float32"
        assert {kinds["layers"], kinds.get("head", "uint8")} == {"uint8"}
        assert each > 3


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
