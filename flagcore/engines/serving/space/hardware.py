"""The devices of a task, and the names of the knobs that serving engines share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flagcore.domain.model import Vision
from flagcore.domain.serving import MAX_LENGTH_RATIO, OPEN_LOOP_FLIGHT, Load
from flagcore.domain.space import IntArray, KnobValue
from flagcore.domain.spec import Task
from flagcore.engines.serving.load.images import DELIMITERS, image_tokens
from flagcore.engines.serving.load.traces import cached_trace
from flagcore.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices that a candidate may use.

    `cards` is their number, `memory_bytes` the memory of one device, NaN if unknown. With `on_cores` devices are CPU
    cores, which share the machine's memory; instances are pinned to cores. With `fp8` the chip has a peak rate in fp8.
    A host has `per_host` of the devices, all if there is one host, or several kinds of them.
    """

    cards: int
    hosts: int
    per_host: int
    on_cores: bool
    memory_bytes: float
    fp8: bool

    @classmethod
    def of(cls, task: Task) -> Hardware:
        """Return the hardware of a task, from its first chip. Raises SpecError for too many cards."""
        group, cards = task.cluster.groups[0], task.spec.serve.cards
        if cards is not None and cards > task.cluster.devices:
            problem = f"is more than the {task.cluster.devices} devices of the cluster"
            fix = f"use at most {task.cluster.devices}, or a larger cluster"
            raise SpecError(key="auto_tuner.cards", value=cards, problem=problem, fix=fix)
        chip = group.chip
        memory = group.memory_bytes or (chip.memory_bytes.value if chip.memory_bytes else math.nan)
        several = len(task.cluster.groups) == 1 and group.nodes > 1
        return cls(
            cards=cards or task.cluster.devices,
            hosts=group.nodes if several else 1,
            per_host=group.devices_per_node if several else task.cluster.devices,
            on_cores=chip.link is not None and chip.link.topology == "shared-memory",
            memory_bytes=float(memory),
            fp8="fp8" in chip.dense_flops_per_second,
        )

    def cores(self, first: int, count: int) -> tuple[int, ...]:
        """Return `count` of the CPU cores that this process may use, from the index `first` on; for other hosts, of all
        cores.

        The tuple is empty if devices are not cores. If the process may use fewer cores, the last ones are reused.
        """
        if not self.on_cores:
            return ()
        if self.hosts > 1:
            return tuple(range(first, first + count))
        own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return tuple(own[first : first + count]) or tuple(own[-count:])

    def share(self, instances: IntArray) -> IntArray:
        """Return the cores of each of `instances`: an even share of those of its host."""
        instances = np.maximum(instances, 1)
        on_host = self.per_host // -(-instances // self.hosts)
        return np.maximum(np.minimum(self.cards // instances, on_host), 1)


def longest_request(loads: tuple[Load, ...], vision: Vision | None, *, estimated: bool = True) -> int:
    """Return the tokens of the longest request, prompt and answer: the upper end of a distribution or a trace.

    Without `estimated`, texts whose tokens are not counted are ignored; otherwise they have at most one token per
    `MIN_TOKEN_BYTES`, and a chat `CHAT_TOKENS` more. Images have the tokens of the model's `vision` tower. Raises
    SpecError for an unreadable trace.
    """
    lengths = [1]
    for load in loads:
        if load.trace is not None:
            lengths.append(load.prefix_len + _longest_in_trace(load, load.trace, vision, estimated=estimated))
            continue
        spread = MAX_LENGTH_RATIO - 1.0 if load.distribution == "lognormal" else load.range_spread or 0.0
        upper_lengths = [each + math.ceil(round(each * spread, 6)) for each in (load.input_len, load.output_len)]
        lengths.append(load.prefix_len + load.turns * sum(upper_lengths))
        if load.images is not None and vision is not None:
            largest = max(vision.tokens(width, height) for width, height, _ in load.images.buckets) + DELIMITERS
            lengths[-1] += load.images.counts[1] * largest + CHAT_TOKENS * estimated
    return max(lengths)


CHAT_TOKENS = 64
"""Tokens of the template of a chat that a context is sized for: Qwen2.5-VL's has 20 with its system prompt."""


MIN_TOKEN_BYTES = 2
"""Fewest bytes of UTF-8 per token that a context is sized for. English has 4 characters per token, Chinese about 1.5
with 3 bytes each."""


def _longest_in_trace(load: Load, path: str, vision: Vision | None, *, estimated: bool) -> int:
    requests = cached_trace(path, load.turns, load.output_len).first(load.num_prompts)
    lengths = requests.input_len + requests.output_len
    if requests.is_estimated and estimated:
        sizes = np.array([len(text.encode()) for text in requests.texts])
        lengths = np.maximum(lengths, -(-sizes // MIN_TOKEN_BYTES) + requests.output_len)
    if requests.images and vision is not None:
        lengths = lengths + image_tokens(requests.images, vision) + CHAT_TOKENS * estimated
    return int(lengths.max()) if estimated or not requests.is_estimated else 1


def most_images(loads: tuple[Load, ...]) -> int:
    """Return the maximum number of images of a request. Raises SpecError for an unreadable trace."""
    counts = [0]
    for load in loads:
        if load.images is not None:
            counts.append(load.images.counts[1])
        elif load.trace is not None:
            images = cached_trace(load.trace, load.turns, load.output_len).first(load.num_prompts).images
            counts += [len(each) for each in images]
    return max(counts)


def has_images(loads: tuple[Load, ...]) -> bool:
    """Return whether requests have images. Raises SpecError for an unreadable trace."""
    return most_images(loads) > 0


def max_in_flight(loads: tuple[Load, ...]) -> int:
    """Return the maximum number of requests in flight: the concurrency of a load, or all requests of an open loop."""
    return max((load.concurrency or load.num_prompts or OPEN_LOOP_FLIGHT for load in loads), default=1)


INSTANCES = "instances"
PREFILL_DECODE = "prefill_decode"
"""Instances that only prefill and instances that only decode, such as 2xtp2+1xtp4. It replaces all knobs of layouts."""
TP, PP, DP, EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
)
"""DP is attention data parallelism inside one instance. An instance has TP x PP x DP devices, even if the engine's
flags count differently."""


def count(values: Mapping[str, KnobValue], knob: str) -> int:
    """Return the value of a knob that is a count, 1 if it is not set."""
    value = values.get(knob)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
