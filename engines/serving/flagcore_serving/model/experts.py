"""Times of routed experts of an engine: on devices, in the memory of the host, and between attention ranks."""

import numpy as np
from flagcore_models.layers import weights_by_group
from flagcore_models.networks.experts import Experts

from flagcore.contracts import Costs, KernelCosts
from flagcore.domain.space import FloatArray
from flagcore_serving.model.memory import expert_bytes, offloaded_bytes
from flagcore_serving.model.products import linear
from flagcore_serving.model.work import HOST_MEMORY_RATE, Serving, distinct_experts
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import EXPERTS

HOST_SHARE = 0.8
"""Share of the rate of a host's link that reading weights reaches: about 50 of the 64 GB/s of PCIe 5.0 x16. An
estimate."""


def offloaded_seconds(serving: Serving, settings: Settings, tokens: FloatArray) -> FloatArray:
    """Return the seconds in which a pass reads the weights in the memory of the host, of experts only the chosen ones.

    Source: zero-copy access of vLLM 0.33 (`config/offload.py`); dense and expert weights are offloaded alike.
    """
    read = np.ones_like(tokens)
    if (experts := serving.experts) is not None:
        weights = weights_by_group(serving.model)
        share = weights[EXPERTS] / sum(weights.values())
        read = 1.0 - share + share * distinct_experts(experts.count, experts.chosen, tokens) / experts.count
    return read * offloaded_bytes(serving, settings) / (HOST_SHARE * serving.host_rate)


def host_experts(
    experts: Experts,
    serving: Serving,
    settings: Settings,
    kernels: KernelCosts,
    tokens: FloatArray,
    computed: FloatArray,
) -> FloatArray:
    """Return the seconds of one layer's routed experts in the memory of the host. `computed`: seconds on the devices.

    Cores of the host compute few tokens, as fast as they read the weights of the chosen experts. With more tokens,
    these weights are copied to the devices in each pass (`Overheads.copied_from`).
    """
    ranks = settings.tensor * settings.data
    chosen = distinct_experts(experts.count, experts.chosen, tokens) / experts.count
    read = chosen * expert_bytes(serving, settings)
    activations = kernels.host_copy_seconds(tokens * (4.0 * serving.model.hidden_size))
    by_cores = read * ranks / HOST_MEMORY_RATE + 2.0 * activations
    by_devices = read / (HOST_SHARE * serving.host_rate) + computed
    return np.where(tokens < serving.overheads.copied_from, by_cores, by_devices)


def expert_seconds(
    experts: Experts, serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray
) -> FloatArray:
    """Return the time of one layer's routed experts in seconds. `tokens`: the tokens of all attention ranks.

    Each of the two products of all experts on a device is one kernel, bound by its arithmetic or by reading the weights
    of the chosen experts. With expert parallelism a device holds whole experts, otherwise a slice of every expert.
    """
    overheads, hidden = serving.overheads, serving.model.hidden_size
    precision = serving.format_of(EXPERTS)[0]
    up, down = experts.routed(hidden)
    ranks = settings.tensor * settings.data / settings.expert
    stored = 1.0 + settings.copies / experts.count
    chosen = distinct_experts(experts.count, experts.chosen, tokens * overheads.spread)
    local_experts = chosen * stored / settings.expert
    routed = tokens * experts.chosen / settings.expert
    padded_tokens, one = np.maximum(routed, local_experts * overheads.rows), np.ones_like(tokens)
    time = np.zeros_like(tokens)
    for product in (up, down):
        inner, outer = product.inner(ranks), product.outer(ranks)
        work = linear(serving, kernels, padded_tokens, inner, outer, EXPERTS) / overheads.grouped_work
        read = linear(serving, kernels, one, inner, local_experts * outer, EXPERTS) / overheads.grouped_share
        time = time + (work**3 + read**3) ** (1 / 3)
    time = time / np.where((settings.data > 1.0) & ~settings.exchanges, overheads.exchanged_share, 1.0)
    traffic = kernels.memory_seconds(routed * 2.0 * (2.0 * up.inputs + up.outer(ranks) + down.inner(ranks)))
    router = linear(serving, kernels, tokens / settings.data, float(hidden), float(experts.count), "")
    small_kernels = overheads.experts.get(precision, max(overheads.experts.values(), default=0.0))
    whole = np.where((settings.expert > 1.0) & (settings.data == 1.0), overheads.whole_experts.get(precision, 0.0), 0.0)
    return time + traffic + router + small_kernels + whole


LOW_LATENCY_TOKENS = 256.0
"""Tokens of a rank up to which engines use kernels that send each token directly, without forwarding on a host: the
limit that DeepEP recommends (deepseek-ai/DeepEP docs/legacy.md @0297fc80)."""

