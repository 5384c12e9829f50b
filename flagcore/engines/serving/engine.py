"""A serving engine is one record: its knobs, rules, command line, log lines and overheads. All else is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import knobs as common_knobs
from flagcore.engines.serving.common import metrics
from flagcore.engines.serving.common.command_line import Program
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, longest
from flagcore.engines.serving.common.weights import fewest_devices
from flagcore.engines.serving.load.result import COMPLETIONS
from flagcore.engines.serving.model.work import Overheads, overheads_of

PORT = "{port}"
"""Placeholder in a command line for the port, which is chosen when the server starts."""

GRAPH_TOKENS = 512
"""The largest batch that engines capture as a graph by default."""

Fetch = Callable[[str], str]
"""Returns the text behind a path of a running server. Raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an engine does with candidates, by columns, with the engine's own defaults for knobs that are not set.

    Sizes count devices, sequences and tokens. `devices` are those of one instance: tensor x pipeline x data, or, where
    devices are CPU cores, its threads. `graphs` False is eager mode. `memory_fraction` is the share of a device's
    memory for weights, activations and cache; NaN if the cache has `cache_bytes` of its own on each device, which are
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
class Server:
    """How one instance is started. `argv` has `PORT` in place of the port."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One serving engine. Knows no vendor. If releases differ, the version of the spec decides."""

    name: str
    program: Program
    modules: Mapping[str, str]
    """What its program imports, and the pip requirement that installs it."""
    rules: Callable[[Task], tuple[Rule, ...]]
    """Returns what the engine rejects."""
    settings: Callable[[Task, Columns], Settings]
    server: Callable[[Task, Mapping[str, KnobValue], tuple[int, ...]], Server]
    """Returns how one instance with its own knob values is started, on some CPU cores if devices are cores."""
    merges: Callable[[Task], tuple[Merge, ...]] = lambda task: ()
    """Returns which candidates are the same to the engine."""
    effective: Callable[[Fetch, str], Mapping[str, KnobValue]] = lambda fetch, log: {}
    """Returns, from a running server and its log, the knob values in use; a knob that is not reported is left out."""
    memory: Callable[[str], Mapping[str, float]] = lambda log: {}
    """Returns from a log weights_gib, kv_cache_gib, graphs_gib and compute_gib (GiB on the fullest device) and
    kv_cache_tokens (of the whole instance), as far as they are reported."""
    api: str = COMPLETIONS
    """Path of the API that takes prompts of token ids: COMPLETIONS or GENERATE."""
    health: str = "/health"
    """Path that answers 200 when requests are served."""
    split_by: str = TP
    """The knob that by default takes as many devices as the weights need."""
    host_times: tuple[float, float] | None = None
    """Seconds of an iteration and of each of its sequences where devices are CPU cores."""
    receive_flag: str = ""
    """The flag for the iterations between two looks at new requests."""
    graph_tokens: Callable[[Task], int] = lambda task: GRAPH_TOKENS
    """Returns the largest batch that the engine captures as a graph."""
    published: PublishedRuns = PublishedRuns()
    untested: str = ""
    """Why figures of this engine are less certain than others; empty: it was run and measured."""

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs and the values of a task, in the order in which they are crossed. Raises SpecError."""
        return common_knobs.axes(task, self.program.knobs, self.program.parse(task.spec).fixed)

    def parse(self, values: Mapping[str, object]) -> dict[str, KnobValue]:
        """Return knob values of a spec or a job record as values of the axes. Raises SpecError."""
        return common_knobs.parse(values, self.program.knobs, self.name)

    def defaults(self, task: Task) -> dict[str, KnobValue]:
        """Return the candidate that runs if no knob is set, on as many devices as the weights need."""
        neutral = {knob.name: knob.neutral for knob in self.program.knobs}
        return neutral | {self.split_by: fewest_devices(task)} | self.program.parse(task.spec).fixed

    def read_counters(self, fetch: Fetch) -> Mapping[str, float]:
        return metrics.counters(fetch, self.program.counters)

    def overheads_for(self, task: Task, *, on_host: bool) -> Overheads:
        """Return the overheads for a task.

        `on_host`: there is no device, the CPU that schedules also computes, and small kernels are no launches.
        """
        serve = task.spec.serve
        found = overheads_of(self.program.overheads, serve.engine_version)
        if on_host:
            found = replace(found, attention=0.0, latent=0.0, ffn=0.0, experts={})
            if self.host_times is not None:
                iteration, sequence = self.host_times
                found = replace(found, iteration=iteration, sequence=sequence, request=3e-3, entry=0.5e-3)
        receive = serve.engine_args.get(self.receive_flag)
        return replace(found, receive=receive) if isinstance(receive, int) and receive > 0 else found
