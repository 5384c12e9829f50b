#!/bin/sh
# A soft cap of the logits, as of Gemma 2 and 4, keeps 2 more bytes of each logit until the loss is differentiated.
#
# Topic: Training memory
# Package: transformers 5.24.0, with torch 2.13.0
# Expected: The memory of the loss without it: dividing, capping and multiplying need no tensors of their own.
# Seen: The derivative of tanh needs its result, so autograd keeps capped logits of 16 bits beside the fp32 logits,
#   log-probabilities and gradients of the loss. A fused loss, as of Liger, does not.
# Hurts: Who plans the loss of Gemma 4 31B from its vocabulary of 262,144: 4.3 GB more for 8192 tokens.
# Date: 2026-11-30
# Output:
#     transformers 5.24.0, torch 2.13.0
#     without a cap: at most 14.3 bytes for each logit
#     with a cap of 30: at most 16.3 bytes for each logit
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the most bytes that forward and backward of a small Gemma 2 allocate at once, for each logit."""
    import weakref

    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocated(TorchDispatchMode):
        """Counts the bytes of storages that operators return and that are in use at once."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}
            self.most = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            for each in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    if storage._cdata not in self.sizes:
                        self.sizes[storage._cdata] = storage.nbytes()
                        weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
            self.most = max(self.most, sum(self.sizes.values()))
            return result

    print(f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}")
    found = []
    for cap in (None, 30.0):
        config = transformers.Gemma2Config(
            vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, final_logit_softcapping=cap,
        )  # fmt: skip
        model = transformers.Gemma2ForCausalLM(config).bfloat16()
        tokens = torch.randint(0, 8192, (1, 1024))
        with Allocated() as allocated:
            model(tokens, labels=tokens).loss.backward()
        found.append(allocated.most / (1024 * 8192))
        print(f"{f'with a cap of {cap:.0f}' if cap else 'without a cap'}: at most {found[-1]:.1f} bytes for each logit")
    assert 1.9 < found[1] - found[0] < 2.1


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
