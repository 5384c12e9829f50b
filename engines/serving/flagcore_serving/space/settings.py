"""Effective engine settings of candidates, and settings that job records of published runs omit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import Task
from flagcore_serving.job import EngineArg
from flagcore_serving.space import knobs
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, TP, Hardware, longest_request
from flagcore_serving.space.program import Program

TIERS = ("host", "disk", "store")
"""Tiers of the cache behind the devices, the fastest first: the host's memory, its disks, and a shared store."""

GRAPH_BYTES = 12e6
"""Bytes of captured graphs per layer, an estimate: start-up logs report 0.4 to 1 GiB for 32 to 80 layers."""
GRAPH_TOKENS = 512
"""The largest batch, in tokens, that engines capture as a graph by default."""

GATHERING = ("none", "naive", "allgather_reducescatter")
DIRECT, FORWARDED = ("low_latency", "nixl_ep"), "high_throughput"
"""Ends of the values of EXCHANGE with which all attention ranks gather all tokens, and with which each token is sent to
the ranks of its experts, or once to each of their hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Effective settings of candidates, one array element per candidate or kind of instance.

    Knobs that are not set have the engine's defaults. Sizes are numbers of devices, sequences or tokens.

    - `devices`: devices of one instance, or its threads if devices are CPU cores.
    - `tensor`, `pipeline`, `data`: parallel sizes. Their product is the number of ranks of an instance.
    - `expert`: the number of groups of experts, among which the tensor and data ranks are divided.
    - `max_running`: maximum number of sequences in one iteration of one attention DP group.
    - `max_batched_tokens`: maximum number of tokens in one iteration of one attention DP group. Depending on the
      engine, it applies to the prompt tokens or to all tokens.
    - `context_len`: maximum number of tokens of one sequence. `fits_context`: or fewer, as many as the cache holds.
    - `chunked`: whether prompts are computed in chunks; otherwise a prompt is computed in one piece.
    - `mixed_chunks`: whether iterations combine prompts and decoding, although the engine does not by default.
    - `graph_tokens`: the largest batch, in tokens, that the engine captures as a graph; 0 in eager mode.
    - `whole`: 1 if an iteration that only decodes is one graph, 0 if it is captured in pieces, and NaN for the engine's
      default.
    - `memory_fraction`: share of the memory for weights, activations and cache; NaN if only `cache_bytes` counts.
    - `cache_bytes`: fixed size of the cache on each device, or its limit if `memory_fraction` is set; else NaN.
    - `rest_share`: share, for the cache, of what all else leaves free; NaN if the other two determine its size.
    - `prefetched`: the share of the layers that are in the memory of the host without a buffer on the device, likewise.
    - `offloaded`: bytes of the layers' weights of each device that are in the memory of the host, and that each pass
      reads from there.
    - `experts_on_host`: the first layers with experts whose routed experts are in the memory of the host.
    - `state_share`: share of the cache that is set aside for states of mixers; 0 if tokens and states share the cache.
    - `state_slots`: states that a running sequence occupies where they are set aside.
    - `window_share`: tokens of the cache of layers with windows relative to those of other layers, if these have a part
      of memory each; 0 if they share it. `window_kept`: tokens of its answer for which a running sequence holds that
      part, beside the last piece of its prompt; 0 if the part does not limit sequences.
    - `masked_rate`: operations per second of attention relative to the chip's peak in 16 bits, if its kernels also
      compute for prompts what windows mask; NaN for an engine's usual kernels.
    - `request_bytes`: bytes of a device's cache that are set aside for the sequences that may run.
    - `on_device`: share of the layers, with the output head as one layer, that are on devices instead of the host.
    - `host_s`: seconds that the host takes for an iteration; NaN if no knob determines them.
    - `ahead`: batches that the scheduler plans ahead while the one before is computed.
    - `workspace_bytes`: bytes that an attention backend allocates on a device beside weights and cache.
    - `logit_bytes`: bytes of a logit and its copies while tokens are sampled, beside that in 16 bits.
    - `block_bytes`: bytes of a block of a device's cache; 0 if the cache is not in blocks of all layers.
    - `token_bytes`: bytes of a device's cache by which a sequence of the load grows with each token; NaN if they follow
      from the layers alone. `sequence_bytes`: bytes that it has in addition, whatever its length.
      `admission_bytes`: bytes that must also be free for its prompt to be admitted.
    - `chunk_tokens`: tokens of which pieces of a prompt, but its last, are a multiple; 0 if they may be any number.
    - `longest_bytes`: bytes that the engine counts for a sequence of `context_len` tokens; NaN likewise.
    - `least_cache`: bytes of the cache of a device without which the engine does not start.
    - `drafted`: tokens that speculation drafts per sequence and iteration.
    - `drafts_held`: 1 if drafts hold own copies of embedding and head while the engine sizes the cache, which they then
      free; -1 if they are loaded afterwards, into what the share leaves; 0 if their weights count as they stay.
    - `scheme`: how it drafts them: 1 + the index in SCHEMES, 0 if unknown or without speculation.
    - `draft_host_s`: seconds that the host takes to draft tokens of a sequence.
    - `pass_tokens`: maximum number of tokens in one pass through the model, which may be infinite. A larger iteration
      takes several passes.
    - `exchanges`: whether attention ranks send each token only to the ranks of its experts. Otherwise all ranks gather
      all tokens.
    - `head_ranks`, `network_ranks`: attention ranks that divide the output head, and dense networks and shared experts;
      1 if each has them whole.
    - `direct`: 1 if each token is sent to the ranks of its experts, 0 if it is sent once to each of their hosts, NaN if
      this depends on the number of tokens.
    - `overlaps`: whether two halves of a batch overlap computing and the exchange of tokens.
    - `sharing`: tensor ranks that share the cache of a sequence, each with a part of its tokens.
    - `copies`: stored copies of experts in addition to the model's experts.
    - `balanced`: whether experts with much work get these copies.
    - `quantized`: whether the engine converts the weights to fp8.
    - `tower_shares`: ranks that split the vision tower's weights, infinity if it is not loaded.
    - `host_cache`, `disk_cache`, `store_cache`: bytes for the cache of an instance in each of TIERS; may be infinite.
    - `host_ratio`: if `host_cache` is 0, the tokens that it holds relative to those on the devices.
    - `writes_through`: whether these tiers get each computed token. Otherwise they get what the tier before evicts.
    - `encodes`: whether the instance only encodes images; it holds nothing but the vision tower.
    - `adapter_slots`, `adapter_rank`: adapters that one iteration can use, and their largest rank; 0 without adapters.
    - `adapters_on_host`: adapters that the host's memory keeps.
    - `crowding`: the engine's busy processes per CPU of a host, at least 1 (see `predict.crowding`). Times of the host
      are multiplied by it.
    """

    instances: IntArray
    devices: IntArray
    tensor: FloatArray
    pipeline: FloatArray
    data: FloatArray
    expert: FloatArray
    max_running: IntArray
    max_batched_tokens: IntArray
    block_size: IntArray
    context_len: IntArray
    fits_context: BoolArray
    chunked: IntArray
    graph_tokens: IntArray
    whole: FloatArray
    prefix_caching: IntArray
    memory_fraction: FloatArray
    cache_bytes: FloatArray
    rest_share: FloatArray
    cache_element_bytes: FloatArray
    workspace_bytes: FloatArray
    logit_bytes: FloatArray
    block_bytes: FloatArray
    token_bytes: FloatArray
    sequence_bytes: FloatArray
    admission_bytes: FloatArray
    chunk_tokens: IntArray
    longest_bytes: FloatArray
    least_cache: FloatArray
    offloaded: FloatArray
    prefetched: FloatArray
    experts_on_host: FloatArray
    state_share: FloatArray
    state_slots: FloatArray
    window_share: FloatArray
    window_kept: FloatArray
    request_bytes: FloatArray
    masked_rate: FloatArray
    on_device: FloatArray
    host_s: FloatArray
    ahead: FloatArray
    drafted: IntArray
    drafts_held: IntArray
    scheme: IntArray
    draft_host_s: FloatArray
    pass_tokens: FloatArray
    mixed_chunks: BoolArray
    exchanges: BoolArray
    head_ranks: FloatArray
    network_ranks: FloatArray
    direct: FloatArray
    overlaps: BoolArray
    sharing: FloatArray
    copies: IntArray
    balanced: BoolArray
    quantized: BoolArray
    tower_shares: FloatArray
    encodes: BoolArray
    host_cache: FloatArray
    host_ratio: FloatArray
    disk_cache: FloatArray
    store_cache: FloatArray
    writes_through: BoolArray
    adapter_slots: FloatArray
    adapter_rank: FloatArray
    adapters_on_host: FloatArray
    crowding: FloatArray

    @classmethod
    def of(
        cls,
        task: Task,
        columns: Columns,
        program: Program | None = None,
        **of_engine: IntArray | FloatArray | BoolArray,
    ) -> Settings:
        """Return the settings in `of_engine`, completed with the common knobs in `columns` and with USUAL values.

        `program`: also adds what follows from its knobs for the cache, drafts, weights, images and experts, if it has
        them; `columns` are then those of `Program.columns`.
        """
        ones = np.ones_like(columns[INSTANCES])
        names = {"tensor": TP, "pipeline": PP, "data": DP, "expert": EP, "sharing": knobs.SHARING}
        sizes = {name: np.maximum(columns.get(knob, ones), 1).astype(np.float64) for name, knob in names.items()}
        common: dict[str, Any] = {
            **{name: np.full(ones.shape, value) for name, value in USUAL.items()},
            **sizes,
            "instances": columns[INSTANCES],
            "devices": (sizes["tensor"] * sizes["pipeline"] * sizes["data"]).astype(np.int64),
            "context_len": knobs.or_default(columns.get(knobs.CONTEXT, 0 * ones), longest_request(task)),
            "prefix_caching": columns.get(knobs.PREFIX, 0 * ones),
            "tower_shares": sizes["tensor"],
        }
        return cls(**common | (_of_program(program, task, columns) if program else {}) | of_engine)

    def encoding(self, rows: BoolArray) -> Settings:
        """Return the settings of which the instances of some rows only encode: without a cache, graphs or adapters."""
        cache, share = np.where(rows, 0.0, self.cache_bytes), np.where(rows, np.nan, self.memory_fraction)
        names = ("context_len", "graph_tokens", "least_cache", "longest_bytes", "offloaded", "adapter_slots", "drafted")
        none: dict[str, Any] = {name: np.where(rows, 0, getattr(self, name)) for name in names}
        return replace(self, encodes=rows, cache_bytes=cache, memory_fraction=share, **none)

    @property
    def cores(self) -> FloatArray:
        """The number of CPU cores that work together on each rank; 1 for other devices."""
        return np.maximum(self.devices / (self.tensor * self.data * self.pipeline), 1.0)

    def captured(self, captures: float) -> FloatArray:
        """Return the largest iteration of an attention DP group, in tokens, that runs as a captured graph: at most
        `captures` times the tokens of the most sequences that run, with drafted ones. vLLM captures 1, 2, 4 and
        multiples of 8 (0.14 to 0.32 `config/vllm.py`: decode_query_len).
        """
        most = captures * self.max_running * (1 + self.drafted)
        return np.asarray(np.minimum(self.graph_tokens, np.where(most < 8.0, most, most - most % 8.0)))

    @property
    def communicators(self) -> FloatArray:
        """The number of communicators of a rank: one for each group of several ranks, including the whole instance."""
        ranks = self.tensor * self.data * self.pipeline
        groups = (ranks, self.tensor, self.data, self.pipeline, self.expert)
        return np.asarray(np.sum([np.where(size > 1.0, 1.0, 0.0) for size in groups], axis=0))

    @property
    def column(self) -> Settings:
        """A copy with arrays of shape (candidates, 1), which broadcast over tables of token counts."""
        return Settings(**{each.name: getattr(self, each.name)[:, None] for each in fields(self)})


