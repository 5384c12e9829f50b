#!/bin/sh
# With accelerate's FSDP2, gradient accumulation keeps whole gradients on each rank: 2 bytes for each weight of the model.
#
# Topic: Training memory
# Package: accelerate 1.15.0, with torch 2.13.0 and transformers 5.24.0
# Expected: A rank keeps the gradients of its shard between micro-batches, as DeepSpeed's ZeRO-3 does.
# Seen: `accumulate`, and `Trainer` likewise, synchronizes in the last micro-batch only. Until then, sums of whole
#   gradients are kept in the type of the reduction, which is bf16 with `mixed_precision="bf16"`. With
#   `sync_each_batch`, a rank keeps its shard only.
# Hurts: Who lowers the micro-batch and accumulates to fit a model: Qwen3-8B needs 16 GB more, on any number of ranks.
# Date: 2026-11-29
# Output:
#     accelerate 1.15.0, transformers 5.24.0, torch 2.13.0
#     weights: 426752, on 8 ranks
#     one micro-batch: 0 bytes of whole gradients, 213376 of the shard
#     first of 4: 853504 bytes of whole gradients, 0 of the shard
#     last of 4: 0 bytes of whole gradients, 213376 of the shard
#     first of 4, sync_each_batch: 0 bytes of whole gradients, 213376 of the shard
#     last of 4, sync_each_batch: 0 bytes of whole gradients, 213376 of the shard
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile \
    accelerate==1.15.0 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
import os


def look() -> None:
    """Print the bytes of gradients on the first of eight ranks after the backward pass of micro-batches."""
    from importlib.metadata import version

    import accelerate
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import Qwen3Config, Qwen3ForCausalLM

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    packages = ("accelerate", "transformers", "torch")
    print(", ".join(f"{each} {version(each).partition('+')[0]}" for each in packages))
    tokens, seen = torch.zeros(1, 8, dtype=torch.long), []
    for count, each in ((1, False), (4, False), (4, True)):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        plugin = GradientAccumulationPlugin(num_steps=count, sync_each_batch=each, sync_with_dataloader=False)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_plugin=plugin)
        # An accelerator of CPUs does not choose FSDP by itself.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
            transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        )  # fmt: skip
        accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
        model = Qwen3ForCausalLM(config).bfloat16()
        if not seen:
            print(f"weights: {sum(weights.numel() for weights in model.parameters())}, on 8 ranks")
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for number in range(count):
            with accelerator.accumulate(model):
                accelerator.backward(model(tokens, labels=tokens).loss)
            whole = {}
            for module in model.modules():
                group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
                for weights in group.fsdp_params if group else ():
                    gradient = weights._unsharded_param.grad
                    whole[id(weights)] = 0 if gradient is None else gradient.nbytes
            shard = sum(weights.grad.to_local().nbytes for weights in model.parameters() if weights.grad is not None)
            if number in (0, count - 1):
                seen.append((sum(whole.values()), shard))
                name = "one micro-batch" if count == 1 else f"{'first' if number == 0 else 'last'} of {count}"
                print(
                    f"{name}{', sync_each_batch' * each}: {seen[-1][0]} bytes of whole gradients, "
                    f"{seen[-1][1]} of the shard"
                )
    assert [whole > 0 for whole, _shard in seen] == [False, True, False, False, False]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
