"""Effective settings of candidates, and defaults of published runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flagcore.domain.serving import EngineArg
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import Task
from flagcore.engines.serving.space import knobs as common_knobs
from flagcore.engines.serving.space.hardware import DP, EP, INSTANCES, PP, TP, longest_request

GRAPH_TOKENS = 512
"""The default of the largest batch that engines capture as a graph, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Effective settings of candidates as columns, with the engine's defaults for knobs that are not set.

    Sizes count devices, sequences and tokens. `devices` are those of one instance: tensor x pipeline x data, or its
    threads if devices are CPU cores. Without `graphs` the engine runs in eager mode. `memory_fraction` is the share of
    a device's memory for weights, activations and cache, NaN if the cache has a fixed size, `cache_bytes` on each
    device; `cache_bytes` is NaN otherwise. `max_batched_tokens` limits the prompt tokens of one iteration, or all its
    tokens, depending on the engine; `max_running` limits its sequences. Both limits are for one attention DP group.
    `context_len` limits one sequence. `pass_tokens` limits one pass through the model: a larger iteration has several
    passes. Without `chunked` a prompt is computed in one piece. `on_device` is the share of the layers, with the output
    head as one layer, that are on devices and not on the host; None: all. `host_s` are the seconds of an iteration on
    the host if a knob determines them, else NaN. Speculation drafts `drafted` tokens of a sequence per iteration. The
    weights of `quantized` candidates are converted to fp8. The weights of a vision tower are split over `tower_shares`
    ranks, infinity if it is not loaded; None: over the tensor ranks. The host keeps `host_tokens` of the prompts of an
    instance that its cache evicts; None: none.
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
    host_s: FloatArray | None = None
    drafted: IntArray | None = None
    quantized: BoolArray | None = None
    tower_shares: FloatArray | None = None
    host_tokens: FloatArray | None = None

    @classmethod
    def of(cls, task: Task, columns: Columns, **own: IntArray | FloatArray | BoolArray) -> Settings:
        """Return the engine's `own` settings completed with those of the common knobs, which `columns` may lack.

        By default one pass computes a whole iteration, prompts are chunked, no graphs are captured, and the cache takes
        a share of the memory.
        """
        ones = np.ones_like(columns[INSTANCES])
        unknown = np.full(ones.shape, np.nan)
        tensor, pipeline, data, expert = (columns.get(knob, ones) for knob in (TP, PP, DP, EP))
        context = columns.get(common_knobs.CONTEXT, 0 * ones)
        common_settings: dict[str, Any] = {
            "instances": columns[INSTANCES],
            "devices": tensor * pipeline * data,
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data,
            "expert": expert,
            "pass_tokens": own["max_batched_tokens"],
            "block_size": ones,
            "context_len": common_knobs.or_default(
                context, longest_request(task.spec.serve.loads, task.spec.model.vision)
            ),
            "chunked": ones,
            "graphs": 0 * ones,
            "prefix_caching": columns.get(common_knobs.PREFIX, 0 * ones),
            "memory_fraction": unknown,
            "cache_bytes": unknown,
        }
        return cls(**common_settings | own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRuns:
    """Settings of published runs that job records omit.

    `cache_type` is the type of the 8-bit cache of runs with narrow weights on chips that compute in 4 bits.
    `memory_flag` is the flag for the share of memory, which runs raise if the weights fill most of a device. `release`
    is a release from the time of the measurements. `engine_args` are other flags of the published recipes.
    """

    cache_type: KnobValue = None
    memory_flag: str = ""
    release: str = ""
    engine_args: Mapping[str, EngineArg] = field(default_factory=dict)
