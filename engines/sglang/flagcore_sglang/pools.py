"""How SGLang divides its cache: a part for states, and one for the tokens of layers with windows; experts on the host.

Sources: sglang 0.5.23 `configs/model_config.py` (is_hybrid_swa_model), `model_executor/pool_configurator.py`,
`mem_cache/kv_cache_configurator.py`, `arg_groups/fields/schedule.py` and `arg_groups/model_overrides`; 0.5.8, 0.5.9 and
0.5.16 have the same shares for fewer families.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flagcore_models.layers import layers_of, mixer_counts
from flagcore_models.mixers.compressed_attention import CompressedAttention
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.lightning_attention import LightningAttention
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_models.networks.experts import Experts
from flagcore_serving.job import EngineArg

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.spec import Spec

INKLING = "inkling_text"
WINDOWS_APART = (
    *(INKLING, "beam", "gemma4", "gpt_oss", "granite_swa", "granitemoe_swa", "laguna", "llama4", "mellum"),
    *("mimo_v2", "muse_glimmer", "step3p"),
)
"""The beginnings of families whose windows have a part of the cache. In others, such as Gemma 3, they cache all."""
OFF_WITH_HOST = ("mimo_v2", "step3p")
"""Those whose windows cache all tokens if the cache continues in the memory of the host."""
STATE_SLOTS = 5.0
"""States per running request with a radix cache: three, and two for states that it tracks."""

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TYPED = GatedDeltaNet, LightningAttention, Mamba2


def with_states(model: Model, args: Mapping[str, EngineArg]) -> Model:
    """Return a model whose recurrent states have elements of the type that `mamba-ssm-dtype` sets, if it does."""
    size = _ELEMENT_BYTES.get(str(args.get("mamba-ssm-dtype")))
    layers = [
        replace(each, mixer=replace(each.mixer, element_bytes=size)) if isinstance(each.mixer, _TYPED) else each
        for each in model.layers
        if size
    ]
    return replace(model, layers=tuple(layers)) if layers else model


def state_share(family: str, args: Mapping[str, EngineArg]) -> float:
    """Return the share of the cache for states of a model of this `family`."""
    ratio = _ratio(args, "mamba-full-memory-ratio", 0.1 if family == INKLING else 0.9)
    return ratio / (1.0 + ratio)


def window_share(family: str, args: Mapping[str, EngineArg]) -> float:
    """Return the tokens for which windows have room, relative to other layers, or 0 if they share their memory."""
    on_host = bool(args.get("enable-hierarchical-cache")) and family.startswith(OFF_WITH_HOST)
    if not family.startswith(WINDOWS_APART) or on_host or args.get("disable-hybrid-swa-memory"):
        return 0.0
    return _ratio(args, "swa-full-tokens-ratio", 0.1 if family == INKLING else 0.8)


LOCKS_WINDOW_SINCE = (0, 5, 16)
"""The first release in which a running request locks no more of its prompt than a window (`mem_cache/registry.py`)."""


def window_kept(spec: Spec, pages: IntArray, release: tuple[int, ...]) -> FloatArray:
    """Return `Settings.window_kept` with cached prefixes: a running request locks the windows of its last piece of a
    prompt in releases before `LOCKS_WINDOW_SINCE`, and has the window of its answer, which is freed every 128
    iterations (0.5.15 `mem_cache/swa_radix_cache.py`: inc_lock_ref; `mem_cache/common.py`:
    free_swa_out_of_window_slots; `environ.py`).

    `pages`: tokens of a page of each candidate.
    """
    if release >= LOCKS_WINDOW_SINCE:
        return np.zeros(pages.shape)
    window = max((getattr(each.mixer, "window", None) or 0 for each in spec.model.layers), default=0)
    answer = float(np.mean([load.means[1] for load in spec.serve.loads]))
    return np.asarray(np.minimum(np.maximum(window, pages) + 64.0, answer))


RINGS = 8, 16
"""Tokens whose compressors' states a layer with an indexer keeps for each window: without drafts, and with drafts."""
WINDOWS_BY_REQUEST_SINCE = (0, 5, 17)
"""The first release that may size windows of compressed attention by requests: 0.5.16 does not, 0.5.23 does."""


def compressed_token_bytes(model: Model, args: Mapping[str, EngineArg], element_bytes: float, ring: int) -> float:
    """Return the bytes of all layers that SGLang 0.5.16 counts for a token of a model with compressed attention: its
    share of the compressed keys, and of the windows' keys and compressors' states in fp32, for a tenth of the tokens.
    Source: 0.5.16 `model_executor/pool_configurator.py` (DSV4PoolConfigurator), `arg_groups/overrides.py`.
    """
    ratio, total = compressed_share(args), 0.0
    for mixer, number in mixer_counts(model).items():
        size = mixer.token_bytes(element_bytes)
        if isinstance(mixer, CompressedAttention):
            states = ring / mixer.window * 16.0 * (mixer.head_dim + mixer.index_dim) if mixer.index_heads else 0.0
            size += ratio * (mixer.head_dim * element_bytes + states)
        total += number * size
    return total


def compressed_share(args: Mapping[str, EngineArg]) -> float:
    """Return the tokens of compressed attention for which windows have room, relative to all tokens."""
    return _ratio(args, "swa-full-tokens-ratio", 0.1)


def compressor_bytes(model: Model) -> float:
    """Return the bytes of the compressors' states of a running request: values and gates in fp32 of all tokens for a
    key, in layers without an indexer (0.5.15 and 0.5.23 `model_executor/pool_configurator.py`:
    _get_c128_state_fixed_bytes). With drafts they are twice as many."""
    return sum(
        number * each.rate * 8.0 * each.head_dim
        for each, number in mixer_counts(model).items()
        if isinstance(each, CompressedAttention) and not each.index_heads
    )


def _ratio(args: Mapping[str, EngineArg], flag: str, default: float) -> float:
    given = args.get(flag)
    return float(given) if isinstance(given, (int, float)) and given > 0 else default


def experts_on_host(model: Model, args: Mapping[str, EngineArg]) -> float:
    """Return how many layers' routed experts are in the memory of the host with ktransformers, which keeps some of each
    layer on the devices (kvcache-ai/ktransformers `doc/en/kt-kernel/Kimi-K2-Thinking-Native.md`, 2026-08)."""
    kept, experts = args.get("kt-num-gpu-experts", 0), model.num_moe_experts
    if not experts or not isinstance(kept, int) or not args.keys() & {"kt-weight-path", "kt-amx-weight-path"}:
        return 0.0
    layers = sum(isinstance(each.network, Experts) for each in layers_of(model))
    return layers * (1.0 - min(kept / experts, 1.0))
