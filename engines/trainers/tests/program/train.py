"""A user's own program: a small transformer on gloo, with tensor parallelism by hand and ZeRO by torch's FSDP2.

It prints the loss and the milliseconds of each step, and writes a checkpoint unless `--no-save` is passed.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
for flag, default in (("--tp", 1), ("--micro-batch", 1), ("--batch", 8), ("--steps", 1000), ("--layers", 2)):
    parser.add_argument(flag, type=int, default=default)
for flag, default in (("--hidden", 64), ("--seq", 32), ("--vocab", 512), ("--heads", 4)):
    parser.add_argument(flag, type=int, default=default)
parser.add_argument("--shard", choices=("none", "grads", "full"), default="none")
parser.add_argument("--no-save", action="store_true")
parser.add_argument("--fail-at-tp", type=int, default=0)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
tp_group, replicas = mesh["tp"].get_group(), world // args.tp


class Reduced(torch.autograd.Function):
    """Sums over tensor-parallel ranks, in the forward pass or in the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, forward: bool) -> torch.Tensor:
        context.backward_too = not forward
        if forward:
            x = x.clone()
            dist.all_reduce(x, group=tp_group)
        return x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.backward_too:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=tp_group)
        return gradient, None


class Layer(nn.Module):
    """A transformer layer whose heads and feed-forward network are divided over tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        h, t = args.hidden, args.tp
        self.heads = args.heads // t
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in range(2))
        self.qkv, self.out = nn.Linear(h, 3 * h // t, bias=False), nn.Linear(h // t, h, bias=False)
        self.up, self.down = nn.Linear(h, 2 * h // t, bias=False), nn.Linear(2 * h // t, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(Reduced.apply(self.norms[0](x), False)).view(batch, length, 3, self.heads, -1)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + Reduced.apply(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)), True)
        inner = nn.functional.gelu(self.up(Reduced.apply(self.norms[1](x), False)))
        return x + Reduced.apply(self.down(inner), True)


model = nn.Sequential(
    nn.Embedding(args.vocab, args.hidden), *(Layer() for _ in range(args.layers)), nn.Linear(args.hidden, args.vocab)
)
if args.fail_at_tp == args.tp:
    raise RuntimeError("CUDA out of memory. torch.OutOfMemoryError: tried to allocate 2 GiB")
if replicas > 1 and args.shard != "none":
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=args.shard == "full")
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=args.shard == "full")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
accumulated = args.batch // (args.micro_batch * replicas)
print(f"rank {dist.get_rank()}: tensor parallel {args.tp}, sharding {args.shard}", flush=True)
for step in range(1, args.steps + 1):
    start, total = time.perf_counter(), 0.0
    for _ in range(accumulated):
        tokens = torch.randint(args.vocab, (args.micro_batch, args.seq + 1))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / accumulated
        loss.backward()
        total += loss.item()
    if replicas > 1 and args.shard == "none":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
            parameter.grad /= replicas
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}/{args.steps} loss {total:.4f} took {1e3 * (time.perf_counter() - start):.2f} ms", flush=True)
if not args.no_save:
    Path("checkpoint.pt").write_bytes(b"weights")
dist.destroy_process_group()
