"""What vLLM's profile of memory at start-up takes from the cache, beside weights and activations.

Sources: vllm 0.26 `v1/worker/gpu_model_runner.py` (profile_cudagraph_memory, _dummy_sampler_run), `config/vllm.py`
(_set_cudagraph_sizes), `v1/sample/ops/topk_topp_sampler.py` of 0.14 and 0.17, 0.32 `v1/worker/gpu/model_runner.py`.
"""

import re
from collections.abc import Mapping

import numpy as np
from flagcore_importers.programs import release
from flagcore_models.layers import mixer_counts
from flagcore_models.mixers.compressed_attention import CompressedAttention
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_serving.job import EngineArg
from flagcore_serving.space.hardware import PP, TP
from flagcore_serving.space.settings import GRAPH_BYTES, GRAPH_TOKENS
from flagcore_serving.space.weights import context_limit

from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore_vllm.cache import is_packed

GRAPHS, LEVEL = "cudagraph_mode", "optimization_level"
"""The knobs for captured graphs, of whose words the first is NONE and the second PIECEWISE, and for the preset."""
RESERVES_GRAPHS_SINCE = {"sm_": (0, 20, 0), "gfx": (0, 26, 0)}
"""By architecture: the first release whose cache leaves room for graphs (`VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS` of
`envs.py`, 0.25 and 0.26 `v1/worker/gpu_worker.py`). Earlier, they came in addition to the share of memory."""
LAYER_GRAPH_BYTES = 0.3e6
"""Bytes that vLLM reserves for a graph of a layer: 0.08 and 0.09 GiB for 4 and 5 graphs of 64 layers
(noonghunna/club-3090 issues 617 and 434), 1.62 GiB for 86 (vllm-project/vllm pull request 39559)."""
COMPRESSED_GRAPH_BYTES = 0.6e6
"""Those with compressed attention, whose layers are not compiled: estimates of 1.58 GiB for 68 graphs of 43 layers (a
log of 0.25 on two RTX PRO 6000), and of 0.64 GiB for 25."""
GRAPH_FLAGS = ("cudagraph-capture-sizes", "max-cudagraph-capture-size", "cuda-graph-sizes")
"""The flags for the sizes of captured batches, of which the first two are also keys of the compilation config."""
MORE_GRAPH_TOKENS, MORE_GRAPHS_SINCE, MORE_GRAPHS_ON = 1024, (0, 18), "sm_10"
"""The largest captured batch in tokens on chips of the compute capability 10 (0.32 and 0.33: `config/vllm.py`), and the
first release with it. The release follows from published points: 1,024 tokens took twice as long with 0.17."""
CHARGES_SINCE, OTHER_RUNNER_SINCE = (0, 26, 0), (0, 30, 0)
"""The first release that charges buffers of prompts to graphs, and the first one with another runner by default."""
OWN_KERNELS = ("sm_90", "sm_10")
"""Architectures whose gated delta rule has kernels without these buffers (0.26 and 0.28: `qwen_gdn_linear_attn.py`)."""
SORTED_BYTES, SAMPLED_BYTES, GUMBEL_BYTES = 30.0, 12.0, 4.0
"""Bytes of a logit in 32 bits and its copies while the profile samples: sorted with 64-bit indices before SORTS_UNTIL,
then with probabilities and random numbers, and with the runner since OTHER_RUNNER_SINCE alone."""
SORTS_UNTIL = (0, 17, 0)
"""The first release seen with a kernel for top-k and top-p (0.14 sorts)."""
INDEX_KEYS = 40
"""The keys for which an indexer's workspace has room, for each token of a sequence."""
ROTATED = 64
"""The elements of a key of compressed attention that are rotated."""
SCORE_BYTES = 512 * 2**20
"""The bytes of an indexer's scores at the peak of the profile."""
GRAPH_SIZES = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 2049, 16)])
"""The sizes of captured batches in tokens."""


def captured(values: Columns) -> IntArray:
    """Return the codes of graphs: if unset, the level 0 has none and 1 piecewise ones (0.32: `config/vllm.py`)."""
    level = values[LEVEL]
    return np.where((values[GRAPHS] == 0) & (level <= 2), level, values[GRAPHS])


def graph_tokens(task: Task, args: Mapping[str, EngineArg]) -> int:
    """Return the largest batch, in tokens, that vLLM captures as a graph. `args`: those that are no knobs."""
    texts = {key.replace("_", "-").removeprefix("compilation-config."): str(value) for key, value in args.items()}
    if sizes := re.findall(r"\d+", " ".join(texts.get(flag, "") for flag in GRAPH_FLAGS)):
        return max(map(int, sizes))
    version = release(task.spec.serve.engine_version or "")
    is_newer = version is None or version >= MORE_GRAPHS_SINCE
    has_more = task.cluster.groups[0].chip.architecture.startswith(MORE_GRAPHS_ON)
    return MORE_GRAPH_TOKENS if is_newer and has_more else GRAPH_TOKENS


