#!/bin/sh
# transformers builds LongCat-Flash with 741 billion weights, not 561: experts that compute nothing have weights, too.
#
# Topic: Checkpoints
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: Weights of 512 experts in each layer. The 256 zero experts return their input.
# Seen: The gate and up projection has a third more experts than the down projection. Weights of zero experts get no
#   gradient, but moments, and are saved. A checkpoint without them, as the released one, is refused for its shape.
# Hurts: Who plans or loads this model with transformers 5: 360 GB more in bf16, 1.4 TB with gradients and moments.
# Date: 2026-11-30
# Output:
#     transformers 5.24.0, torch 2.13.0
#     LongCat-Flash: 741 billion weights, 180 of them in zero experts
#     8 experts and 4 zero experts: gates for 12, of which 8 get gradients
#     saved for zero experts: 16 matrices
#     a checkpoint without them is refused
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import tempfile
from pathlib import Path


def look() -> None:
    """Print the weights of the whole model, and of a small one that learns, is saved, and is loaded again."""
    from importlib.metadata import version

    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    transformers.logging.set_verbosity_error()
    packages = ("transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    with torch.device("meta"):
        model = LongcatFlashForCausalLM(LongcatFlashConfig())
    whole = sum(map(torch.numel, model.parameters()))
    unused = 256 * 28 * 2 * 2048 * 6144  # zero experts, layers, gate and up projection
    print(f"LongCat-Flash: {whole / 1e9:.0f} billion weights, {unused / 1e9:.0f} of them in zero experts")

    sizes = {"vocab_size": 256, "hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16}
    widths = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"expert_ffn_hidden_size": 32, "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3}
    torch.manual_seed(0)
    model = LongcatFlashForCausalLM(LongcatFlashConfig(**sizes, **heads, **widths, **experts))
    tokens = torch.randint(256, (4, 64))
    model(tokens, labels=tokens).loss.backward()
    first = model.model.layers[0].mlp.experts
    learnt = int((first.gate_up_proj.grad.flatten(1).abs().sum(1) > 0).sum())
    print(f"8 experts and 4 zero experts: gates for {len(first.gate_up_proj)}, of which {learnt} get gradients")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder, "model.safetensors")
        saved = load_file(file)
        zero = [name for name in saved if any(f".experts.{number}." in name for number in range(8, 12))]
        print(f"saved for zero experts: {len(zero)} matrices")
        save_file({name: saved[name] for name in saved if name not in zero}, file, {"format": "pt"})
        try:
            LongcatFlashForCausalLM.from_pretrained(folder)
        except RuntimeError:
            refused = True
        else:
            refused = False
    print(f"a checkpoint without them is {'refused' if refused else 'loaded'}")
    assert learnt == 8
    assert refused
    assert whole > 561e9 + 0.9 * unused


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
