"""Predicts the step of a job of reinforcement learning from the predictions of its trainer and its rollout.

- Generation: the serving simulation of all samples at once. The longest answers decode alone, and end it.
- Log-probabilities: forward passes of the trainer over all samples, a third of a step without recompute. A pass holds
  its micro-batch's logits in 16 bits, unless the framework computes them in tiles.
- Training: the trainer's step for each mini-batch, with packed micro-batches.
- Rewards: the time of functions, and a forward pass of a reward model, whose weights stay on the trainer's devices.
- Refit: the new weights are gathered on each instance of the rollout.
- Swap: what moves between device and host because a colocated trainer and rollout run in turn.

On colocated devices, and on-policy, the parts follow each other. With staleness, generation overlaps with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from flagcore_models.layers import experts_of, head_of, weights_by_group

from flagcore.contracts import Costs
from flagcore.domain.model import Model
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns, FloatArray, KnobValue
from flagcore.domain.spec import Adapter, Task
from flagcore_rl import roles
from flagcore_rl.job import RlSpec, job_of, packs, tokens_of

FORWARD = 1.0 / 3.0
"""The share of a forward pass in a step without recompute: backward computes two products for each of forward."""
FORWARD_PARTS = {"compute_s": FORWARD, "pp_bubble_s": FORWARD} | dict.fromkeys(
    ("tp_comm_s", "cp_comm_s", "ep_comm_s", "pp_comm_s"), 0.5
)
"""The same for each part of a trainer's step that forward passes have. Backward repeats each collective of forward."""
MEMORY = ("static_bytes", "peak_allocated_bytes", "reserved_bytes", "device_used_bytes")
"""The bytes of a device that a role's engine predicts. Used are also the contexts of processes, and libraries."""
WAITS = ("trainer_waits_s", "rollout_waits_s")
"""Figures: seconds of a step in which the devices of a role wait for the other role. On shared devices, none waits."""
AWAKE_BYTES = 2.0 * 2**30
"""What a rollout that sleeps keeps on a device: its context, and graphs. vLLM states 1 to 3 GiB (sleep mode)."""


UNUSED = "unused_bytes"
"""Figure: bytes of a device outside of the rollout's share, where this share is too small for a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What a framework adds to its engines: a row of `frameworks.yaml`.

    - `sample_s`, `step_s`: seconds for each sample and each step that overlap with nothing: data, rewards, advantages.
    - `memory_share`: the usual share of a device's memory for the rollout.
    - `refit_s`: seconds of a refit besides the transfer.
    - `refit_rate`, `apart_rate`: bytes of all weights per second that a refit of a colocated rollout, and of one on
      other devices, reaches at most.
    - `interval`: an 80% interval of measured over predicted seconds of a step.
    - `rollout`: overheads of the serving engine that differ in the framework, by name, in seconds; those that a plugin
      gives for a chip and the framework replace them.
    - `pads_stages`: whether packed micro-batches are padded to the longest one where there are several pipeline stages.
    - `releases`: the releases whose keys and logs are known.
    """

    title: str
    distribution: str
    sample_s: float
    step_s: float
    memory_share: float
    refit_s: float
    refit_rate: float
    apart_rate: float
    interval: tuple[float, float]
    rollout: Mapping[str, float]
    pads_stages: bool
    releases: str


class _Trained(NamedTuple):
    """Seconds of training and of one pass of log-probabilities, and bytes of a device.

    `memory`: as named in `MEMORY`. `shares`: the number of devices that divide the weights. `flops`: returns the
    operations of a step of the trainer.
    """

    training_s: float
    forward_s: float
    memory: FloatArray
    weights: float
    shares: float
    flops: Callable[[], float]


class _Rolled(NamedTuple):
    """Seconds of generation, and bytes of a device. `memory`: as named in `MEMORY`. `unused`: those beside a share of
    the memory that is too small."""

    generation_s: float
    memory: FloatArray
    weights: float
    unused: float


