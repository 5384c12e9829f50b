#!/bin/sh
# Training with fake quantization to int4 keeps 18 bytes for each weight until the backward pass, with int8 inputs 4.
#
# Topic: Quantization
# Package: torchao 0.18.0, with torch 2.13.0
# Expected: 2 bytes for each weight: the fake-quantized weight in bf16, by which the gradient of the input is computed.
# Seen: The scheme of `Int4WeightOnlyConfig` rounds in fp32 by single operations, and autograd keeps their results. That
#   of int8 inputs and int4 weights keeps 4 bytes for each weight, and also twice the bytes for each input. All of it
#   is kept on any number of tokens, for all layers without checkpoints of activations, and for one layer with them.
# Hurts: Who plans QAT as full fine-tuning in bf16: the 6.9 billion weights of Qwen3-8B's layers take 126 GB more.
# Date: 2026-11-29
# Output:
#     torchao 0.18.0, torch 2.13.0
#     bf16: 0.0 bytes for each weight, 2.0 for each input
#     int4 weights, int8 inputs: 4.1 bytes for each weight, 4.0 for each input
#     int4 weights: 18.1 bytes for each weight, 2.0 for each input
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print what two linear layers keep for the backward pass: for each weight, and for each element of an input."""
    import weakref

    import torch
    import torchao
    from torch.autograd.graph import saved_tensors_hooks
    from torchao.quantization import Int4WeightOnlyConfig, Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    class Kept:
        """Has a tensor that the backward pass needs."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def kept_bytes(model: torch.nn.Module, tokens: int) -> int:
        alive: weakref.WeakSet[Kept] = weakref.WeakSet()

        def keep(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            alive.add(kept)
            return kept

        inputs = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        with saved_tensors_hooks(keep, lambda kept: kept.tensor):
            result = model(inputs)
        storages = {kept.tensor.data_ptr(): kept.tensor.untyped_storage().nbytes() for kept in alive}
        del result
        return sum(size for at, size in storages.items() if at not in {w.data_ptr() for w in model.parameters()})

    width, layers = 512, 2
    print(f"torchao {torchao.__version__}, torch {torch.__version__.partition('+')[0]}")
    weights = []
    for name, base in (
        ("bf16", None),
        ("int4 weights, int8 inputs", Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))),
        ("int4 weights", Int4WeightOnlyConfig(group_size=128)),
    ):
        linear = (torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        model = torch.nn.Sequential(*linear)
        if base:
            quantize_(model, QATConfig(base, step="prepare"))
        few, many = (kept_bytes(model, tokens) for tokens in (64, 256))
        token = (many - few) / 192
        weights.append((few - 64 * token) / (layers * width * width))
        print(f"{name}: {weights[-1]:.1f} bytes for each weight, {token / layers / width:.1f} for each input")
    assert weights[0] == 0
    assert weights[1] > 3
    assert weights[2] > 15


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
