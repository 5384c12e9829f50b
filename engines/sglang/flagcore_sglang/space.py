"""SGLang's defaults and settings, releases from 0.5.

Sources: sglang 0.5.23 `srt/arg_groups/` (fields, memory_hook, rules), 0.5.6 `srt/server_args.py`,
`srt/entrypoints/http_server.py` (reported settings).
"""

import math
import re
import sys
from collections.abc import Mapping

import numpy as np
from flagcore_importers.programs import release
from flagcore_models.keys import has_fp8_cache
from flagcore_models.layers import latent_layers, mixer_counts, sparse_latent, state_bytes
from flagcore_models.mixers.compressed_attention import CompressedAttention
from flagcore_serving.job import EngineArg
from flagcore_serving.space import adapters, knobs
from flagcore_serving.space.hardware import DP, INSTANCES, PP, TP, Hardware, longest_request, max_in_flight
from flagcore_serving.space.knobs import ASYNC, BACKEND, DRAFTED, EAGER, EXCHANGE, KV, SPECULATION, or_default
from flagcore_serving.space.placement import ROLE
from flagcore_serving.space.settings import GRAPH_BYTES, GRAPH_TOKENS, Settings
from flagcore_serving.space.weights import cache_bytes_per_token, context_limit, weight_bytes

from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore_sglang import pools
from flagcore_sglang.program import (
    CHUNK,
    HICACHE,
    HICACHE_RATIO,
    MEMORY,
    MIXED,
    NGRAM,
    PAGE,
    PREFILL,
    PROGRAM,
    RUNNING,
    STEPS,
    STORAGE,
    TRTLLM,
)

MIN_RUNNING = 2048
"""The smallest default that SGLang uses for max_running_requests."""
DRAFTING_RUNNING = 48
"""The default of a server that speculates (0.5.6 `server_args.py`, 0.5.23 `speculative_hook.py`)."""
COMPRESSED_RUNNING, COMPRESSED_BYTES = 256, 584 / 512
"""The default of models with compressed attention (DeepSeek-V4), and the bytes of an element of a key: 8 bits but for
64 of 512, with scales (0.5.23 `arg_groups/deepseek_v4_hook.py`, `overrides.py`)."""
DRAFTED_TOKENS, NGRAM_TOKENS = 3, 12
"""SGLang's default numbers of drafted tokens: of models (5 for Llama, which is ignored here), and of n-grams (0.5.23
`speculative_hook.py`)."""
DRAFTS_AHEAD_SINCE = (0, 5, 11)
"""The first release that plans the next batch ahead with drafts, too (`environ.py`: SGLANG_ENABLE_SPEC_V2)."""
DRAFTS_FIRST_SINCE = (0, 5, 14)
"""The first release that loads drafts before it sizes the cache, and frees their copies of embedding and head after it
(`speculative/eagle_worker_v2.py`: alloc_memory_pool; up to 0.5.23, sgl-project/sglang pull request 32468)."""
STATES_AHEAD_SINCE = (0, 5, 14)
"""The first release that does so, too, if it caches prefixes of a model with states (`server_args.py`: auto is
`extra_buffer`, and not `no_buffer` as in 0.5.13)."""
_MIN_POOL = 4096
_STEPS = (20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512), (math.inf, 16384, 512, 512)
"""SGLang's defaults by memory of a device: (below this many GiB, chunked_prefill_size, largest decode graph for TP < 4,
largest decode graph for TP >= 4). Source: `memory_hook.py`."""
_STEPS_ON_ASCEND = (33, 4096, 16, 64), (65, 8192, 64, 256)
"""Those on Ascend up to 64 GiB (0.5.8 to 0.5.23 `hardware_backend/npu/utils.py`)."""
_PAGES = {"ascend": 128, "mthreads": 64}
"""The default tokens of a page by vendor, if not 1 (the same file, and 0.5.23 `arg_groups/overrides.py`)."""

