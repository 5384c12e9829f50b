#!/bin/sh
# An attention mask of ones, or a cache, lets the samples of a packed sequence attend to each other.
#
# Topic: Data
# Package: transformers 5.24.0
# Expected: With `position_ids` that restart, samples are kept apart; a mask that hides nothing changes nothing.
# Seen: `position_ids` keep samples apart only where neither `attention_mask` nor a cache is passed. Then SDPA gets a mask
#   of blocks. With a mask of ones, or with `use_cache`, which is the default, a sample attends to those before it, with
#   no warning.
# Hurts: Who packs samples with a collator or a loop of their own: the loss depends on what a sample was packed with.
# Date: 2026-11-29
# Output:
#     transformers 5.24.0, torch 2.13.0, attention sdpa
#     use_cache=False: the second sample is alone
#     use_cache=False, attention_mask of ones: the second sample sees the first
#     neither argument: the second sample sees the first
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print whether the logits of the second sample change when the first one does."""
    from importlib.metadata import version

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    first, other, second = torch.randint(0, 64, (3, 1, 16)).unbind()
    where = torch.arange(16).repeat(1, 2)
    packages = ("transformers", "torch")
    versions = [f"{each} {version(each).partition('+')[0]}" for each in packages]
    print(", ".join([*versions, f"attention {config._attn_implementation}"]))
    apart = []
    for name, given in (
        ("use_cache=False", {"use_cache": False}),
        ("use_cache=False, attention_mask of ones", {"use_cache": False, "attention_mask": torch.ones(1, 32)}),
        ("neither argument", {}),
    ):
        with torch.no_grad():
            logits = [
                model(torch.cat([before, second], 1), position_ids=where, **given).logits[:, 16:]
                for before in (first, other)
            ]
        apart.append(torch.equal(*logits))
        print(f"{name}: the second sample {'is alone' if apart[-1] else 'sees the first'}")
    assert apart == [True, False, False]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