def logit_bytes(task: Task, number: tuple[int, ...]) -> float:
    """Return the bytes of a logit while the profile samples tokens, beside that in 16 bits. On Ascend it samples none
    (vllm-project/vllm-ascend @182b75ea `worker/model_runner_v1.py`: _dummy_sampler_run)."""
    if task.cluster.groups[0].chip.vendor == "ascend":
        return 0.0
    if number < SORTS_UNTIL:
        return SORTED_BYTES
    return SAMPLED_BYTES if number < OTHER_RUNNER_SINCE else GUMBEL_BYTES


def reserved_bytes(
    task: Task,
    number: tuple[int, ...],
    values: Columns,
    *,
    graphs: IntArray,
    whole: FloatArray,
    tokens: IntArray,
    seqs: IntArray,
    drafted: IntArray,
    context: IntArray,
) -> FloatArray:
    """Return the bytes that vLLM reserves for graphs on a device, beyond GRAPH_BYTES of each layer.

    `number`: the release. `graphs`: the largest captured batch in tokens, 0 without graphs. `whole`: as in `Settings`.
    `tokens`, `seqs`: the limits of an iteration. `drafted`: drafted tokens of a sequence. A graph is captured for each
    size, in pieces, and once more as a whole for batches that only decode. In these an indexer has scores in 32 bits of
    all tokens of the longest sequence (0.20 to 0.28 `layers/sparse_attn_indexer.py`: fp8_paged_mqa_logits).
    """
    model, query, architecture = task.spec.model, 1 + drafted, task.cluster.groups[0].chip.architecture
    since = next((each for start, each in RESERVES_GRAPHS_SINCE.items() if architecture.startswith(start)), None)
    if since is None or number < since:
        outside = -GRAPH_BYTES * model.num_layers / values[PP].clip(1) * (since is not None)
        return np.where(graphs > 0, outside, 0.0)
    largest = np.minimum(graphs, 2 * seqs * query)
    pieces, decodes = (
        np.searchsorted(GRAPH_SIZES, size, side="right") for size in (largest, np.minimum(graphs, seqs * query))
    )
    captured = np.where(whole == 0.0, pieces, pieces + decodes)
    layer = COMPRESSED_GRAPH_BYTES if is_packed(model) else LAYER_GRAPH_BYTES
    own = (layer * captured - GRAPH_BYTES) * model.num_layers / values[PP].clip(1)
    is_charged = (whole != 0.0) & (CHARGES_SINCE <= number < OTHER_RUNNER_SINCE)
    charged = np.where(is_charged, _charged_bytes(task, values, GRAPH_SIZES[decodes.clip(1) - 1] // query, tokens), 0.0)
    has_indexer = any(isinstance(each, LatentAttention) and each.indexer for each in mixer_counts(model))
    scores = has_indexer * (whole != 0.0) * 4.0 * GRAPH_SIZES[decodes.clip(1) - 1] * context
    return np.where(graphs > 0, own + charged + scores, 0.0)


def sparse_bytes(task: Task, context: IntArray, tokens: IntArray) -> FloatArray:
    """Return the bytes of what sparse attention allocates beside its layers.

    Compressed attention has two tables of rotations in 32 bits. A workspace for gathered keys grows with `context`: 40
    keys of an indexer for each of its tokens, or 4 prompts of compressed attention, with their windows and `tokens`
    tokens. The profile of the latter has 512 MiB of an indexer's scores at its peak. Sources: 0.26 and 0.32
    `v1/attention/backends/mla/indexer.py` (get_max_prefill_buffer_size), `layers/sparse_attn_indexer.py`,
    `models/deepseek_v4` (`nvidia/flashmla.py`, `common/rope.py`).
    """
    found = np.zeros(context.shape)
    for mixer in mixer_counts(task.spec.model):
        if isinstance(mixer, LatentAttention) and mixer.indexer:
            found = np.maximum(found, INDEX_KEYS * mixer.index_bytes * context)
        if isinstance(mixer, CompressedAttention) and mixer.index_heads:
            keys = 8.0 * mixer.head_dim * (context / mixer.rate + mixer.window + tokens)
            found = np.maximum(found, np.maximum(keys, INDEX_KEYS * mixer.index_bytes * context) + SCORE_BYTES)
    positions = context_limit(task.spec) if is_packed(task.spec.model) else None
    return found + 2.0 * 4.0 * ROTATED * (positions or 0)


def _charged_bytes(task: Task, values: Columns, batch: IntArray, tokens: IntArray) -> FloatArray:
    """Return the bytes of buffers for prompts of `tokens` tokens with which the profile charges the first whole graph.

    They are those of a gated delta rule of `batch` sequences, once for a warm-up and once for the capture: the states
    of chunks of 64 tokens in 16 bits, those of all sequences before and after in 32 bits, a matrix and new values for
    each token (vllm-project/vllm issue 50780: 128 KiB per token of 64 heads).
    """
    rules = [each for each in mixer_counts(task.spec.model) if isinstance(each, GatedDeltaNet)]
    if not rules or task.cluster.groups[0].chip.architecture.startswith(OWN_KERNELS):
        return np.zeros(batch.shape)
    rule, batch = rules[0], batch.clip(1)
    state, chunks = rule.key_dim * rule.value_dim, batch * np.ceil(tokens / batch / 64.0)
    head = 2.0 * state * chunks + 8.0 * state * batch + (256.0 + 2.0 * rule.value_dim) * tokens
    return np.asarray(2.0 * head * rule.value_heads / values[TP].clip(1))
