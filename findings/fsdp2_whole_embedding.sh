#!/bin/sh
# With FSDP2, each rank holds the whole embedding and head through both passes, also with `reshard_after_forward=True`.
#
# Topic: Training memory
# Package: torch 2.13.0
# Expected: Whole weights of a layer or two at a time, and with `reshard_after_forward=True` no others.
# Seen: Embedding, head and last norm are one unit, that of the model. It is whole from the embedding to the head, is
#   gathered again as the first of the backward pass, and freed as the last. The option frees it only between the
#   passes, where little else is whole. A unit of its own for the embedding, and one for the head, free both.
# Hurts: Who trains models with large vocabularies on many ranks: 4 GB of bf16 stay whole on each rank for a model of
#   262,144 tokens and the width 3,840 with a head of its own.
# Date: 2026-11-29
# Output:
#     torch 2.13.0
#     whole in the middle of the forward pass, between the passes, and in the middle of the backward pass:
#     default: 278528, 262144, 278528 bytes
#     reshard_after_forward=True: 278528, 0, 278528 bytes
#     units for embedding and head: 16384, 0, 16384 bytes
#     of which a layer has 16384, embedding and head 262144 bytes
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print the bytes of whole weights on a rank at three moments of a step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Layer(torch.nn.Linear):
        """A layer whose result is no view."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    def whole(model: torch.nn.Module) -> int:
        size = 0
        for module in model.modules():
            group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
            for weights in group.fsdp_params if group else ():
                size += weights._unsharded_param.untyped_storage().nbytes() if weights.all_gather_outputs else 0
        return size

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    print("torch", torch.__version__.split("+")[0])
    print("whole in the middle of the forward pass, between the passes, and in the middle of the backward pass:")
    seen = []
    for name, options, units in (
        ("default", {}, ()),
        ("reshard_after_forward=True", {"reshard_after_forward": True}, ()),
        ("units for embedding and head", {"reshard_after_forward": True}, (0, -1)),
    ):
        layers = [Layer(64, 64, bias=False) for _ in range(5)]
        model = torch.nn.Sequential(torch.nn.Embedding(512, 64), *layers, torch.nn.Linear(64, 512, bias=False))
        for module in (*layers, *(model[i] for i in units)):
            fully_shard(module, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        sizes = []
        model[3].register_forward_pre_hook(lambda *_, model=model, sizes=sizes: sizes.append(whole(model)))
        model[3].register_full_backward_hook(lambda *_, model=model, sizes=sizes: sizes.append(whole(model)))
        result = model(torch.zeros(1, 8, dtype=torch.long))
        sizes.append(whole(model))
        result.sum().backward()
        seen.append(sizes)
        print(f"{name}: {', '.join(map(str, sizes))} bytes")
    print(f"of which a layer has {4 * 64 * 64}, embedding and head {2 * 4 * 512 * 64} bytes")
    assert seen[0][0] == seen[1][0] == seen[0][2] == seen[1][2]
    assert seen[1][0] > 10 * seen[2][0]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
