"""Times of attention and of other mixers of an engine: their products, and what they do with cached tokens."""

from collections.abc import Iterator, Mapping

import numpy as np
from flagcore_models.layers import attention_by_size, attention_counts, other_mixers
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.compressed_attention import CompressedAttention
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.kimi_delta_attention import KimiDeltaAttention
from flagcore_models.mixers.latent_attention import EXPANSION, LatentAttention

from flagcore.contracts import AttentionShape, Costs, KernelCosts
from flagcore.domain.model import Mixer
from flagcore.domain.space import BoolArray, FloatArray
from flagcore_serving.model.products import linear
from flagcore_serving.model.work import Serving, SparseKernel
from flagcore_serving.space.settings import Settings

REFERENCE_TOKENS = 8192.0
"""The length of a sequence or a prompt, in tokens, for which attention rates are computed. A choice."""

MASKED_READS = 1.4
"""The time in which kernels that compute what windows mask read the cache, relative to other kernels: 0.42 to 0.75 of
the bandwidth instead of 0.87 (Triton's on H100, H200 and B200 in SGLang 0.5.14, aiconfigurator-core 0.12.0)."""


def mixer_seconds(
    mixer: Mixer, serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray
) -> FloatArray:
    """Return the time of a mixer in seconds, but for what depends on cached tokens: its matrix products and small
    kernels, the memory traffic of others, and the wait for the last blocks of sparse attention.
    """
    overheads = serving.overheads
    seconds = _products(mixer, serving, settings, kernels, tokens) + overheads.attention
    if not isinstance(mixer, Attention):
        if isinstance(mixer, CompressedAttention):
            chooses = mixer.index_heads and serving.tokens > mixer.rate * mixer.index_top_k
            seconds = seconds + overheads.compressed + overheads.selected * bool(chooses) * (1.0 + (tokens > 128.0))
        slower = overheads.delta_rule if isinstance(mixer, (GatedDeltaNet, KimiDeltaAttention)) else 1.0
        return seconds + slower * kernels.memory_seconds(tokens * (2.0 * mixer.moved) / settings.tensor)
    if isinstance(mixer, LatentAttention):
        seconds = seconds + overheads.latent
    if mixer.indexer:
        seconds = seconds + _last_blocks(mixer, serving, settings, tokens)
        moved = tokens * _selection_bytes(mixer, serving, settings)
        seconds = seconds + kernels.memory_seconds(moved + 1.0) - kernels.memory_seconds(np.ones_like(moved))
        seconds = seconds + (overheads.indexer if mixer.indexer.heads else 0.0)
    return seconds


def _products(
    mixer: Mixer, serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray
) -> FloatArray:
    """Return the time of the matrix products of a mixer, in seconds.

    Latent attention is computed in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): one 16-bit product
    per head projects queries to the rank of the cache, and another one projects values back. Other attention computes
    the inputs of its indexer together with queries, keys and values.
    """
    tensor, seconds = settings.tensor, np.zeros_like(tokens)
    products = {each: each.outer(tensor) for each in mixer.products(serving.model.hidden_size)}
    if isinstance(mixer, LatentAttention):
        heads, rank = mixer.heads / tensor, float(mixer.latent_rank)
        products = {each: outer for each, outer in products.items() if each.name != EXPANSION}
        seconds = seconds + linear(serving, kernels, tokens, float(mixer.nope_dim), heads * rank, "")
        seconds = seconds + linear(serving, kernels, tokens, rank, heads * float(mixer.value_dim), "")
    elif isinstance(mixer, Attention) and mixer.indexer:
        index = sum(outer for each, outer in products.items() if each.name == "index")
        products = {
            each: outer + index * (each.name == "qkv") for each, outer in products.items() if each.name != "index"
        }
    for each, outer in products.items():
        seconds = seconds + linear(serving, kernels, tokens, each.inner(tensor), outer, each.group)
    return seconds


