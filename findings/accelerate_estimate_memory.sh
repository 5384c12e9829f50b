#!/bin/sh
# accelerate's estimate of training with Adam in bf16 is half of that in fp32, and half of what accelerate then keeps.
#
# Topic: Planners
# Package: accelerate 1.15.0, with transformers 5.24.0 and torch 2.13.0
# Expected: 16 bytes for each weight in both: weights, gradients and two moments in fp32.
# Seen: `accelerate estimate-memory` prints the largest of four numbers. With bf16 and fp16 this is that of the moments,
#   8 bytes for each weight, to which weights (4) and gradients (6) are not added. With fp32 it is the sum.
# Hurts: Who looks up whether a model can be fine-tuned on a device: 8 billion weights are said to need 60 GiB, and take
#   119 before their activations.
# Date: 2026-11-30
# Output:
#     accelerate 1.15.0, transformers 5.24.0, torch 2.13.0
#     estimate: 16 bytes for each weight in fp32, 8 in bf16
#     training in bf16: 16 (weights 4, gradients 4, moments 8)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile accelerate==1.15.0 transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print bytes for each weight: of the command's estimate, and after a step of training in bf16."""
    from importlib.metadata import version

    import accelerate
    import torch
    from accelerate.commands import estimate
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **shape))
    number = sum(map(torch.numel, model.parameters()))
    size, _largest = estimate.calculate_maximum_sizes(model)
    needed = {dtype: max(estimate.estimate_training_usage(size, dtype).values()) for dtype in ("float32", "bfloat16")}
    packages = ("accelerate", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    in_fp32, in_bf16 = (round(each / number) for each in needed.values())
    print(f"estimate: {in_fp32} bytes for each weight in fp32, {in_bf16} in bf16")

    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.arange(16)[None]
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    parts = {
        "weights": model.parameters(),
        "gradients": [each.grad for each in model.parameters()],
        "moments": [each for state in optimizer.state.values() for each in state.values()],
    }
    kept = {name: round(sum(each.nbytes for each in tensors) / number) for name, tensors in parts.items()}
    print(f"training in bf16: {sum(kept.values())} ({', '.join(f'{name} {each}' for name, each in kept.items())})")
    assert sum(kept.values()) == in_fp32 == 2 * in_bf16


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
