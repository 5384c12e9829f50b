"""The trainer and the rollout of a job as tasks of their own engines, on their own devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from flagcore_serving.job import Load, ServeSpec
from flagcore_training.frameworks import TILED_LOSS

from flagcore import plugins
from flagcore.contracts import Engine
from flagcore.domain.cluster import Cluster
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Adapter, SettingValue, Task, TrainSpec
from flagcore.errors import SpecError
from flagcore_rl.job import job_of, requests_of

ROLLOUT = "rollout_"
ROLLOUTS = ("vllm", "sglang")
"""The engines of the frameworks' rollouts that are predicted. In commands, others are taken as the first one."""
DEVICES, STALENESS, THREADS = "rollout_devices", "staleness", "threads"
SHARD = "data_parallel_shard_size"
SHARES = ("gpu_memory_utilization", "mem_fraction_static")
SEQUENCES = ("max_num_seqs", "max_running_requests")
"""The knobs of serving engines for the share of the memory, and for the number of answers at once."""

USUAL: Mapping[str, SettingValue] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
USUAL_EXPERTS: Mapping[str, SettingValue] = {
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
"""What the frameworks set in a trainer that has such settings, and for experts: NeMo-RL v0.5.0 `grpo_math_1B.yaml`, and
the bridges of NeMo-RL and verl (Megatron-Bridge, mbridge `qwen3moe.py`)."""


@lru_cache(maxsize=64)
def engine_of(name: str, key: str) -> Engine:
    """Return the engine of a role. Raises SpecError if it is not installed, or no rollout of the frameworks."""
    if key == "rl.rollout.engine" and name not in ROLLOUTS:
        raise SpecError(
            key=key, value=name, problem="is no rollout that is predicted", fix=f"use {' or '.join(ROLLOUTS)}"
        )
    return plugins.find_engine(name, key)


@contextmanager
def keys_of(prefix: str) -> Iterator[None]:
    """Name the keys of a role, such as `rl.trainer.settings`, in a SpecError of its engine."""
    try:
        yield
    except SpecError as error:
        error.key = re.sub(r"\b(train|serve)\.", prefix, error.key)
        raise


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """Return a part of the cluster with that many devices."""
    group = cluster.groups[0]
    per_node = math.gcd(devices, group.devices_per_node) if devices > group.devices_per_node else devices
    return Cluster(groups=(replace(group, nodes=devices // per_node, devices_per_node=per_node),))


def _task(task: Task, work: TrainSpec | ServeSpec, devices: int, objective: str) -> Task:
    spec = replace(task.spec, work=work, space={}, baseline=None, objective=objective)
    return Task(spec=spec, cluster=part_of(task.cluster, devices))


def train_task(
    task: Task, engine: Engine, devices: int, sequence: int, batch: int, adapter: Adapter | None = None
) -> Task:
    """Return the task of the trainer with samples of `sequence` tokens. `engine`: that of the trainer.

    It trains no multi-token prediction: verl's `model.mtp.enable` is false, and TRL and OpenRLHF train transformers.
    TRL's loss has no whole logits (1.16 `trainer/grpo_trainer.py`, `add_fused_lm_head`).
    """
    work = job_of(task)
    settings, kind = dict(work.trainer.settings), None
    if any(knob.name == "recompute_granularity" for knob in engine.knobs):
        experts: Mapping[str, SettingValue] = USUAL_EXPERTS if task.spec.model.experts else {}
        kind, settings = "transformer_engine", {**USUAL, **experts, **settings}
    train = TrainSpec(
        engine=work.trainer.engine,
        precision=work.precision,
        seq_length=sequence,
        global_batch_size=batch,
        implementation=kind,
        settings=settings,
        adapter=adapter,
        assumed={TILED_LOSS: True} if task.spec.work.engine == "trl" else {},
    )
    part = _task(task, train, devices, train.default_objective)
    return replace(part, spec=replace(part.spec, model=replace(part.spec.model, mtp_num_layers=0)))


def layout_of(values: Mapping[str, KnobValue], devices: int) -> tuple[int, int, int]:
    """Return the TP, the PP and the number of replicas of a candidate's trainer on that many devices."""
    tensor, pipeline, context = (
        int(values.get(f"{name}_parallel_size") or 1) for name in ("tensor_model", "pipeline_model", "context")
    )
    return tensor, pipeline, max(devices // (tensor * pipeline * context), 1)


def shards_of(values: Mapping[str, KnobValue], replicas: int) -> int:
    """Return the number of replicas of the trainer that share weights: by default all."""
    return min(int(values.get(SHARD) or replicas), replicas)


def train_values(
    engine: Engine, values: Mapping[str, KnobValue], devices: int, micro_batch: int, *, recompute: bool = True
) -> dict[str, KnobValue]:
    """Return the trainer's knobs for those of a candidate."""
    names = {knob.name for knob in engine.knobs}
    found: dict[str, KnobValue] = {name: value for name, value in values.items() if name in names and value is not None}
    found["micro_batch_size"] = micro_batch
    kind = values.get("activation_checkpointing") if recompute else "none"
    if "recompute_granularity" in names and kind in ("full", "selective"):
        found |= {"use_recompute": True, "recompute_granularity": kind}
        found |= {"recompute_method": "uniform", "recompute_num_layers": 1} if kind == "full" else {}
    elif "activation_checkpointing" in names and kind:
        found["activation_checkpointing"] = kind
    tensor, _pipeline, replicas = layout_of(values, devices)
    shards = shards_of(values, replicas)
    own = {"sequence_parallel": tensor > 1, "use_distributed_optimizer": True, "data_parallel_size": replicas}
    own |= {SHARD: shards, "data_parallel_replicate_size": replicas // shards}
    return found | {name: value for name, value in own.items() if name in names}


MOST_STEPS = 4
"""The most steps whose samples are predicted to be generated at once: more take long to simulate and change little."""


def serve_task(task: Task, devices: int, staleness: int = 0) -> Task:
    """Return the task of the rollout: a burst of all samples of a step, or of those that may be generated at once.

    NeMo-RL starts the samples of the next `staleness` steps (@7ea279ab `async_utils/trajectory_collector.py`,
    generation_lead_steps).
    """
    work, steps = job_of(task), min(max(staleness, 1), MOST_STEPS)
    requests = requests_of(work.drawn) * steps
    load = Load(
        input_len=round(work.prompt_len.mean),
        output_len=round(work.answer_len.mean),
        lengths=requests,
        longest=work.longest,
        distinct=work.prompts * steps,
        num_prompts=len(requests),
        request_rate=math.inf,
    )
    serve = ServeSpec(
        engine=work.rollout.engine,
        loads=(load,),
        precision=work.rollout.precision or work.precision,
        engine_args=work.rollout.engine_args,
        engine_version=work.rollout.engine_version,
    )
    return _task(task, serve, devices, "requests_per_s")


def serve_values(
    engine: Engine, values: Mapping[str, KnobValue], devices: int, usual_share: float
) -> dict[str, KnobValue]:
    """Return the rollout's knobs for those of a candidate, with as many instances as the devices allow."""
    names = {knob.name for knob in engine.knobs}
    tensor, pipeline, data, expert = (
        int(values.get(f"{ROLLOUT}{name}_parallel_size") or 1) for name in ("tensor", "pipeline", "data", "expert")
    )
    found: dict[str, KnobValue] = {"instances": max(devices // (tensor * pipeline * data), 1)}
    found |= {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    found |= {"data_parallel_size": data, "expert_model_parallel_size": expert}
    limit, share = values.get(f"{ROLLOUT}max_num_seqs"), values.get(f"{ROLLOUT}memory_share") or f"{usual_share:g}"
    found |= {name: limit for name in SEQUENCES if name in names and limit is not None}
    return found | {name: share for name in SHARES if name in names}
