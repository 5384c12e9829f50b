"""Effective settings of an engine, the launch of one of its servers, and defaults of published runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import knobs as common_knobs
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, longest

PORT = "{port}"
"""Placeholder in a command line for the port, which is chosen when the server starts."""
HEAD, HEAD_PORT = "{head}", "{head_port}"
"""Placeholders in a command line of an instance on several hosts: its first host, and a free port there."""


def address(task: Task) -> str:
    """Return the address on which servers listen: all of other hosts, so that the client reaches them."""
    return "0.0.0.0" if task.spec.on_each_host else "127.0.0.1"


GRAPH_TOKENS = 512
"""The largest batch that engines capture as a graph by default."""

Fetch = Callable[[str], str]
"""Returns the text behind a path of a running server. Raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Effective settings of candidates, by columns, with the engine's own defaults for knobs that are not set.

    Sizes count devices, sequences and tokens. `devices` are those of one instance: tensor x pipeline x data, or, where
    devices are CPU cores, its threads. `graphs` False is eager mode. `memory_fraction` is the share of a device's
    memory for weights, activations and cache; NaN if the cache has its own `cache_bytes` on each device, which are
    NaN otherwise. `max_batched_tokens` bounds the prompt tokens of one iteration, and all its tokens if the engine
    counts both; `max_running` bounds its sequences; both are of one attention DP group. `context_len` bounds one
    sequence. `pass_tokens` is what one pass through the model takes: a larger iteration has several. If `chunked` is
    False a prompt is computed in one piece. `on_device` is the share of the layers, counting the output head as one,
    that devices have if the host has the others; None: all.
    """

    instances: IntArray
    devices: IntArray
    tensor: IntArray
    pipeline: IntArray
    data: IntArray
    expert: IntArray
    max_running: IntArray
    max_batched_tokens: IntArray
    pass_tokens: IntArray
    block_size: IntArray
    context_len: IntArray
    chunked: IntArray
    graphs: IntArray
    prefix_caching: IntArray
    memory_fraction: FloatArray
    cache_bytes: FloatArray
    cache_element_bytes: FloatArray
    on_device: FloatArray | None = None

    @classmethod
    def of(cls, task: Task, columns: Columns, **own: IntArray | FloatArray) -> Settings:
        """Return the engine's `own` settings, completed with those of the common knobs, which `columns` may lack.

        Without further settings one pass computes a whole iteration, prompts are chunked, no graphs are captured, and
        the cache takes a share of the memory.
        """
        ones = np.ones_like(columns[INSTANCES])
        unknown = np.full(ones.shape, np.nan)
        tensor, pipeline, data, expert = (columns.get(knob, ones) for knob in (TP, PP, DP, EP))
        context = columns.get(common_knobs.CONTEXT_KNOB.name, 0 * ones)
        common: dict[str, Any] = {
            "instances": columns[INSTANCES],
            "devices": tensor * pipeline * data,
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data,
            "expert": expert,
            "pass_tokens": own["max_batched_tokens"],
            "block_size": ones,
            "context_len": common_knobs.or_default(context, longest(task.spec.serve.loads)),
            "chunked": ones,
            "graphs": 0 * ones,
            "prefix_caching": columns.get(common_knobs.PREFIX_KNOB.name, 0 * ones),
            "memory_fraction": unknown,
            "cache_bytes": unknown,
        }
        return cls(**common | own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRuns:
    """Settings of published runs that their job records leave out.

    `cache_type` is the 8-bit cache of runs with narrow weights on chips that compute in 4 bits. `memory_flag` is the
    flag for the share of memory, which runs raise if weights fill most of a device. `release` is that of the time in
    which such points were measured. `engine_args` are other flags that the published recipes have.
    """

    cache_type: KnobValue = None
    memory_flag: str = ""
    release: str = ""
    engine_args: Mapping[str, EngineArg] = field(default_factory=dict)