EXCHANGE_LATENCY = 20e-6
"""Seconds of a message besides the time of its bytes. With 41 GB/s, it gives the times of DeepEP's low-latency kernels
for 128 tokens on 16 to 256 devices within 8% (deepseek-ai/DeepEP docs/legacy.md @0297fc80)."""

BALANCED, SKEW, SKEW_POWER = 1.18, 9.0, 1.4
"""The busiest rank's share of work relative to the mean: `BALANCED` if copies of experts balance the work, as LMSYS
measured (lmsys.org, 2025-05-05, large-scale EP). Without copies, it is 1 + `SKEW` / (experts of a rank) ** `SKEW_POWER`
times as much, which gives the gains of 1.49 and 2.54 that they measured with 8 and 3.6 experts of a rank."""


def imbalance(experts: Experts, settings: Settings) -> FloatArray:
    """Return the expert work of the busiest rank, relative to the mean over ranks that hold whole experts.

    All ranks wait for it in each layer, also if they gather all tokens instead of sending them to their experts.
    """
    skew = 1.0 + SKEW / ((experts.count + settings.copies) / settings.expert) ** SKEW_POWER
    return np.where(settings.expert > 1.0, BALANCED * np.where(settings.balanced, 1.0, skew), 1.0)


def exchange(experts: Experts, serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the seconds that one layer takes to send tokens of attention ranks to experts, and their results back.

    `tokens`: tokens of all attention ranks together. Without a library for such an exchange, all ranks gather all
    tokens and reduce-scatter the results.
    """
    ranks = (settings.tensor * settings.data).astype(np.int64)
    stride = np.ones(ranks.shape, dtype=np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    gathered = costs.collectives.seconds("all_gather", payload, ranks, stride)
    gathered = gathered + costs.collectives.seconds("reduce_scatter", payload, ranks, stride)
    sent = gathered
    if settings.exchanges.any():
        sent = _sent_to_experts(experts, serving, settings, ranks.astype(np.float64), costs, tokens / ranks)
    return np.where(settings.data > 1.0, np.where(settings.exchanges, sent, gathered), 0.0)


def summed_exchange(
    experts: Experts, serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray
) -> FloatArray:
    """Return the seconds that one layer takes longer than in `exchange` if the ranks exchange `tokens` in two
    all-reduces: of tokens that each rank copies into zeros and out of the result, and of the experts' results."""
    ranks = (settings.tensor * settings.data).astype(np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    sums = 2.0 * costs.collectives.seconds("all_reduce", payload, ranks, np.ones(ranks.shape, dtype=np.int64))
    longer = sums + costs.kernels.memory_seconds(3.0 * payload) - exchange(experts, serving, settings, costs, tokens)
    return np.where((settings.data > 1.0) & ~settings.exchanges, np.maximum(longer, 0.0), 0.0)


def _sent_to_experts(
    experts: Experts, serving: Serving, settings: Settings, ranks: FloatArray, costs: Costs, tokens: FloatArray
) -> FloatArray:
    """Return the seconds to send the `tokens` of each rank only to the ranks of their experts, and results back.

    Each of the two messages takes `EXCHANGE_LATENCY`, plus the time of its bytes over the network or over the links of
    a host, whichever is slower. Of many tokens, each is sent to a host once, and forwarded to the ranks there. FP8
    tokens have a scale of 32 bits for 128 elements, NVFP4 tokens (lmsys.org/blog/2025-09-25-gb200-part-2) one of 8 bits
    for 16; results have 16 bits.
    """
    chosen, domain = float(experts.chosen), serving.link_domain
    token_bytes = {"fp8": 1.0 + 4.0 / 128.0, "nvfp4": 0.5625}.get(serving.precision, 2.0)
    sent = tokens * experts.expert_width(serving.model.hidden_size) * (token_bytes + 2.0)
    hosts, inside = np.maximum(ranks / domain, 1.0), np.minimum(ranks, domain)
    to_ranks, to_hosts = (distinct_experts(1.0 * each, 1.0, chosen) for each in (ranks, hosts))
    is_direct = np.where(np.isnan(settings.direct), tokens <= LOW_LATENCY_TOKENS, settings.direct == 1.0)
    over_network = np.where(is_direct, to_ranks, to_hosts) * (1.0 - 1.0 / hosts)
    over_links = to_ranks * (inside - 1.0) / np.where(is_direct, ranks, inside)
    seconds = sent * over_links * _seconds_per_byte(costs, 1)
    if (hosts > 1.0).any():
        seconds = np.maximum(seconds, sent * over_network * _seconds_per_byte(costs, domain))
    return 2.0 * EXCHANGE_LATENCY + seconds


def _seconds_per_byte(costs: Costs, stride: int) -> float:
    """Return the seconds per byte of a large message between two devices that are `stride` devices apart."""
    size = 1e9
    pair, distance = np.array([2]), np.array([stride])
    first, second = costs.collectives.seconds("send", np.array([size, 2.0 * size]), pair, distance).tolist()
    return float(second - first) / size
