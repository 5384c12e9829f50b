"""Simulates a training step pass by pass, as a reference for the formulas of pipeline schedules. Models, and candidates
of them as physics takes them."""

import dataclasses
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.training import Memory, memory_in_use, stages_in_use
from flagcore_training.schedules import SCHEDULES
from flagcore_training.stages import Stage, stage

from flagcore.contracts import Costs
from flagcore.domain.cluster import Level, Topology
from flagcore.domain.model import Model
from flagcore.domain.prediction import Passes
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import PlainMemory
from flagcore.spec.models import model_from
from tests.product import tasks

Pass: TypeAlias = tuple[str, int, int]
"""A pass: its kind, its part of the model and its micro-batch. The kinds are F for a forward pass, B for the gradients
of activations, W for the gradients of weights, and BW for both gradients. Device r of p has the parts r, r + p, ..."""

Orders: TypeAlias = list[list[Pass]]
"""The passes of each device in order."""


def step_seconds(passes: Passes) -> float:
    """Return the seconds of a step, in which each device runs its passes in the order of the schedule.

    A step ends with its last pass. For schedules with `post_validation`, it takes the longest time on one device from
    the start of its first pass to the end of its last pass.
    """
    p, weight_s = len(passes.forward_s), passes.weight_s or (0.0,) * len(passes.forward_s)
    backward_s = [whole - weight for whole, weight in zip(passes.backward_s, weight_s, strict=True)]
    seconds = {"F": passes.forward_s, "B": backward_s, "W": weight_s}
    parts = p * passes.virtual
    latency, delay = (0.0, passes.send_s) if passes.sender_waits else (passes.send_s, 0.0)
    waiting = [order[::-1] for order in orders_of(passes)]
    ends: dict[Pass, float] = {}
    starts: dict[int, float] = {}
    free_at, done_at = [0.0] * p, [0.0] * p
    while any(waiting):
        finished = len(ends)
        for device, order in enumerate(waiting):
            while order and (ready := _input_ready(order[-1], ends, p, parts, latency)) is not None:
                kind, part, batch = order.pop()
                start = max(free_at[device], ready)
                starts.setdefault(device, start)
                done_at[device] = start + sum(seconds[letter][device] for letter in kind) / passes.virtual
                target = part + 1 if kind == "F" else part - 1
                is_sent = kind != "W" and p > 1 and 0 <= target < parts
                free_at[device] = done_at[device] + delay * is_sent
                ends["B" if kind == "BW" else kind, part, batch] = free_at[device]
        assert len(ends) > finished, "deadlock in the schedule"
    if SCHEDULES[passes.schedule].post_validation:
        return max(done_at[device] - start for device, start in starts.items())
    return max(done_at)


def _input_ready(pass_: Pass, ends: Mapping[Pass, float], p: int, parts: int, latency: float) -> float | None:
    """Return the time at which the input of a pass is available, or None if it is not known yet.

    `ends` are the end times of the passes that have run. A BW pass is listed as B.
    """
    kind, part, batch = pass_
    if kind == "F" and part == 0:
        return 0.0
    if kind == "W":
        return ends.get(("B", part, batch))
    if kind != "F" and part == parts - 1:
        return ends.get(("F", part, batch))
    end = ends.get(("F", part - 1, batch) if kind == "F" else ("B", part + 1, batch))
    return end if end is None or p == 1 else end + latency


def one_forward_one_backward(p: int, m: int, warmup: Callable[[int], int] | None = None, kind: str = "BW") -> Orders:
    """Return the order of passes in 1F1B (arXiv 2104.04473) with p devices and m micro-batches.

    Device r starts with `warmup(r)` forward passes, by default p - r, and then alternates between backward and forward
    passes. If there are as many warm-up passes as micro-batches, the schedule is GPipe (arXiv 1811.06965).

    `kind`: the kind of the backward passes.
    """
    orders: Orders = []
    for r in range(p):
        warmup_count = min(warmup(r) if warmup else p - r, m)
        order = [("F", r, i) for i in range(warmup_count)]
        for i in range(m):
            order += [(kind, r, i)] + [("F", r, i + warmup_count)] * (i + warmup_count < m)
        orders.append(order)
    return orders


def interleaved(p: int, m: int, v: int) -> Orders:
    """Return the order of passes in interleaved 1F1B (arXiv 2104.04473) with v virtual stages per device.

    Each device processes p micro-batches on one virtual stage, then the same ones on the next.
    """
    table = [(i, c) for a in range(0, m, p) for c in range(v) for i in range(a, min(a + p, m))]
    orders: Orders = []
    for r in range(p):
        forwards = [("F", c * p + r, i) for i, c in table]
        backwards = [("BW", (v - 1 - c) * p + r, i) for i, c in table]
        warmup = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
        order: list[Pass] = forwards[:warmup]
        for forward, backward in zip_longest(forwards[warmup:], backwards):
            order += [forward, backward] if forward else [backward]
        orders.append(order)
    return orders


def zero_bubble(p: int, m: int, *, h2: bool) -> Orders:
    """Return the order of passes in ZB-H1, or in ZB-H2 if `h2` is true (arXiv 2401.10241).

    Device r defers the gradients of weights of r micro-batches in ZB-H1, and of 2r in ZB-H2.
    """
    orders = one_forward_one_backward(p, m, (lambda r: 2 * (p - r) - 1) if h2 else None, kind="B")
    for r, order in enumerate(orders):
        max_deferred, new_order, deferred = (2 * r if h2 else r), [], list[int]()
        for kind, _, i in order:
            new_order.append((kind, r, i))
            if kind == "B":
                deferred.append(i)
                if len(deferred) > max_deferred:
                    new_order.append(("W", r, deferred.pop(0)))
        orders[r] = [*new_order, *(("W", r, i) for i in deferred)]
    return orders


