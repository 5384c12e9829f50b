#!/bin/sh
# torchtitan's selective checkpoints compute all three products of experts again, and one of three of a dense network.
#
# Topic: Training memory
# Package: torchtitan 0.3.0, with torch 2.13.0
# Expected: Every second product is stored and the others are computed again, also those of experts, as the policy says.
# Seen: The operators whose results are stored do not include the grouped product, on which the experts run. They store
#   nothing, and their three products run twice: selective checkpoints of a mixture of experts are nearly full ones.
# Hurts: Who chooses between no, selective and full checkpoints for a mixture of experts from figures of dense models.
# Date: 2026-11-29
# Output:
#     torchtitan 0.3.0, torch 2.13.0
#     dense network: 3 products in the forward pass, 1 again
#     experts: 3 products in the forward pass, 3 again
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torchtitan==0.3.0 torch==2.13.0 triton==3.7.1
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print how many products run in the forward pass, and how many run again before the backward pass."""
    from importlib.metadata import version

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import GroupedExperts

    products = (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default)

    class Count(TorchDispatchMode):
        """Counts matrix products."""

        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function in products
            return function(*args, **(kwargs or {}))

    class Dense(torch.nn.Module):
        """A network with a gate."""

        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2, self.w3 = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))

    experts = GroupedExperts(GroupedExperts.Config(dim=64, hidden_dim=64, num_experts=4))
    for weights in experts.parameters():
        torch.nn.init.normal_(weights)
    packages = ("torchtitan", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    again = []
    for name, layer, further in (("dense network", Dense(), ()), ("experts", experts, (torch.tensor([8] * 4),))):
        counts = []
        for module in (layer, SelectiveAC(SelectiveAC.Config())._wrap_block(layer)):
            with Count() as count:
                result = module(torch.randn(32, 64, requires_grad=True), *further)
                forward = count.number
                result.float().sum().backward()
            counts.append(count.number)
        again.append(counts[1] - counts[0])
        print(f"{name}: {forward} products in the forward pass, {again[-1]} again")
    assert again == [1, 3]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