PROMPT_GRAPHS = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
"""Tokens of the graphs of prompts, before sizes in steps of 256 to 4,096, and of 512 (`cuda_graph_hook.py`)."""
PROMPT_GRAPHS_SINCE, EXCHANGE_SINCE = (0, 5, 12), (0, 5, 15)
"""The first releases seen whose share leaves room for graphs of prompts, and for DeepEP's buffers instead of drafts."""
CAPTURED, CAPTURES_EXCHANGES_SINCE = ("none", "deepep", "megamoe", "flashinfer"), (0, 5, 18)
"""Exchanges with which prompts have graphs, and the first release seen with more than the first (`server_args.py`)."""
LIMITS_GRAPHS_SINCE = (0, 5, 22)
"""The first release whose decode graphs are at most max_running_requests, and not 0.5.21 (`memory_hook.py`)."""
MANY_GRAPHS = 300
"""The largest decode graph above which attention data parallelism needs half as much memory again (`memory_hook.py`).
"""

DP_HEAD = "enable-dp-lm-head"
"""The flag for a whole output head on each attention rank, where otherwise all ranks divide it. Without an exchange,
they also divide dense networks and shared experts (0.5.15 `models/deepseek_v2.py`, `models/glm4_moe.py`)."""

GRAPH_FLAGS = ("cuda-graph-max-bs", "cuda-graph-max-bs-decode", "cuda-graph-bs", "cuda-graph-bs-decode")
"""The flags for the largest decode graph, or for all of them."""


def largest_graph(task: Task) -> int | None:
    """Return the sequences of the largest decode graph that `engine_args` set, or None."""
    args = PROGRAM.parse(task.spec).others
    sizes = re.findall(r"\d+", " ".join(str(args.get(flag, "")) for flag in GRAPH_FLAGS))
    return max(map(int, sizes), default=None)


def memory_defaults(task: Task, tensor: IntArray) -> tuple[IntArray, IntArray]:
    """Return SGLang's default chunked_prefill_size, and the largest decode graph: by default SGLang's.

    `tensor`: the tp-size of each candidate.
    """
    gib, own = Hardware.of(task).memory_bytes / 2**30, task.cluster.groups[0].chip.vendor == "ascend"
    unknown = (4096, 160, 160)
    chunk, small, large = next((each[1:] for each in (*_STEPS_ON_ASCEND * own, *_STEPS) if gib < each[0]), unknown)
    graph = largest_graph(task) or np.where(tensor < 4, small, large)
    return np.full_like(tensor, chunk), np.full_like(tensor, graph)


def chunk_sizes(task: Task, columns: Columns) -> IntArray:
    """Return the prefill chunk of each candidate in tokens, by default SGLang's; -1 if prompts are not divided."""
    default = memory_defaults(task, columns[TP] * columns[DP])[0]
    return np.where(columns[CHUNK] != 0, columns[CHUNK], default)


GRAPH_RANKS = 8
"""The most attention ranks whose graphs are known to use what SGLang leaves free for them."""


def graph_mib(task: Task, columns: Columns) -> FloatArray:
    """Return what SGLang's default share leaves free for captured graphs on a device, in MiB.

    With attention data parallelism, it grows with the ranks. Source: sglang 0.5.23 `memory_hook.py`
    (`reserve_for_graph_mb`). Servers of 8 and 32 ranks used 20 GB of it (sgl-project/sglang #25453, #24453), others of
    72 less than 13 (lmsys.org, 2025-05-05, large-scale EP), so only up to 8 ranks are counted as using it.
    """
    ranks = columns[DP]
    largest = np.where(columns[EAGER] == 1, 0, memory_defaults(task, columns[TP] * ranks)[1])
    if _release(task) >= LIMITS_GRAPHS_SINCE and not largest_graph(task):
        largest = np.where(columns[RUNNING] > 0, np.minimum(largest, columns[RUNNING]), largest)
    of_ranks = np.where(ranks > 1, ranks * np.where(largest > MANY_GRAPHS, 4.5, 3.0), 0.0)
    return largest * (2.0 + of_ranks)