USUAL: Mapping[str, float] = {
    **dict.fromkeys(("block_size", "chunked"), 1),
    **dict.fromkeys(("graph_tokens", "drafted", "drafts_held", "scheme", "copies"), 0),
    **dict.fromkeys(("whole", "memory_fraction", "cache_bytes", "rest_share", "host_s", "direct"), math.nan),
    **dict.fromkeys(("token_bytes", "longest_bytes", "masked_rate"), math.nan),
    **dict.fromkeys(("block_bytes", "sequence_bytes", "admission_bytes", "chunk_tokens"), 0.0),
    **dict.fromkeys(("window_kept", "request_bytes", "prefetched"), 0.0),
    **dict.fromkeys(
        ("least_cache", "offloaded", "experts_on_host", "state_share", "window_share", "draft_host_s", "ahead"), 0.0
    ),
    **dict.fromkeys(("state_slots", "on_device", "crowding", "head_ranks", "network_ranks"), 1.0),
    **dict.fromkeys(
        ("mixed_chunks", "exchanges", "overlaps", "balanced", "quantized", "encodes", "fits_context"), False
    ),
    **dict.fromkeys(("host_ratio", *(f"{tier}_cache" for tier in TIERS)), 0.0),
    **dict.fromkeys(("workspace_bytes", "adapter_slots", "adapter_rank", "adapters_on_host"), 0.0),
    "pass_tokens": math.inf,
    "logit_bytes": 4.0,
    "writes_through": True,
}
"""Values of fields of `Settings` that most engines do not set: prompts are chunked, no graphs are captured, nothing is
in the memory of the host, and there are no drafts and adapters."""


