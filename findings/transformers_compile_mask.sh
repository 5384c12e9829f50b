#!/bin/sh
# In training with torch.compile, SDPA gets a mask of all pairs of tokens, and KV heads repeated for all query heads.
#
# Topic: Training memory
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: What SDPA gets without compilation: no mask, `is_causal`, and KV heads that the kernel groups.
# Seen: A traced model may not look whether the mask of the data hides a token, so it builds the causal mask, and with a
#   mask transformers repeats keys and values. Compiled layers store less of norms and activations, which hides it: less
#   in all, but the mask grows with the square of the length, and SDPA's FlashAttention takes none.
# Hurts: Who sets `torch_compile=True` of Trainer with SDPA: other kernels of attention, keys and values of 64 heads
#   instead of 8 in each layer of Qwen3-32B, and 2 GB for the mask of 32,768 tokens.
# Date: 2026-11-30
# Output:
#     transformers 5.24.0, torch 2.13.0
#     512 tokens: eager stores 25 MB, compiled 16 MB
#     4096 tokens: eager stores 200 MB, compiled 155 MB
#     eager: no mask, 1 KV head; compiled: a mask of all pairs, 8 KV heads
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print what attention receives and what the forward stores, eager and compiled without a code generator."""
    from importlib.metadata import version

    import torch
    from torch._dynamo import lookup_backend
    from torch.nn.functional import scaled_dot_product_attention as attention
    from torch.overrides import TorchFunctionMode
    from transformers import Qwen3Config, Qwen3ForCausalLM

    received: list[tuple[tuple[int, ...] | None, int]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is attention:
                mask = kwargs["attn_mask"]
                received.append((None if mask is None else tuple(mask.shape), args[1].size(1)))
            return function(*args, **(kwargs or {}))

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        for node in graph.graph.nodes:
            if node.target is attention:
                key, mask = (each.meta["example_value"] for each in (node.args[1], node.kwargs["attn_mask"]))
                received.append((tuple(mask.shape), key.size(1)))
        return lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    config = Qwen3Config(
        vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).bfloat16().train()
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    print(f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}")

    def stored_bytes(forward, length: int) -> int:
        stored: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            stored.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        tokens = torch.zeros(1, length, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, logits_to_keep=1)
        return sum(each.untyped_storage().nbytes() for key, each in stored.items() if key not in weights)

    for length in (512, 4096):
        received.clear()
        with Watch():
            eager = stored_bytes(model, length)
        plain = set(received)
        received.clear()
        torch._dynamo.reset()
        compiled = stored_bytes(torch.compile(model, backend=backend), length)
        assert plain == {(None, 1)}
        assert set(received) == {((1, 1, length, length), 8)}
        print(f"{length} tokens: eager stores {eager / 1e6:.0f} MB, compiled {compiled / 1e6:.0f} MB")
    print("eager: no mask, 1 KV head; compiled: a mask of all pairs, 8 KV heads")
    assert compiled < eager


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
