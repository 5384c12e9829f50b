"""The devices of a task, and the names of the knobs that serving engines share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flagcore.domain.model import Vision
from flagcore.domain.space import IntArray, KnobValue
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore_serving.job import MAX_CLIENTS, OPEN_LOOP_FLIGHT, Load
from flagcore_serving.load.images import DELIMITERS, image_tokens
from flagcore_serving.load.traces import trace_of


class Hardware(NamedTuple):
    """The devices that a candidate may use.

    - `cards`: the number of devices.
    - `hosts`: the number of hosts; 1 if the cluster has several kinds of devices.
    - `per_host`: devices of one host; all devices if `hosts` is 1.
    - `on_cores`: whether devices are CPU cores, which share the machine's memory. Instances are then pinned to cores.
    - `memory_bytes`: the memory of one device, NaN if unknown.
    - `fp8`: whether the chip has a peak rate in fp8.
    """

    cards: int
    hosts: int
    per_host: int
    on_cores: bool
    memory_bytes: float
    fp8: bool

    @classmethod
    def of(cls, task: Task) -> Hardware:
        """Return the hardware of a task, based on its first kind of chip. Raises SpecError for too many cards."""
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
        """Return the ids of `count` CPU cores, starting with the core at index `first`.

        On one host, only the cores that this process may use are counted; if they are too few, the last ones are
        reused. On several hosts, all cores are counted. The tuple is empty if devices are not cores.
        """
        if not self.on_cores:
            return ()
        if self.hosts > 1:
            return tuple(range(first, first + count))
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return tuple(allowed[first : first + count]) or tuple(allowed[-count:])

    def share(self, instances: IntArray) -> IntArray:
        """Return the number of CPU cores per instance if `instances` instances divide their hosts' cores evenly."""
        instances = np.maximum(instances, 1)
        on_host = self.per_host // -(-instances // self.hosts)
        return np.maximum(np.minimum(self.cards // instances, on_host), 1)


def longest_request(task: Task, *, estimated: bool = True) -> int:
    """Return the number of tokens of the longest possible request of a task, prompt and answer.

    This is the upper end of the length distribution, or the longest request of a trace. An image counts as many tokens
    as the model's `vision` tower makes of it. If `estimated`, texts whose tokens are not counted have one token per
    `MIN_TOKEN_BYTES` bytes, and chats have `CHAT_TOKENS` more; otherwise such texts are ignored. Raises SpecError for
    an unreadable trace.
    """
    lengths, vision = [1], task.spec.model.vision
    for load in task.spec.serve.loads:
        if load.trace is not None:
            lengths.append(load.prefix_len + _longest_in_trace(load, vision, estimated=estimated))
            continue
        if load.lengths:
            upper = max(map(sum, load.lengths))
        elif load.distribution != "uniform":  # a chat of the longest tokens has both prompt and answer in them
            upper = load.longest or load.longest_of(load.input_len) + load.longest_of(load.output_len)
        else:
            both, spread = (load.input_len, load.output_len), load.range_spread or 0.0
            upper = sum(each + math.ceil(round(each * spread, 6)) for each in both)
        lengths.append(load.prefix_len + load.turns * upper)
        if load.images is not None and vision is not None:
            largest = max(vision.tokens(width, height) for width, height, _ in load.images.buckets) + DELIMITERS
            lengths[-1] += load.images.counts[1] * largest + CHAT_TOKENS * estimated
    return max(lengths)


CHAT_TOKENS = 64
"""Tokens of the context that are reserved for a chat template. Qwen2.5-VL's has 20, including its system prompt."""


MIN_TOKEN_BYTES = 2
"""Minimum number of UTF-8 bytes per token, assumed when a context is sized. English has 4 characters per token, Chinese
about 1.5 with 3 bytes each."""


def _longest_in_trace(load: Load, vision: Vision | None, *, estimated: bool) -> int:
    requests = trace_of(load).first(load.num_prompts)
    lengths = requests.input_len + requests.output_len
    if requests.is_estimated and estimated:
        sizes = np.array([len(text.encode()) for text in requests.texts])
        lengths = np.maximum(lengths, -(-sizes // MIN_TOKEN_BYTES) + requests.output_len)
    if requests.images and vision is not None:
        lengths = lengths + image_tokens(requests.images, vision) + CHAT_TOKENS * estimated
    return int(lengths.max()) if estimated or not requests.is_estimated else 1


def most_images(loads: tuple[Load, ...]) -> int:
    """Return the maximum number of images in a request. Raises SpecError for an unreadable trace."""
    counts = [0]
    for load in loads:
        if load.images is not None:
            counts.append(load.images.counts[1])
        elif load.trace is not None:
            counts += map(len, trace_of(load).first(load.num_prompts).images)
    return max(counts)


def max_in_flight(loads: tuple[Load, ...]) -> int:
    """Return the maximum number of requests in flight: the concurrency of a load, or all requests of an open loop.

    A search for the most clients, or for the highest rate, may reach any: it is assumed to reach SEARCHED_FLIGHT.
    """
    flights = (MAX_CLIENTS if load.least_s else load.concurrency or load.num_prompts for load in loads)
    return max((SEARCHED_FLIGHT if each == MAX_CLIENTS else each or OPEN_LOOP_FLIGHT for each in flights), default=1)


SEARCHED_FLIGHT = 512
"""The requests in flight for which the values of knobs are chosen in a search for the most load. A choice."""


INSTANCES = "instances"
PREFILL_DECODE = "prefill_decode"
"""The knob for instances that only prefill and instances that only decode, such as 2xtp2+1xtp4. It replaces all other
layout knobs."""
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
DP, EP = "data_parallel_size", "expert_model_parallel_size"
"""The knobs for parallel sizes. DP is attention data parallelism inside one instance. An instance has TP x PP x DP
devices, even if the engine's flags count differently."""


def count(values: Mapping[str, KnobValue], knob: str) -> int:
    """Return the value of a numeric knob, or 1 if it is not set."""
    value = values.get(knob)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