def _of_program(program: Program, task: Task, columns: Columns) -> dict[str, Any]:
    """Return the fields of `Settings` that knobs of the program set in the same way for all engines."""
    names, found = {knob.name for knob in program.knobs}, dict[str, Any]()
    if knobs.KV in names:
        found["cache_element_bytes"] = program.element_bytes(columns)
    if knobs.SPECULATION in names:
        found["scheme"] = program.scheme(task, columns)
    if knobs.QUANTIZATION in names:
        found["quantized"] = program.converts_to_fp8(columns)
    if knobs.TOWER in names:
        is_whole = columns[knobs.TOWER] == program.code(knobs.TOWER, "data")
        shares = np.where(is_whole, 1.0, np.maximum(columns[TP], 1).astype(np.float64))
        found["tower_shares"] = np.full_like(shares, np.inf) if program.text_only(task.spec) else shares
    return found | (_exchange(program, task, columns) if knobs.EXCHANGE in names else {})


def _exchange(program: Program, task: Task, columns: Columns) -> dict[str, Any]:
    """Return the fields of `Settings` for the exchange of tokens between attention ranks and experts.

    If the knob EXCHANGE is not set, all attention ranks gather all tokens, unless the vendor's build of the engine has
    an exchange of its own for instances on several hosts.
    """
    words = ("", *next(knob.words for knob in program.knobs if knob.name == knobs.EXCHANGE))
    gathering, direct, forwarded = (
        [code for code, word in enumerate(words) if word.endswith(ends)] for ends in (GATHERING, DIRECT, FORWARDED)
    )
    codes, has_own = columns[knobs.EXCHANGE], program.exchanges.get(task.cluster.groups[0].chip.vendor, ()) is None
    several_hosts = columns[TP] * columns[DP] > Hardware.of(task).per_host
    uses_library = np.where(codes == 0, several_hosts & has_own, ~np.isin(codes, gathering))
    return {
        "exchanges": uses_library & (columns[DP] > 1) & (columns[EP] > 1),
        "direct": np.select([np.isin(codes, direct), np.isin(codes, forwarded)], [1.0, 0.0], np.nan),
        "overlaps": uses_library & (columns[knobs.OVERLAP] == 1),
        "copies": columns[knobs.REDUNDANT],
        "balanced": (columns[knobs.BALANCING] == 1) | (columns[knobs.REDUNDANT] > 0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRuns:
    """Settings of published runs that job records omit.

    - `cache_type`: the 8-bit type of the KV cache in runs with narrow weights on chips that compute in 4 bits.
    - `memory_flag`: the flag for the engine's share of memory, which runs raise if the weights fill most of a device.
    - `release`: the engine release for records that name none, from the time of the measurements.
    - `engine_args`: other flags of the recipes of InferenceX, by a part of the model's name.
    - `drawn`: the `range_ratio` of the client on the engine's own pages, by lengths of prompts and answers.
    - `generated`: what aiconfigurator writes into the commands of servers: by knob, the first release and the value.
    - `wide_copies`, `wide_chunk`: with experts on several hosts, the least copies of experts, and the knob for the
      prompt tokens of an iteration with the tokens of each rank. 0 and "" if the engine's recipes set none.
    """

    cache_type: KnobValue = None
    memory_flag: str = ""
    release: str = ""
    engine_args: Mapping[str, Mapping[str, EngineArg]] = field(default_factory=dict)
    drawn: Mapping[tuple[int, int], float] = field(default_factory=dict)
    generated: Mapping[str, tuple[str, KnobValue]] = field(default_factory=dict)
    wide_copies: int = 0
    wide_chunk: tuple[str, int] = ("", 0)