def shared_cache_seconds(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the seconds that all layers take to exchange queries and results of `tokens` sequences between the ranks
    that share their cache: each rank gathers the queries of all heads, and the partial results are reduce-scattered
    (vLLM 0.11 `v1/attention/backends/mla/common.py`).
    """
    ranks, seconds = settings.sharing.astype(np.int64), np.zeros_like(tokens)
    for mixer, number in attention_counts(serving.model).items():
        query, result = mixer.head_dim, mixer.value_dim
        if isinstance(mixer, LatentAttention):
            query, result = mixer.latent_rank + mixer.rope_dim, mixer.latent_rank
        sent = tokens * (mixer.heads / settings.tensor * settings.sharing)
        for message, size in (("all_gather", 4.0), ("all_gather", query * 2.0), ("reduce_scatter", result * 2.0)):
            seconds = seconds + number * costs.collectives.seconds(message, sent * size, ranks, np.ones_like(ranks))
    return seconds


def attention_rates(serving: Serving, settings: Settings, kernels: KernelCosts) -> tuple[FloatArray, FloatArray]:
    """Return the seconds per cached token of a decoding sequence, and per query-key pair of a prompt, over all layers.
    Absorbed latent attention reads one latent vector for all heads. Most of the vector is both key and value."""
    cached = pair = np.zeros(settings.tensor.shape)
    for mixer, windows in attention_by_size(serving.model).items():
        added = _rates_of_attention(mixer, windows, serving, settings, kernels)
        cached, pair = cached + added[0], pair + added[1]
    for other, number in other_mixers(serving.model).items():  # a new token reads and writes its sequence's states
        states_s = kernels.memory_seconds(64.0 * 2.0 * other.state_bytes / settings.tensor) / 64.0
        cached = cached + number * states_s / serving.tokens
        if token_bytes := other.token_bytes(1.0) * other.read(serving.tokens):
            read = 64.0 * token_bytes * settings.cache_element_bytes
            cached = cached + number * kernels.memory_seconds(read) / 64.0 / serving.tokens
        if isinstance(other, CompressedAttention):
            pair = pair + number * _pair_of_compressed(other, serving, settings, kernels)
    return cached, pair


LEAST_HEADS = 64.0
"""The fewest query heads for which kernels of compressed attention compute: ranks with fewer have copies of zeros
(sglang @000328a8 `models/deepseek_v4.py`: q_padded; vllm 0.32 `models/deepseek_v4/attention.py`)."""


def _pair_of_compressed(
    mixer: CompressedAttention, serving: Serving, settings: Settings, kernels: KernelCosts
) -> FloatArray:
    """Return the seconds per query-key pair of a prompt, as fast as other attention. Only some are computed."""
    heads = np.maximum(mixer.heads / settings.tensor, min(LEAST_HEADS, mixer.heads))
    ones = np.ones_like(heads)
    sizes = {"batch": ones, "queries": REFERENCE_TOKENS * ones, "keys": REFERENCE_TOKENS * ones}
    shape = AttentionShape(heads=heads, groups=ones, head_dim=float(mixer.head_dim) * ones, kernel="", **sizes)
    arithmetic = 2.0 * REFERENCE_TOKENS**2 * mixer.heads * mixer.head_dim
    seconds = kernels.attention_seconds(shape, serving.wide_precision) / arithmetic
    return seconds * mixer.core_flops(serving.prompt) * 2.0 / serving.prompt


def _rates_of_attention(
    mixer: Attention, windows: Mapping[Attention, int], serving: Serving, settings: Settings, kernels: KernelCosts
) -> tuple[FloatArray, FloatArray]:
    """Return the rates of `attention_rates` of the layers with a kind of attention.

    `windows`: this attention with each window that it has, with the number of layers of each.
    """
    number, heads = float(sum(windows.values())), mixer.heads / settings.tensor
    prompt_groups = groups = np.maximum(mixer.groups / settings.tensor, 1.0)
    prompt_dim = dim = 0.5 * (mixer.head_dim + mixer.value_dim)
    if isinstance(mixer, LatentAttention):
        rank, rope = float(mixer.latent_rank), float(mixer.rope_dim)
        prompt_groups, groups = heads, np.full_like(heads, (rank + rope) / (2.0 * rank + rope))
        dim = rank + 0.5 * rope

    def seconds(
        batch: float, queries: float, keys: float, groups: FloatArray, dim: float, heads: FloatArray = heads
    ) -> FloatArray:
        ones = np.ones_like(heads)
        sizes = {"batch": batch * ones, "queries": queries * ones, "keys": keys * ones, "head_dim": dim * ones}
        shape = AttentionShape(heads=heads, groups=groups, kernel="", **sizes)
        return kernels.attention_seconds(shape, serving.wide_precision)

    all_heads = heads * settings.sharing
    difference = seconds(64.0, 1.0, 2.0 * REFERENCE_TOKENS, groups, dim, all_heads) - seconds(
        64.0, 1.0, REFERENCE_TOKENS, groups, dim, all_heads
    )
    cached = difference / (64.0 * REFERENCE_TOKENS) * (settings.cache_element_bytes / 2.0) / settings.sharing
    pair = seconds(1.0, REFERENCE_TOKENS, REFERENCE_TOKENS, prompt_groups, prompt_dim) / (
        0.5 * REFERENCE_TOKENS * REFERENCE_TOKENS
    )
    cached = sum(count * each.read_share(serving.tokens) for each, count in windows.items()) * cached
    pair = sum(count * each.pairs(serving.prompt) for each, count in windows.items()) * pair
    masks = np.isfinite(settings.masked_rate) & np.isfinite(serving.peak)
    pair = np.where(masks, number * 4.0 * heads * prompt_dim / (settings.masked_rate * serving.peak), pair)
    cached = np.where(masks, MASKED_READS * cached, cached)
    if index := mixer.indexer:
        cached, pair = _rates_of_selected(mixer, number, serving, settings, cached, pair)
        if index.heads:  # it computes only scores, in 8 bits: a quarter of the time
            keys_s = kernels.memory_seconds(64.0 * REFERENCE_TOKENS * index.token_bytes * np.ones_like(heads))
            cached = cached + number * keys_s / (64.0 * REFERENCE_TOKENS)
            count = np.full_like(heads, index.heads)
            scores = seconds(1.0, REFERENCE_TOKENS, REFERENCE_TOKENS, np.ones_like(heads), index.head_dim, count)
            pair = pair + number * 0.25 * scores / (0.5 * REFERENCE_TOKENS * REFERENCE_TOKENS)
    return cached, pair


def _rates_of_selected(
    mixer: Attention, number: float, serving: Serving, settings: Settings, cached: FloatArray, pair: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the rates of `attention_rates` of a `number` of layers if the engine has kernels of its own for selected
    tokens, else the given ones. Such a kernel computes latent attention in its absorbed form, for prompts, too."""
    context, top_k = 0.5 * (serving.prompt + serving.tokens), float(mixer.indexer.top_k) if mixer.indexer else 0.0
    for kernel, applies, _, seconds in _sparse_kernels(mixer, serving, settings):
        if kernel.answers:
            selected = min(top_k, context) if kernel.skips else top_k
            cached = np.where(applies, number * seconds * selected / context, cached)
        if kernel.prompts and not (serving.overheads.dense_prompts and serving.prompt <= top_k):
            part = min(top_k / serving.prompt, 1.0)
            selected = 0.5 * part * (2.0 - part) * serving.prompt if kernel.skips else top_k
            pair = np.where(applies, number * seconds * selected * 2.0 / serving.prompt, pair)
    return cached, pair


def _last_blocks(mixer: Attention, serving: Serving, settings: Settings, tokens: FloatArray) -> FloatArray:
    """Return the seconds that the blocks of a layer's last answers take beyond their even share of all units: the rest
    of a block while most units have none, else half of a block, as a mean over numbers of blocks."""
    top_k, wait = float(mixer.indexer.top_k) if mixer.indexer else 0.0, np.zeros_like(tokens)
    for kernel, applies, blocks, seconds in _sparse_kernels(mixer, serving, settings):
        if kernel.answers:
            selected = min(top_k, 0.5 * (serving.prompt + serving.tokens)) if kernel.skips else top_k
            share = np.maximum(1.0 - tokens * blocks / kernel.units, 0.5) if kernel.units else 0.0
            wait = np.where(applies, share * seconds * selected * kernel.units / blocks, wait)
    return wait


def _selection_bytes(mixer: Attention, serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes that small kernels of sparse attention move for a token of a layer, on each tensor rank.

    The queries of the indexer are rotated in half, copied and converted to 8 bits, and the 32-bit indices of the tokens
    are filled in, written and converted (vllm 0.13 `models/deepseek_v2.py`: Indexer, sparse_attn_indexer). Kernels for
    blocks of heads also read queries and write results of heads that the rank does not have (`flashmla_sparse.py`).
    """
    moved = np.zeros(settings.tensor.shape)
    if index := mixer.indexer:
        moved = moved + 9.0 * index.heads * index.head_dim + 16.0 * index.top_k
    for kernel, applies, blocks, _ in _sparse_kernels(mixer, serving, settings):
        if kernel.prompts and isinstance(mixer, LatentAttention):
            copies = blocks * kernel.heads - mixer.heads / settings.tensor * settings.sharing
            padded = copies * (4.0 * (mixer.latent_rank + mixer.rope_dim) + 2.0 * mixer.latent_rank)
            moved = np.where(applies, moved + padded, moved)
    return moved


def _sparse_kernels(
    mixer: Attention, serving: Serving, settings: Settings
) -> Iterator[tuple[SparseKernel, BoolArray, FloatArray, FloatArray]]:
    """Yield each kernel for sparse latent attention on this chip, the last one first: for which candidates it applies,
    and on a rank its blocks of heads, and the seconds of a token and a selected token."""
    if not isinstance(mixer, LatentAttention):
        return
    heads = mixer.heads / settings.tensor * settings.sharing
    width = 2.0 * mixer.latent_rank + mixer.rope_dim
    for kernel in reversed(serving.overheads.sparse):
        if kernel.architecture == serving.architecture and np.isfinite(serving.peak):
            blocks = np.ceil(heads / kernel.heads)
            applies = (settings.cache_element_bytes == kernel.cache) & (heads >= kernel.least)
            yield kernel, applies, blocks, blocks * kernel.heads * 2.0 * width / (kernel.rate * serving.peak)