Values = dict[str, KnobValue]


@lru_cache(maxsize=16)
def sizes_of(model: Model) -> tuple[float, float]:
    """Return the numbers of weights of a model, and of its routed experts."""
    weights = weights_by_group(model)
    return float(sum(weights.values())), float(weights.get("experts", 0))


@lru_cache(maxsize=16)
def _active(model: Model) -> float:
    """Return the number of weights with which a model multiplies a token."""
    (weights, routed), experts = sizes_of(model), experts_of(model)
    return weights - routed * (1.0 - experts.chosen / experts.count if experts else 0.0)


def predict(
    task: Task, columns: Columns, costs: Costs, framework: Framework, decode: Callable[[str, int], KnobValue]
) -> Predictions:
    """Return the prediction of each candidate. `decode` returns the value of a knob for its code."""
    work = job_of(task)
    rows = next(iter(columns.values())).size
    decoded = [[decode(name, code) for code in values.tolist()] for name, values in columns.items()]
    candidates = [dict(zip(columns, values, strict=True)) for values in zip(*decoded, strict=True)]
    for each in candidates:  # threads of a process split matrices, too
        tensor, threads = each.get("tensor_model_parallel_size"), each.pop(roles.THREADS, 1)
        each["tensor_model_parallel_size"] = int(tensor or 1) * int(threads or 1)
    asked = replace(task, spec=replace(task.spec, space={}, baseline=None))
    if not (_last and _last[0] == asked and _last[1] is costs):
        _last[:] = asked, costs, {}, {}
    trained = _once(
        _last[2],
        candidates,
        lambda name: not name.startswith(roles.ROLLOUT) or name == roles.DEVICES,
        lambda found: _train(task, found, costs, framework),
    )
    rolled = _once(
        _last[3],
        candidates,
        lambda name: name.startswith(roles.ROLLOUT) or name == roles.STALENESS,
        lambda found: _roll(task, found, costs, framework),
    )

    @cache
    def refit_s(apart: bool) -> float:
        weights = 2.0 * sizes_of(task.spec.model)[0]
        return framework.refit_s + _refit(task, weights, costs, framework, apart=apart)

    @cache
    def copy_s(size: float) -> float:
        return float(np.nan_to_num(costs.kernels.host_copy_seconds(np.array([size]))[0]))

    about = zip(candidates, trained, rolled, strict=True)
    steps = [_step(task, values, train, roll, framework, refit_s, copy_s) for values, train, roll in about]
    parts: dict[str, FloatArray] = {name: np.array([times[name] for times, _bytes in steps]) for name in steps[0][0]}
    memory = np.array([bytes_of for _times, bytes_of in steps]).T
    figures = {name: parts.pop(name) for name in ("whole_generation_s", *WAITS, UNUSED)}
    if not figures[UNUSED].any():
        del figures[UNUSED]
    total: FloatArray = np.sum(list(parts.values()), axis=0)
    static, peak, reserved, used = memory
    capacity = costs.memory.capacity_bytes()
    tokens = work.step_tokens / total / task.cluster.devices
    return Predictions(
        step_time_s=total,
        low_s=total * framework.interval[0],
        high_s=total * framework.interval[1],
        time_s=parts,
        static_bytes=static,
        activation_bytes=peak - static,
        peak_allocated_bytes=peak,
        reserved_bytes=reserved,
        device_used_bytes=used,
        worst_stage=np.zeros(rows, dtype=np.int64),
        capacity_bytes=capacity,
        model_flops=_steps(work) * trained[0].flops() * (1 + work.critic),
        figures={"generation_s": figures.pop("whole_generation_s"), "tokens_per_second_per_device": tokens, **figures},
    )


_last: list[Any] = []
"""The last task without its space, its costs, and what is known of its trainers and rollouts: a plan predicts what it
lists, and what its baseline comes from, again."""


