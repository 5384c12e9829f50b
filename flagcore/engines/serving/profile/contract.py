"""What an engine tells of itself: everything else about serving is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Spec, Task

PORT = "{port}"
"""Stands in an argument list for the port, which is found when a server starts."""

INSTANCES = "instances"
SIZES = "instance_sizes"
"""Devices of each instance where they are not equal, as a word: 4+2+2. It stands in for the two knobs beside it."""
MEMORY = ("weights_gib", "kv_cache_gib", "graphs_gib", "compute_gib", "kv_cache_tokens")
"""What engines tell of memory: GiB of the device that has most of it, tokens of all caches of the instance."""
TP, PP, DP, EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
)
"""Knobs that all engines may have. `data_parallel_size` is that of attention inside one instance, which takes tensor x
pipeline x data devices, whatever the engine's own flags count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an engine does with a candidate, by columns: its own defaults filled in where a knob is not set.

    Sizes count devices, sequences and tokens. `devices` are those that one instance computes with: tensor x pipeline x
    data, or, where devices are the machine's own cores, those that its threads take. `graphs` False is eager mode.
    `memory_fraction` is the share of a device's memory that weights, activations and cache may take, NaN where the
    cache has `cache_bytes` of its own on each device, which are NaN otherwise. `max_batched_tokens` bounds what one
    iteration computes of prompts, and of all where the engine counts both, `max_running` the sequences in it, both for
    one group of attention DP; `context_len` bounds one sequence. `pass_tokens` is what one pass through the model
    takes: a larger iteration has several. Where `chunked` is False a prompt is computed in one piece. `on_device` is
    the share of the layers, the output head counted as one, that devices have where the host has the others; None: all.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How one instance is started. `argv` has `PORT` where the port belongs."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Engine(Protocol):
    """One serving engine. Knows no vendor; where versions differ, `version` decides."""

    name: str
    modules: Mapping[str, str]
    """What its program imports, and the pip requirement that brings it."""
    health: str
    """Path that answers 200 when requests are served."""

    def ready(self, spec: Spec) -> None:
        """Return if servers can be started here. Raises SpecError or NoDevice with what is in the way, and the fix."""

    def version(self, spec: Spec) -> str:
        """Return the version that would start, without starting it; empty if that cannot be told."""

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs and the values that they may take, in the order in which they are crossed."""

    def values(self, given: Mapping[str, object]) -> dict[str, KnobValue]:
        """Return knob values that a spec or a record has in the words of the axes: on for true, 0.9 as text.

        Names that are no knob of the engine are kept. Raises SpecError for a value that a knob cannot have.
        """

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what the engine refuses, so that it is known before a launch."""

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what is the same to the engine."""

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return the candidate that the engine runs if nobody sets a knob, as wide as the model needs to fit."""

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return what the engine makes of candidates, its defaults filled in."""

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
        """Return how one instance of a candidate is started, devices aside: the values are its own.

        It is pinned to `cores`, none where devices are not cores.
        """

    def effective(self, fetch: Callable[[str], str], log: str) -> Mapping[str, KnobValue]:
        """Return, by knob, what a running server says it uses; a knob that it does not tell is left out.

        `fetch` returns the text behind a path of the server, `log` is what it printed.
        """

    def counters(self, fetch: Callable[[str], str]) -> Mapping[str, float]:
        """Return figures of a running server that explain a score: preemptions, waiting requests, cache in use."""

    def memory(self, log: str) -> Mapping[str, float]:
        """Return what one instance says of its memory, by names of `MEMORY`; what it does not tell is left out."""

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what this engine's own log lines mean."""
