#!/bin/sh
# `lora_dropout`, however small, adds more than half to what LoRA on all linear layers keeps: adapters share no input.
#
# Topic: Adapters
# Package: peft 0.21.2, with transformers 5.24.0 and torch 2.13.0
# Expected: The same memory: the adapters of a layer have one input, of which few values are dropped.
# Seen: Without dropout, the adapters of queries, keys and values keep one input, and those of gate and up projection
#   another. With dropout, each of the seven keeps a result of its own and a mask. On CUDA a mask has a byte for each
#   value, here two, and a third is added. The rate makes no difference.
# Hurts: Who plans `trl sft` or ms-swift, where 0.05 is the default, by figures of PEFT or LLaMA-Factory, where it is 0: 20
#   GB more on CUDA for 8192 tokens of Qwen3-8B without checkpoints.
# Date: 2026-11-30
# Output:
#     peft 0.21.2, transformers 5.24.0, torch 2.13.0
#     dropout 0.0: 22.9 hidden states for each token and layer
#     dropout 0.001: 35.9 hidden states for each token and layer
#     dropout 0.05: 35.9 hidden states for each token and layer
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile peft==0.21.2 transformers==5.24.0 torch==2.13.0
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print what LoRA on all linear layers keeps for the backward pass, by its dropout, with adapters in bf16."""
    from importlib.metadata import version

    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, tokens, hidden = 4, 512, 256
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 128}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **shape)

    def kept(dropout: float) -> float:
        """Return the bytes that a layer keeps for a token beside weights, in those of a hidden state in bf16."""
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()
        own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
        inputs = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        found = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            model.model.model(inputs_embeds=inputs, use_cache=False)
        return sum(size for size, _ in found.values()) / (layers * tokens * hidden * 2)

    packages = ("peft", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    seen = {dropout: kept(dropout) for dropout in (0.0, 0.001, 0.05)}
    for dropout, size in seen.items():
        print(f"dropout {dropout}: {size:.1f} hidden states for each token and layer")
    assert seen[0.001] == seen[0.05] > 1.5 * seen[0.0]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