def _once(
    known: dict[tuple[Any, ...], Any],
    candidates: list[Values],
    needed: Callable[[str], bool],
    run: Callable[[list[Values]], list[Any]],
) -> list[Any]:
    """Return the results of `run` for each candidate, which is run once for equal values of the needed knobs.

    `known`: the results of earlier calls, which are added to.
    """
    names = tuple(filter(needed, candidates[0]))
    keys: list[tuple[Any, ...]] = [(names, *map(values.__getitem__, names)) for values in candidates]
    if new := [key for key in dict.fromkeys(keys) if key not in known]:
        known.update(zip(new, run([dict(zip(names, key[1:], strict=True)) for key in new]), strict=True))
    return [known[key] for key in keys]


def _stacked(engine: Any, task: Task, candidates: list[Values]) -> Columns:
    each = [engine.columns(task, values) for values in candidates]
    return {name: np.concatenate([columns[name] for columns in each]) for name in each[0]}


def batches(
    work: RlSpec, values: Mapping[str, Any], samples: int, replicas: int, *, forward: bool, pads_stages: bool = False
) -> tuple[int, int, int]:
    """Return the tokens of a sequence, the sequences of a micro-batch, and all sequences of `samples` samples.

    Sequences are as long as the mean sample of a micro-batch. Replicas have equally many micro-batches. With
    `pads_stages` and several pipeline stages, packed micro-batches are as long as the longest of them.
    """
    prefix = "logprob_batch" if forward else "micro_batch"
    tokens = float(tokens_of(work.drawn).mean()) * samples
    size = int(values.get(f"{prefix}_size") or values.get("micro_batch_size") or 1)
    if work.packing:
        most = int(values.get(f"{prefix}_tokens") or values.get("micro_batch_tokens") or work.longest)
        number, padded = packs(work.drawn, samples, max(most, work.longest))
    else:
        number, padded = -(-samples // size), 0
    number = replicas * -(-number // replicas)
    held = max(round(samples / number), 1)
    is_padded = pads_stages and padded and int(values.get("pipeline_model_parallel_size") or 1) > 1
    return max(round((padded if is_padded else tokens / number) / held), 1), held, number * held


def _steps(work: RlSpec) -> int:
    return work.epochs * -(-work.step_samples // work.optimizer_samples)


@roles.keys_of("rl.trainer.")
def _train(task: Task, candidates: list[Values], costs: Costs, framework: Framework) -> list[_Trained]:
    work = job_of(task)
    engine = roles.engine_of(work.trainer.engine, "rl.trainer.engine")
    counted: str = getattr(engine, "count_column", "")  # then rows of a task may have other batches than the task
    groups: dict[tuple[int, int, int, Adapter | None], list[tuple[int, int, int, bool]]] = {}
    found, memory = np.full((4, len(candidates)), np.nan), np.full((len(MEMORY), len(candidates)), np.nan)
    logits = np.zeros(len(candidates))
    flops: dict[int, Callable[[], float]] = {}
    weights, experts = (2.0 * number for number in sizes_of(task.spec.model))
    steps = _steps(work)
    is_sharded = any(knob.name == roles.SHARD for knob in engine.knobs)
    for row, values in enumerate(candidates):
        devices = task.cluster.devices - int(values.get(roles.DEVICES) or 0)
        tensor, pipeline, replicas = roles.layout_of(values, devices)
        expert = max(int(values.get("expert_model_parallel_size") or 1) / tensor, 1.0)
        found[3, row] = tensor * pipeline * (roles.shards_of(values, replicas) if is_sharded else 1)
        found[2, row] = (weights - experts + experts / expert) / found[3, row]
        for forward in (False, True):
            samples = work.step_samples if forward else work.optimizer_samples
            pads = framework.pads_stages
            sequence, held, batch = batches(work, values, samples, replicas, forward=forward, pads_stages=pads)
            key = (devices, sequence, 0 if counted else batch, None if forward else work.trainer.adapter)
            groups.setdefault(key, []).append((row, held, batch, forward))
    for (devices, sequence, _batch, adapter), members in groups.items():
        part_of = partial(roles.train_task, task, engine, devices, sequence, adapter=adapter)
        part = part_of(batch=members[0][2])
        values_of = partial(roles.train_values, engine, devices=devices)
        rows = [values_of(candidates[row], micro_batch=held, recompute=not fwd) for row, held, _, fwd in members]
        own, columns = costs.of(part.cluster, part.spec.work.engine), _stacked(engine, part, rows)
        whole = 0.0 if part.spec.train.assumed else 2.0 * head_of(task.spec.model).logits
        if counted:
            sizes = columns["micro_batch_size"] * columns["data_parallel_size"]
            columns = {**columns, counted: np.array([batch for _row, _held, batch, _fwd in members]) // sizes}
        predictions = engine.predict(part, columns, own)
        times = predictions.time_s
        passes = [share * times[name] for name, share in FORWARD_PARTS.items() if name in times]
        forward_s = np.sum(passes, axis=0) if passes else FORWARD * predictions.step_time_s
        for place, (row, held, batch, forward) in enumerate(members):
            if forward:
                found[1, row] = forward_s[place]
                _tensor, pipeline, replicas = roles.layout_of(candidates[row], devices)
                logits[row] = whole * held * sequence * pipeline * replicas / devices
            else:
                found[0, row] = steps * predictions.step_time_s[place]
                is_known, alone = batch == members[0][2], partial(_flops, engine, part_of, batch, rows[place], own)
                flops[row] = partial(float, predictions.model_flops) if is_known else alone
                memory[:, row] = [getattr(predictions, name)[place] for name in MEMORY]
    memory[1:] += np.maximum(memory[0] + logits - memory[1], 0.0)
    return [
        _Trained(training, forward, memory[:, row], held, shares, flops[row])
        for row, (training, forward, held, shares) in enumerate(found.T.tolist())
    ]


def _flops(engine: Any, part_of: Callable[..., Task], batch: int, values: Values, costs: Costs) -> float:
    """Return the operations of a step with another global batch than that of the rows that are predicted together."""
    part = part_of(batch=batch)
    return float(engine.predict(part, engine.columns(part, values), costs).model_flops)


@roles.keys_of("rl.rollout.")
def _roll(task: Task, candidates: list[Values], costs: Costs, framework: Framework) -> list[_Rolled]:
    work = job_of(task)
    engine = roles.engine_of(work.rollout.engine, "rl.rollout.engine")
    groups: dict[tuple[int, int], list[int]] = {}
    for row, values in enumerate(candidates):
        devices = int(values.get(roles.DEVICES) or task.cluster.devices)
        groups.setdefault((devices, int(values.get(roles.STALENESS) or 0)), []).append(row)
    found: dict[int, _Rolled] = {}
    for (devices, staleness), members in groups.items():
        part = roles.serve_task(task, devices, staleness)
        own = costs.of(part.cluster, part.spec.work.engine)
        own = replace(own, overheads={**framework.rollout, **costs.overheads, **own.overheads})
        rows = [roles.serve_values(engine, candidates[row], devices, framework.memory_share) for row in members]
        for start in range(0, len(rows), 64):  # so that all are simulated
            chosen = members[start : start + 64]
            predictions = engine.predict(part, _stacked(engine, part, rows[start : start + 64]), own)
            for place, row in enumerate(chosen):
                seconds = work.step_samples / predictions.figures["requests_per_s"][place]
                found[row] = _Rolled(
                    float(seconds),
                    np.array([getattr(predictions, name)[place] for name in MEMORY]),
                    float(predictions.static_bytes[place] - predictions.figures["kv_cache_bytes"][place]),
                    float(predictions.figures[UNUSED][place]) if UNUSED in predictions.figures else 0.0,
                )
    return [found[row] for row in range(len(candidates))]


def _step(
    task: Task,
    values: Mapping[str, Any],
    trained: _Trained,
    rolled: _Rolled,
    framework: Framework,
    refit_s: Callable[[bool], float],
    copy_s: Callable[[float], float],
) -> tuple[dict[str, float], FloatArray]:
    """Return the seconds of the parts of a step, and bytes as in `MEMORY`: static ones of the trainer, and others of
    the fuller device or phase, which also has the static ones where it holds less in all. `refit_s`: seconds in which
    the weights reach a rollout that is apart or not. `copy_s`: seconds of a copy of so many bytes between host and
    device."""
    work = job_of(task)
    passes = work.old_logprobs + work.reference + work.critic
    apart, staleness = values.get(roles.DEVICES), int(values.get(roles.STALENESS) or 0)
    training = trained.training_s * (1 + work.critic)
    logprobs, judge = trained.forward_s * passes, 0.0
    refit = refit_s(bool(apart))
    if work.reference and not work.trainer.adapter:
        # the policy moves to the host, the reference to the device, and the policy back
        logprobs += 3.0 * copy_s(trained.weights)
    static, _peak, reserved, used = trained.memory
    swap, states = 0.0, max(static - trained.weights, 0.0)
    stays = static
    if not apart:
        moved = {"none": 0.0, "optimizer": states, "all": static}[work.trainer.offload]
        stays = static - moved
        asleep = rolled.weights if work.rollout.sleeps else 0.0
        swap = 2.0 * (1 + work.critic) * copy_s(moved) + copy_s(asleep)
    critic = stays * work.critic  # what is not on the host while the policy trains
    rewards = framework.step_s + framework.sample_s * work.step_samples if work.reward_s is None else work.reward_s
    if work.reward:
        rewards += trained.forward_s * _active(work.reward) / _active(task.spec.model)
        judge = 2.0 * sizes_of(work.reward)[0] / trained.shares
    times = {"logprobs_s": logprobs, "training_s": training, "refit_s": refit, "swap_s": swap, "rewards_s": rewards}
    exposed, trained_s = rolled.generation_s, logprobs + training + rewards
    if apart and staleness:
        exposed = max(0.0, rolled.generation_s - trained_s)
    waits = (exposed, trained_s - (rolled.generation_s - exposed)) if apart else (0.0, 0.0)
    times = {"generation_s": exposed, **times, "whole_generation_s": rolled.generation_s}
    times |= dict(zip(WAITS, waits, strict=True))
    only_used = np.array([0.0, 0.0, 0.0, 1.0])
    training_phase, rollout_phase = trained.memory + judge + critic, rolled.memory
    if not apart:  # the trainer's process keeps its context, and a rollout that sleeps its own
        training_phase = training_phase + (only_used * AWAKE_BYTES if work.rollout.sleeps else rolled.memory)
        rollout_phase = rollout_phase + stays + judge + critic + only_used * (used - reserved)
    fuller = max(training_phase, rollout_phase, key=lambda memory: float(memory[-1]))
    times[UNUSED] = rolled.unused * (fuller is rollout_phase)
    own = static + judge + critic  # of the trainer, unless the fuller phase has less in all
    return times, np.array([own if own <= fuller[1] else fuller[0], *fuller[1:]])


def _refit(task: Task, weights: float, costs: Costs, framework: Framework, *, apart: bool) -> float:
    """Return the seconds in which the weights reach the rollout.

    Each rank of a colocated trainer gathers all weights, tensor by tensor. Otherwise a rank of the trainer broadcasts
    them, at the rate of its link to the rollout. Both are not faster than the framework's own work.
    """
    group, devices = task.cluster.groups[0], task.cluster.devices
    kind, ranks = ("send", 2) if apart else ("all_gather", devices)
    stride = group.devices_per_node if apart and group.nodes > 1 else 1
    sizes = (np.array([weights]), np.array([ranks]), np.array([stride]))
    seconds = float(np.nan_to_num(costs.collectives.seconds(kind, *sizes)[0])) if devices > 1 else 0.0
    return max(seconds, weights / (framework.apart_rate if apart else framework.refit_rate))