def memory_share(task: Task, columns: Columns) -> FloatArray:
    """Return SGLang's default share of memory for weights and cache, or NaN if the memory is unknown.

    The share leaves SGLang's reserve free: for tokens of a step, not of a prompt, where servers only decode. Sources:
    0.5.6, 0.5.9, 0.5.12 and 0.5.15 `server_args.py`, 0.5.23 `memory_hook.py`.
    """
    mib, number = Hardware.of(task).memory_bytes / 2**20, _release(task)
    exchanges = columns[EXCHANGE] == PROGRAM.code(EXCHANGE, "deepep")
    chunk, prefill = chunk_sizes(task, columns), PROGRAM.values(columns, PREFILL)
    role = columns.get(ROLE, np.zeros_like(chunk)) * (number >= EXCHANGE_SINCE)
    running = or_default(columns[RUNNING], memory_defaults(task, columns[TP] * columns[DP])[1])
    step = running * (_drafted(PROGRAM.parse(task.spec).others, columns) + 1)
    tokens = np.where(role == 2, step, np.where(chunk > 0, chunk, prefill))
    graphs = graph_mib(task, columns) * (role != 1) + _prompt_graph_mib(task, columns) * (role != 2)
    reserved_mib = 512 + 1.5 * np.maximum(tokens, 2048) + graphs + columns[TP] * columns[DP] * columns[PP] / 8 * 1024
    if mib > 60 * 1024:
        reserved_mib = np.maximum(reserved_mib, 10 * 1024)
    if number >= EXCHANGE_SINCE:
        reserved_mib = reserved_mib + 2048 * (exchanges & (columns[EAGER] == 0) & (role != 1))
    else:
        drafts = (columns[SPECULATION] > 0) & (columns[SPECULATION] != PROGRAM.code(SPECULATION, NGRAM))
        whole = columns[SPECULATION] == PROGRAM.code(SPECULATION, "STANDALONE")
        reserved_mib += np.where(whole, 6144, drafts * (4096 if number >= PROMPT_GRAPHS_SINCE else 2048))
    share: FloatArray = np.round((mib - reserved_mib) / mib, 3)
    vision = None if PROGRAM.text_only(task.spec) else task.spec.model.vision
    if vision:  # 5% for 24 layers of 1,024, which SGLang takes for towers with mergers, as it does not read `depth`
        size = (1.0 if vision.mergers else vision.num_layers / 24) * vision.hidden_size**2 / 1024**2
        share = share * 0.95 * min(max(1.1 - 0.1 * size, 0.8), 1.05)
    return share


def _prompt_graph_mib(task: Task, columns: Columns) -> FloatArray:
    """Return what SGLang's default share leaves free for graphs of prompts, in MiB: on NVIDIA's chips without stages.

    Latent attention has a fixed size, other attention 8 MiB for each graph, DeepEP 1 GiB more. Of models with images,
    only some have such graphs, which is ignored. Source: sglang 0.5.23 `memory_hook.py`, `cuda_graph_hook.py`.
    """
    model, chunk = task.spec.model, chunk_sizes(task, columns)
    is_nvidia = task.cluster.groups[0].chip.architecture.startswith("sm_")
    if not is_nvidia or model.vision or _is_compressed(task) or _release(task) < PROMPT_GRAPHS_SINCE:
        return np.zeros(chunk.shape)
    sizes = (*PROMPT_GRAPHS, *range(1280, 4097, 256), *range(4608, int(chunk.max(initial=0)) + 1, 512))
    each = 1536.0 if latent_layers(model) else 8.0 * np.searchsorted(sizes, chunk, side="right")
    exchange, captured = columns[EXCHANGE], CAPTURED if _release(task) >= CAPTURES_EXCHANGES_SINCE else CAPTURED[:1]
    has_graphs = np.isin(exchange, [0, *(PROGRAM.code(EXCHANGE, word) for word in captured)]) & (columns[EAGER] == 0)
    each = each + 1024.0 * (exchange == PROGRAM.code(EXCHANGE, "deepep"))
    return np.asarray(each * (has_graphs & (columns[PP] <= 1) & (columns[knobs.OVERLAP] == 0)))


def _is_aiter(task: Task, columns: Columns) -> BoolArray:
    """Return which candidates have the attention backend of AMD's chips, which is their default.

    Compressed attention has a backend of its own (0.5.23 `deepseek_v4_backend_hip_radix.py`).
    """
    is_default = task.cluster.groups[0].chip.architecture.startswith("gfx9") and not _is_compressed(task)
    given = columns[BACKEND]
    return np.asarray((given == PROGRAM.code(BACKEND, "aiter")) | ((given == 0) & is_default))