def orders_of(passes: Passes) -> Orders:
    """Return the order of passes on each device in a step."""
    p, m, schedule = len(passes.forward_s), passes.microbatches, passes.schedule
    if schedule == "interleaved" and passes.virtual > 1:
        return interleaved(p, m, passes.virtual)
    if schedule in ("1f1b", "interleaved"):
        return one_forward_one_backward(p, m)
    if schedule == "gpipe":
        return one_forward_one_backward(p, m, lambda r: m)
    if schedule in ("zb-h1", "zb-h2"):
        return zero_bubble(p, m, h2=schedule == "zb-h2")
    raise ValueError(f"the order of passes in {schedule} is not simulated")


def public(name: str, **changes: Any) -> Model:
    """Return a public model, with other values of some of its fields."""
    return dataclasses.replace(model_from(name, base=Path()), **changes)


LLAMA = public("meta-llama/Llama-2-7b-hf")
LATENT: dict[str, Any] = {"multi_latent_attention": True, "kv_lora_rank": 512}
LATENT |= {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_16B = Model(
    name="deepseek-16b-a3b-like",
    num_layers=27,
    hidden_size=2048,
    ffn_hidden_size=11264,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=128,
    vocab_size=151851,
    num_moe_experts=64,
    moe_router_topk=6,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=2816,
    moe_first_dense_layers=1,
    **LATENT,
)
MOE = dataclasses.replace(LLAMA, num_layers=24, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=4096)

ONES = ("data", "tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "micro_batch")
STATES = ("sharded_optimizer", "sequence_parallel", "selective", "uniform", "block")
ZEROS = (*STATES, "expert_groups", "first_layers", "last_layers", "split")
NEUTRAL = {**dict.fromkeys(ONES, 1.0), **dict.fromkeys(ZEROS, 0.0), "microbatches": 8.0}
NODE = Level(name="node", devices=8, bytes_per_second=400e9, latency_seconds=5e-6)
NETWORK = Level(name="network", devices=1024, bytes_per_second=50e9, latency_seconds=20e-6)
TOPOLOGY = Topology(levels=(NODE, NETWORK))


def layout(**values: Any) -> Layout:
    """Return candidates: one, or as many as the longest value has."""
    arrays = np.broadcast_arrays(*[np.asarray(value, dtype=np.float64) for value in (NEUTRAL | values).values()])
    return Layout(**dict(zip(NEUTRAL | values, (np.atleast_1d(array) for array in arrays), strict=True)))


def train(model: Model = LLAMA, **values: Any) -> Training:
    """Return the work of a step."""
    return Training(model=model, **{"sequence": 4096, "global_batch": 64, "precision": "bf16", **values})


def plain_costs(workspace_bytes: float = 0.0) -> Costs:
    """Return the costs of a device without a memory limit."""
    device = PlainMemory(capacity=None, workspace=workspace_bytes)
    return dataclasses.replace(tasks.costs(tasks.task()), memory=device)


def training_memory(work: Training, split: Layout, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of the worst stage of each candidate."""
    return memory_in_use(work, split, plain_costs(workspace_bytes)).memory


def stage_of_rank(work: Training, split: Layout, rank: float) -> Stage:
    """Return the pipeline stage of a global rank of each candidate, in Megatron's rank order tp-cp-ep-dp-pp."""
    index = np.minimum(np.floor(rank / (split.tensor * split.context * split.data)), split.pipeline - 1.0)
    return stage(work.model, split, index, work.options)


def rank_memory(work: Training, split: Layout, rank: float, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of a global rank of each candidate."""
    (found,) = stages_in_use(work, split, plain_costs(workspace_bytes), [stage_of_rank(work, split, rank)])
    return found.memory


def state_bytes(component: Mapping[str, FloatArray]) -> FloatArray:
    """Return what a component of the table takes besides activations."""
    names = ("weights_bytes", "gradients_bytes", "main_params_bytes", "optimizer_bytes")
    return sum((component[name] for name in names), np.zeros(()))


def random_layouts(draw: np.random.Generator, model: Model, number: int = 24) -> Layout:
    """Return candidates with all kinds of splits and nothing recomputed."""
    data, tensor = draw.choice([1.0, 2.0, 8.0], number), draw.choice([1.0, 2.0, 4.0], number)
    pipes = draw.choice([1.0, 2.0, 4.0], number)
    expert = np.minimum(draw.choice([1.0, 2.0, 8.0], number), data) if model.num_moe_experts else np.ones(number)
    return layout(
        data=data,
        tensor=tensor,
        pipeline=pipes,
        virtual=np.where(pipes > 1, draw.choice([1.0, 2.0], number), 1.0),
        context=draw.choice([1.0, 2.0], number),
        expert=expert,
        expert_tensor=tensor,
        micro_batch=draw.choice([1.0, 4.0], number),
        microbatches=draw.choice([1.0, 2.0, 16.0], number),
        sharded_optimizer=draw.choice([0.0, 1.0], number),
        sequence_parallel=draw.choice([0.0, 1.0], number),
    )
