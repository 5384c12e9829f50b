#!/bin/sh
# torchtitan's loss in parts, which all its models have, takes 2 GiB more than whole logits for 1024 tokens of Llama 3.
#
# Topic: Training memory
# Package: torchtitan 0.3.0, with torch 2.13.0
# Expected: An eighth of the memory of the logits, so never more than with the plain loss.
# Seen: Each of the eight parts has its own backward pass, and the rank adds up the gradient of the whole head in fp32,
#   whatever the number of ranks that share it; a copy of it is reduced beside it. With Llama 3 8B (width 4096, 128,256
#   tokens, 64 ranks here) this saves memory only from about 3000 tokens per rank and micro-batch on.
# Hurts: Who fits a large vocabulary by shorter sequences, context parallelism or a micro-batch of one sample.
# Date: 2026-11-29
# Output:
#     torchtitan 0.3.0, torch 2.13.0
#     1024 tokens: 3.04 GiB, in parts 5.02 GiB
#     2048 tokens: 3.98 GiB, in parts 5.08 GiB
#     4096 tokens: 6.94 GiB, in parts 5.21 GiB
#     16384 tokens: 24.74 GiB, in parts 6.89 GiB
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torchtitan==0.3.0 torch==2.13.0 triton==3.7.1
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the most memory that head and loss take on a rank, with the whole loss and with that in parts."""
    from importlib.metadata import version

    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakIdKeyDictionary
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    class Storages(TorchDispatchMode):
        """Counts the bytes of the storages of all tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.live, self.peak = WeakIdKeyDictionary(), 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for each in tree_leaves((args, kwargs, result)):
                if isinstance(each, FakeTensor) and each.device.type != "meta":
                    self.live[each.untyped_storage()] = True
            self.peak = max(self.peak, sum(each.nbytes() for each in self.live))
            return result

    class Model(torch.nn.Module):
        """A layer and a head."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(hidden, hidden, bias=False)
            self.head = torch.nn.Linear(hidden, vocabulary, bias=False)

        def forward(self, x: torch.Tensor, skips_head: bool) -> torch.Tensor:
            return self.layer(x) if skips_head else self.head(self.layer(x))

    hidden, vocabulary = 4096, 128256
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    mesh = init_device_mesh("cpu", (64,))

    def peak(tokens: int, in_parts: bool) -> int:
        with FakeTensorMode():
            model = Model()
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for each in (model.layer, model.head, model):
                fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=each is model.layer)
            labels = torch.zeros(1, tokens, dtype=torch.int64)
            plain = CrossEntropyLoss.Config(global_vocab_size=vocabulary)
            loss = (ChunkedLossWrapper.Config(loss_fn=plain) if in_parts else plain).build()
            with Storages() as storages:
                x = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16)
                if in_parts:
                    loss.set_lm_head(model.head)
                pred = model(x, in_parts)
                value, _ = loss(pred, labels, torch.tensor(float(tokens)))
                del pred
                value.backward()
        return storages.peak

    packages = ("torchtitan", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    more = []
    for tokens in (1024, 2048, 4096, 16384):
        whole, parts = (peak(tokens, each) / 2**30 for each in (False, True))
        more.append(parts - whole)
        print(f"{tokens} tokens: {whole:.2f} GiB, in parts {parts:.2f} GiB")
    assert more[0] > 1.5
    assert more[-1] < -10
    dist.destroy_process_group()


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