TRITON, TRITON_RATE = "triton", 0.1
"""The backend of Triton, and what its kernels for prompts have of a chip's peak: 0.10 on H100 and H200, 0.07 to 0.12 on
B200, B300, GB200 and GB300, windows included (tables of 0.5.14, aiconfigurator-core 0.12.0)."""


def _masked_rate(task: Task, columns: Columns) -> FloatArray:
    """Return `Settings.masked_rate`, on NVIDIA's chips. Triton is the default of Gemma 4 but on the compute capability
    10 (0.5.15 `arg_groups/overrides.py`)."""
    architecture, given = task.cluster.groups[0].chip.architecture, columns[BACKEND]
    is_default = task.spec.model.family.startswith("gemma4") and not architecture.startswith("sm_10")
    is_triton = (given == PROGRAM.code(BACKEND, TRITON)) | ((given == 0) & is_default)
    return np.where(is_triton & architecture.startswith("sm_"), TRITON_RATE, np.nan)


def own_page(task: Task) -> int:
    """Return the tokens of a page if a model allows no other: 256 with compressed attention (Ascend: 128), 64 with
    sparse latent attention (0.5.12 `deepseek_v4_hook.py`, 0.5.23 `arg_groups/model_overrides`). Otherwise 0."""
    compressed = 128 if task.cluster.groups[0].chip.vendor == "ascend" else 256
    return compressed if _is_compressed(task) else 64 * (sparse_latent(task.spec.model) is not None)


def page_sizes(task: Task, columns: Columns) -> IntArray:
    """Return the tokens of a page: `own_page`, or 64 in place of sizes that `trtllm_mha` does not have.

    On the compute capability 10 without latent attention, it is the default backend without drafts, and `fa4` has 128.
    The default of MiniMax-M3 on H100 and B200 is 128 (0.5.12 `server_args.py`, 0.5.23 `arg_groups/overrides.py`,
    `model_overrides`).
    """
    if own := own_page(task):
        return np.full_like(columns[PAGE], own)
    chip, given = task.cluster.groups[0].chip, columns[BACKEND]
    has_large = task.spec.model.family.startswith("minimax_m3") and chip.architecture.startswith(("sm_9", "sm_10"))
    page = or_default(columns[PAGE], 128 if has_large else _PAGES.get(chip.vendor, 1))
    is_new = chip.architecture.startswith("sm_10") and not latent_layers(task.spec.model)
    is_default = (given == 0) & (columns[SPECULATION] == 0) & is_new
    sizes = PROGRAM.block_sizes[TRTLLM]
    is_trtllm = is_default | (given == PROGRAM.code(BACKEND, TRTLLM))
    page = np.where(is_new & (given == PROGRAM.code(BACKEND, "fa4")), 128, page)
    return np.where(is_trtllm & ~np.isin(page, sizes), 64, page)


def _contexts(task: Task, columns: Columns) -> IntArray:
    """Return the context length that the servers have: by default the model's."""
    return or_default(columns[knobs.CONTEXT], context_limit(task.spec) or longest_request(task))


LONG_FOR_AITER = 8192
"""Tokens of a context above which SGLang multiplies the share of memory by 0.85 for this backend, also a share that is
set, unless SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION is (0.5.9 to 0.5.18 `server_args.py`, 0.5.23
`arg_groups/attention_hook.py`)."""


def _workspace(task: Task, columns: Columns, share: FloatArray, element: FloatArray) -> FloatArray:
    """Return the bytes on a device beside weights, cache and usual graphs: of attention ranks' graphs, and of `aiter`.

    The latter are partial results in fp32: one for each sequence, query head and 256 tokens of the context. Unless set,
    sequences are 512 for each longest context in the cache, 2,048 to 4,096. Latent attention and windows with a part of
    the cache have none. Sources: sglang 0.5.23 `aiter_backend.py` (`workspace_buffer`), `pool_configurator.py`; 51.75
    GB in sgl-project/sglang pull request 18263; for graphs, `runner/base_cuda_graph_runner.py`
    (get_batch_sizes_to_capture).
    """
    model, tensor, is_aiter = task.spec.model, columns[TP].clip(1), _is_aiter(task, columns)
    usual = GRAPH_BYTES * model.num_layers / columns[PP].clip(1)
    has_graphs = (columns[DP] > 1) & (columns[DP] <= GRAPH_RANKS) & (not Hardware.of(task).on_cores)
    captured = {**columns, RUNNING: -(-columns[RUNNING] // columns[DP].clip(1))}  # at most the requests of a rank
    graphs = np.where(has_graphs, np.maximum(graph_mib(task, captured) * 2.0**20 - usual, 0.0), 0.0)
    has_windows = pools.window_share(model.family, task.spec.serve.engine_args) > 0.0
    if latent_layers(model) or has_windows or not is_aiter.any():
        return graphs
    context = _contexts(task, columns).astype(np.float64)
    free = share * Hardware.of(task).memory_bytes - weight_bytes(task) / (tensor * columns[PP].clip(1))
    tokens = np.maximum(free, 0.0) * tensor * columns[PP].clip(1) / (cache_bytes_per_token(model, 1.0) * element)
    sequences = np.clip(tokens / context * 512.0, 2048.0, 4096.0)
    sequences = np.where(columns[RUNNING] > 0, columns[RUNNING] / columns[DP], sequences)
    parts = sequences * np.ceil(context / 256.0) * model.num_attention_heads / tensor
    return graphs + np.where(is_aiter, parts * (4.0 * (model.kv_channels or 0) + 8.0), 0.0)


def pool_tokens(task: Task, instances: IntArray | int) -> FloatArray:
    """Return the cache size of an instance on CPU cores in tokens.

    SGLang's own default would use most of the memory.
    """
    sequences: FloatArray = np.ceil(2 * max_in_flight(task.spec.serve.loads) / np.maximum(instances, 1))
    return np.maximum(sequences * longest_request(task), _MIN_POOL)


def element_bytes(task: Task, columns: Columns) -> FloatArray:
    """Return the bytes per element of the KV cache.

    By default, sparse latent attention has a cache in fp8 on chips with a compute capability of 10 or more (0.5.6 and
    0.5.14 `server_args.py`, 0.5.23 `arg_groups/overrides.py`), Muse Spark on all (0.5.23), and checkpoints of ModelOpt
    have what they state (0.5.23 `mem_cache/kv_cache_dtype.py`). On 9 its fp8 has scales of its own.
    """
    element = PROGRAM.element_bytes(columns)
    default = (columns[KV] == 0) | (columns[KV] == PROGRAM.code(KV, "auto"))
    if _is_compressed(task):
        return np.where(default | (element == 1.0), COMPRESSED_BYTES, element)
    capability = re.fullmatch(r"sm_(\d+)\d[a-z]?", task.cluster.groups[0].chip.architecture)
    number, sparse = int(capability[1]) if capability else 0, sparse_latent(task.spec.model)
    is_narrow = (number >= 10 and sparse is not None) or task.spec.model.family.startswith("muse_spark")
    is_narrow = is_narrow or has_fp8_cache(task.spec.model, ("modelopt",))
    element = np.where(default, 1.0, element) if is_narrow else element
    return np.where(element == 1.0, sparse.packed_bytes[0], element) if sparse and number == 9 else element


def _is_compressed(task: Task) -> bool:
    return any(isinstance(each, CompressedAttention) for each in mixer_counts(task.spec.model))


def _compressed_tokens(
    task: Task, other_args: Mapping[str, EngineArg], columns: Columns, element: FloatArray, running: IntArray
) -> dict[str, FloatArray]:
    """Return the fields of `Settings` for the cache of compressed attention: the compressors' states of all requests
    that may run, and in releases that count the windows of all tokens alike, the bytes of a token."""
    if not _is_compressed(task):
        return {}
    twice = np.where(columns[SPECULATION] > 0, 2.0, 1.0)
    fixed = (running + 2.0) * pools.compressor_bytes(task.spec.model) * twice / columns[PP].clip(1)
    if _release(task) >= pools.WINDOWS_BY_REQUEST_SINCE:
        return {"request_bytes": fixed}
    rings = np.where(columns[SPECULATION] > 0, pools.RINGS[1], pools.RINGS[0])
    model, pairs = task.spec.model, zip(element.tolist(), rings.tolist(), strict=True)
    token = np.array([pools.compressed_token_bytes(model, other_args, *each) for each in pairs])
    token = token / columns[PP].clip(1)
    return {
        "request_bytes": fixed,
        "token_bytes": token,
        "longest_bytes": token * _contexts(task, columns),
        "window_share": np.full_like(token, pools.compressed_share(other_args)),
    }


def settings(task: Task, columns: Columns) -> Settings:
    """Return SGLang's effective settings for each candidate.

    SGLang divides its limits on chunks and requests among the attention DP groups.
    """
    values, other_args = PROGRAM.columns(task, columns), PROGRAM.parse(task.spec).others
    hardware = Hardware.of(task)
    chunk = chunk_sizes(task, values)
    # `PrefillAdder` (managers/schedule_policy.py) starts a further prompt only if some of the limit is left after it.
    prefill, prompt = PROGRAM.values(values, PREFILL), np.mean([load.input_len for load in task.spec.serve.loads])
    whole = (np.maximum(np.ceil(prefill / prompt) - 1.0, 1.0) * prompt).astype(np.int64)
    tokens = np.where(chunk > 0, np.minimum(np.maximum(chunk // values[DP], 1), whole), prefill)
    ranks = values[TP] * values[PP] * values[DP]
    devices = hardware.share(values[INSTANCES]) if hardware.on_cores else ranks
    element = element_bytes(task, values)
    share = knobs.shares(values[MEMORY], memory_share(task, values))
    is_long = _is_aiter(task, values) & (_contexts(task, values) > LONG_FOR_AITER)
    if task.spec.envs.get("SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION") in ("1", "true"):
        is_long &= values[MEMORY] == 0
    share = np.where(is_long, 0.85 * share, share)
    family, drafted, largest = task.spec.model.family, _drafted(other_args, values), largest_graph(task) or GRAPH_TOKENS
    drafting = np.where(values[SPECULATION] > 0, np.maximum(DRAFTING_RUNNING // values[DP], 1), MIN_RUNNING)
    running = np.maximum(COMPRESSED_RUNNING // values[DP], 1) if _is_compressed(task) else drafting
    running = np.where(values[RUNNING] > 0, np.maximum(values[RUNNING] // values[DP], 1), running)
    window_share = np.full(ranks.shape, pools.window_share(family, other_args))
    return Settings.of(
        task,
        values,
        PROGRAM,
        devices=devices,
        max_running=running,
        max_batched_tokens=tokens,
        block_size=(pages := page_sizes(task, values)),
        window_kept=pools.window_kept(task.spec, pages, _release(task)) * (values[knobs.PREFIX] != 0),
        masked_rate=_masked_rate(task, values),
        head_ranks=np.where(bool(other_args.get(DP_HEAD)), 1.0, values[DP]),
        network_ranks=np.where(np.isin(values[EXCHANGE], [0, PROGRAM.code(EXCHANGE, "none")]), values[DP], 1.0),
        fits_context=values[knobs.CONTEXT] > 0,  # a smaller pool limits requests (0.5.23 `managers/tp_worker.py`)
        chunked=(chunk > 0).astype(np.int64),
        mixed_chunks=(values[MIXED] > 0) & (chunk > 0),
        graph_tokens=np.where((values[EAGER] == 0) & (not hardware.on_cores), largest * (1 + drafted), 0),
        workspace_bytes=_workspace(task, values, share, element),
        memory_fraction=np.full(ranks.shape, np.nan) if hardware.on_cores else share,
        cache_bytes=_cache_bytes(task, other_args, values, devices, element),
        cache_element_bytes=element,
        state_share=np.full(ranks.shape, pools.state_share(family, other_args)),
        state_slots=np.where(values[knobs.PREFIX] == 0, 1.0, pools.STATE_SLOTS),
        **{"window_share": window_share, **_compressed_tokens(task, other_args, values, element, running)},
        offloaded=np.full(ranks.shape, PROGRAM.offloaded_bytes(task.spec)),
        prefetched=PROGRAM.prefetched_share(task.spec, values[PP]),
        experts_on_host=np.full(ranks.shape, pools.experts_on_host(task.spec.model, other_args)),
        drafted=drafted,
        drafts_held=np.full(ranks.shape, 1 if _release(task) >= DRAFTS_FIRST_SINCE else -1),
        ahead=_batches_ahead(task, other_args, values),
        **_tiers(other_args, values),
        **adapters.adapter_settings(
            task, values, other_args, slots=8, on_host=other_args.get("max-loaded-loras", math.inf)
        ),
    )


def _release(task: Task) -> tuple[int, ...]:
    """Return the release of a task's engine: the newest if it is unknown."""
    return release(PROGRAM.version(task.spec)) or (sys.maxsize,)


def _batches_ahead(task: Task, other_args: Mapping[str, EngineArg], columns: Columns) -> FloatArray:
    """Return how many batches each candidate plans ahead: one by default, but none with pipeline stages (0.5.23
    `arg_groups/overrides.py`), and with drafts or cached states only in newer releases."""
    number = _release(task)
    tracks = number >= STATES_AHEAD_SINCE or other_args.get("mamba-scheduler-strategy") == "extra_buffer"
    is_on = (columns[ASYNC] != 0) & (columns[PP] <= 1)
    is_on &= (columns[SPECULATION] == 0) | (number >= DRAFTS_AHEAD_SINCE)
    is_on &= (columns[knobs.PREFIX] == 0) | tracks | (not state_bytes(task.spec.model))
    return np.where(is_on, 1.0, 0.0)


FILES = "file"
"""The storage backend that writes caches to a folder; the others are stores on the network."""


def _tiers(other_args: Mapping[str, EngineArg], columns: Columns) -> dict[str, FloatArray | BoolArray]:
    """Return the fields of `Settings` for the tiers of HiCache (0.5.23 `mem_cache/pool_host/base.py`: GB of each rank).

    A storage backend needs the host's cache, and is assumed to have room for all tokens.
    """
    size, storage = columns[HICACHE] * 1e9, columns[STORAGE]
    is_on = (size > 0) | (storage > 0) | bool(other_args.get("enable-hierarchical-cache"))
    ratio = other_args.get("hicache-ratio", HICACHE_RATIO)
    ranks = columns[TP] * columns[PP] * columns[DP]
    return {
        "host_cache": size * ranks,
        "host_ratio": np.where(is_on, float(ratio) if isinstance(ratio, int | float) else HICACHE_RATIO, 0.0),
        "disk_cache": np.where(storage == PROGRAM.code(STORAGE, FILES), np.inf, 0.0),
        "store_cache": np.where((storage > 0) & (storage != PROGRAM.code(STORAGE, FILES)), np.inf, 0.0),
        "writes_through": np.full(size.shape, other_args.get("hicache-write-policy") != "write_back"),
    }


def _drafted(other_args: Mapping[str, EngineArg], columns: Columns) -> IntArray:
    """Return the number of tokens that each candidate drafts one after the other.

    By default it is the number of steps of a draft tree in `engine_args`, or SGLang's own default.
    """
    steps = other_args.get(STEPS)
    default = np.where(columns[SPECULATION] == PROGRAM.code(SPECULATION, NGRAM), NGRAM_TOKENS, DRAFTED_TOKENS)
    if isinstance(steps, int):
        default = np.full_like(default, steps)
    return np.where(columns[SPECULATION] > 0, or_default(columns[DRAFTED], default), 0)


def _cache_bytes(
    task: Task, other_args: Mapping[str, EngineArg], get: Columns, devices: IntArray, element: FloatArray
) -> FloatArray:
    """Return the cache size of a device in bytes if its number of tokens is limited, or NaN if it fills the memory.

    On devices the pool is the smaller one of the limit and of what the memory holds (0.5.23 `model_executor`,
    `mem_cache/kv_cache_configurator.py`).
    """
    fixed = knobs.parse_length(other_args.get("max-total-tokens"), PROGRAM.units)
    if not isinstance(fixed, int) and not Hardware.of(task).on_cores:
        return np.full(devices.shape, np.nan)
    pools = float(fixed) if isinstance(fixed, int) else pool_tokens(task, get[INSTANCES])
    return pools * cache_bytes_per_token(task.spec.model, 1.0) * element / devices
