"""The KV cache as vLLM divides it: blocks of one size, which groups of layers of one kind take for each request.

All kinds have pages of as many bytes: smaller ones get more tokens, or are padded. All groups have as many layers:
some are padded, too. Sources: vllm 0.32 `v1/core/kv_cache_utils.py` (get_kv_cache_groups,
unify_kv_cache_spec_page_size, get_max_concurrency_for_kv_cache_config), `v1/kv_cache_interface.py`
(max_memory_usage_bytes), `platforms/interface.py` (_align_hybrid_block_size), `layers/mamba/mamba_utils.py`; for modes
of states, `models/config.py` (MambaModelConfig) of 0.20 to 0.31.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from flagcore_models.layers import layers_of, mixer_counts
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.compressed_attention import CompressedAttention
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_models.mixers.lightning_attention import LightningAttention
from flagcore_models.mixers.mamba import Mamba
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_serving.job import EngineArg

from flagcore.domain.model import Mixer, Model
from flagcore.domain.space import BoolArray, FloatArray, IntArray

GRAIN, LATENT_GRAIN = 16, 128
"""The tokens of which a block is a multiple if the model has states, without and with latent attention."""
NARROW = (Mamba, Mamba2, GatedDeltaNet, LightningAttention)
"""The mixers whose states have the model's 16 bits, unless config.json sets another type."""
KEEPS_STATES = (0, 28, 0), (0, 22, 0)
"""Before the first of these releases, cached prefixes have a state for each block of Mamba's layers (mode `all`); with
drafts, only since the second one."""
STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The bytes of an element of a state by the type that a flag sets."""


class Groups(NamedTuple):
    """The groups of layers of one kind, by candidate.

    - `number`: how many groups there are.
    - `block`: tokens of a block.
    - `window`: the tokens of a window; 0 if blocks hold all tokens. `pieces`: as in `Attention`.
    - `states`: blocks with states that are counted for a sequence; 0 if blocks hold tokens, or each has a state.
      `running`: those that it keeps after its prompt: what is cached of them may be evicted.
    """

    number: FloatArray
    block: FloatArray
    window: int
    states: FloatArray
    running: FloatArray
    pieces: bool = False

    @property
    def full(self) -> FloatArray:
        """The mean blocks of a full window, which may begin inside a block, or of a piece, which fills up."""
        return np.asarray(np.ceil(self.window / self.block) * (1.0 - 0.5 * self.pieces) + 0.5)


class Blocks(NamedTuple):
    """The blocks of a device's cache, by candidate.

    - `bytes`: the bytes of a block: of the pages of all layers of a group that are on the device.
    - `groups`: the groups of each kind of layers.
    """

    bytes: FloatArray
    groups: Sequence[Groups]

    def reserved(self, tokens: FloatArray, in_flight: FloatArray) -> FloatArray:
        """Return the bytes that vLLM counts for a request of `tokens` tokens.

        `in_flight`: tokens of all batches that are computed at once, which a window holds in addition. A window may
        begin inside a block.
        """
        total = np.zeros(self.bytes.shape)
        for each in self.groups:
            begins = each.window > 0 and not each.pieces  # pieces begin with a block
            held = np.minimum(each.window - begins + in_flight, tokens) if each.window else tokens
            blocks = np.ceil(held / each.block) + begins
            total = total + each.number * np.where(each.states > 0.0, each.states, blocks + each.running)
        return total * self.bytes

    def of_token(self, tokens: float) -> FloatArray:
        """Return the bytes by which a sequence of `tokens` tokens grows with each token: without those of `fixed`."""
        growing = [each.number / each.block * self._grows(each, tokens) for each in self.groups]
        return np.asarray(self.bytes * sum(growing))

    def fixed(self, tokens: float) -> FloatArray:
        """Return the bytes of a sequence of `tokens` tokens that do not grow: its states, and its full windows."""
        held = [
            each.number * np.where((each.states > 0.0) | self._grows(each, tokens), each.running, each.full)
            for each in self.groups
        ]
        return np.asarray(self.bytes * sum(held, start=np.zeros(self.bytes.shape)))

    def admitting(self, tokens: float, prompt: float, in_flight: FloatArray) -> FloatArray:
        """Return the bytes that must be free beside those of `fixed` for a prompt to be admitted (`tokens` as there).

        A window holds all that is computed at once, and a cached state is freed one step later.
        """
        total = np.zeros(self.bytes.shape)
        for each in self.groups:
            window = np.ceil(np.minimum(each.window - 1 + in_flight, prompt) / each.block)
            held = np.maximum(window + 1.0 - each.full, 0.0) * ~self._grows(each, tokens)
            total = total + each.number * np.where(each.states > 0.0, each.states > each.running, held)
        return total * self.bytes

    @staticmethod
    def _grows(each: Groups, tokens: float) -> BoolArray:
        return np.asarray((each.states == 0.0) & (not 0 < each.window <= tokens))


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers with equal pages: `heads` cached heads of `width` elements and index keys of `index` bytes per token, or
    states of `size` bytes, of which a sequence may keep some `more`. `name`: the label of their mixer. `pieces`: as in
    `Attention`."""

    heads: int = 0
    width: float = 0.0
    index: float = 0.0
    window: int = 0
    size: float = 0.0
    more: float = 0.0
    pieces: bool = False
    name: str = field(default="", compare=False)

    @property
    def is_state(self) -> bool:
        return self.size > 0.0

    def page(self, tensor: FloatArray, element_bytes: FloatArray, block: IntArray) -> FloatArray:
        """Return the bytes of a page."""
        token = np.maximum(self.heads / tensor, 1.0) * self.width * element_bytes + self.index
        return np.asarray(self.size / tensor + 0.0 * token if self.is_state else block * token)


@lru_cache(maxsize=256)
def with_states(model: Model, element_bytes: int = 0) -> Model:
    """Return a model whose states have the types that vLLM gives them, or elements of `element_bytes` bytes."""
    layers = [
        replace(each, mixer=replace(each.mixer, element_bytes=element_bytes or 2))
        if isinstance(each.mixer, NARROW) and (element_bytes or not each.mixer.element_bytes)
        else each
        for each in model.layers
    ]
    return replace(model, layers=tuple(layers)) if tuple(layers) != model.layers else model


def is_packed(model: Model) -> bool:
    """Return whether pages of different sizes share a block, as those of compressed attention do."""
    return any(isinstance(each, CompressedAttention) for each in mixer_counts(model))


def kinds_of(model: Model, *, frees_windows: bool = True, checkpoints: bool = True) -> list[Kind | None]:
    """Return the kind of each layer's cache, in order; None for a layer that has none. See `blocks_of`."""

    def kind(mixer: Mixer | None) -> Kind | None:
        name = mixer.label if mixer else ""
        if isinstance(mixer, Attention) and (width := mixer.cached_on(1.0)):
            window, heads = (mixer.window or 0) * frees_windows, mixer.cached_heads
            pieces = mixer.pieces and bool(window)
            return Kind(heads, float(width) / heads, mixer.index_bytes, window, pieces=pieces, name=name)
        if mixer and mixer.recurrent and mixer.state_bytes:
            more = float(checkpoints and isinstance(mixer, Mamba2))
            return Kind(size=mixer.state_bytes, more=more, name=name)
        width = mixer.token_bytes(1.0) if mixer else 0.0
        return Kind(1, width, name=name) if width else None

    return [kind(each.mixer) for each in layers_of(with_states(model))]


def state_element_bytes(args: Mapping[str, EngineArg]) -> int:
    """Return the bytes of an element of a state that flags set, or 0."""
    types = (STATE_BYTES.get(str(args.get(name))) for name in ("mamba-ssm-cache-dtype", "mamba-cache-dtype"))
    return next(filter(None, types), 0)


def keeps_states(
    model: Model, release: tuple[int, ...], args: Mapping[str, EngineArg], caches: BoolArray, drafts: BoolArray
) -> BoolArray:
    """Return whether each block of Mamba's layers has a state. `caches`, `drafts`: whether prefixes are cached, and
    tokens are drafted."""
    mode, mixers = args.get("mamba-cache-mode", "none"), mixer_counts(model)
    if mode != "none" or not any(isinstance(each, (Mamba, Mamba2)) for each in mixers):
        return np.asarray(caches & (mode == "all"))
    until, drafts_since = KEEPS_STATES
    is_hybrid = any(isinstance(each, Attention) for each in mixers)
    return np.asarray(caches & is_hybrid & (release < until) & (~drafts | (release >= drafts_since)))


def aligned_block(
    model: Model, tensor: FloatArray, element_bytes: FloatArray, block: IntArray, keeps: BoolArray
) -> IntArray:
    """Return the tokens of a block of attention of at least `block` tokens that holds a state of linear attention.

    `keeps`: as in `blocks_of`; such a block has whole chunks of the scan.
    """
    mixers = mixer_counts(with_states(model))
    state = max((each.state_bytes for each in mixers if each.recurrent), default=0.0)
    attention = next((each for each in mixers if isinstance(each, Attention)), None)
    if not state or attention is None:
        return block
    grain = np.maximum(block, LATENT_GRAIN if isinstance(attention, LatentAttention) else GRAIN)
    grain = np.where(keeps, np.lcm(grain, Mamba2.chunk), grain)
    token = np.asarray(attention.cached_on(tensor) * element_bytes)
    return np.asarray(np.maximum(block, grain * np.ceil(state / tensor / (grain * token)).astype(np.int64)))


def blocks_of(
    model: Model,
    tensor: FloatArray,
    stages: IntArray,
    element_bytes: FloatArray,
    block: IntArray,
    caches: BoolArray,
    drafted: IntArray,
    *,
    keeps: BoolArray,
    similar: float,
    frees_windows: bool,
    checkpoints: bool,
) -> Blocks:
    """Return the blocks of a device's cache.

    `tensor`, `stages`: ranks that divide heads, and layers. `block`: tokens of a block of full attention. A sequence
    has a block with its state in each group, one for each of the `drafted` tokens and, where prefixes are cached
    (`caches`), one of the step before; with `checkpoints`, Mamba-2 has one more (`mamba_mixer2.py`). Where it `keeps`
    states, it has one for each block of tokens. All layers of each kind are one group if no kind has `similar` times
    the layers of another one.
    """
    zero, mixers = np.zeros(block.shape), mixer_counts(with_states(model))
    if is_packed(model):
        return _packed(mixers, stages, zero)
    kinds = Counter(filter(None, kinds_of(model, frees_windows=frees_windows, checkpoints=checkpoints)))
    if not kinds:
        return Blocks(bytes=zero, groups=())
    pages = {each: each.page(tensor, element_bytes, block) for each in kinds}
    running = {each: np.asarray((~keeps + 1.0 * drafted) * each.is_state) for each in kinds}
    held = {each: ~keeps * (running[each] + caches * (1.0 + each.more) * each.is_state) for each in kinds}
    if len({(each.is_state, each.window) for each in kinds}) == 1:  # one kind of cache, perhaps of several sizes
        first, layers = next(iter(kinds)), len(layers_of(model))
        size = sum((number * pages[each] for each, number in kinds.items()), start=zero)
        group = Groups(
            number=zero + 1.0, block=zero + block, window=first.window, states=held[first], running=running[first]
        )
        return Blocks(bytes=np.ceil(layers / stages) / layers * size, groups=[group])
    least, most = min(kinds.values()), max(kinds.values())
    layers, page = most if most < similar * least else least, np.maximum.reduce(list(pages.values()))
    groups = [
        Groups(
            number=zero + np.ceil(number / layers),
            block=np.asarray(
                block * np.where((page % pages[each] == 0.0) & ~(keeps & each.is_state), page // pages[each], 1.0)
            ),
            window=each.window,
            states=held[each],
            running=running[each],
            pieces=each.pieces,
        )
        for each, number in kinds.items()
    ]
    return Blocks(bytes=np.ceil(layers / stages) * page, groups=groups)


PACKED_BLOCK, WINDOW_BLOCK, ALIGNMENT = 256, 64, 576
"""Tokens of a block of compressed keys, and of windows, and the bytes of which a page is a multiple."""
ROW, INDEX_ROW = 72, 4
"""Bytes of a key, and of an index key, beside those of their elements of 8 bits: 64 are in 16 bits, and scales."""


def _packed(mixers: Mapping[Mixer, int], stages: IntArray, zero: FloatArray) -> Blocks:
    """Return the blocks of a model with compressed attention, whose layers have pages of different sizes.

    Each rank has all of them: compressed keys with those of the indexer, the windows of all layers, and the states of
    compressors in 32 bits, which are windows of small blocks. Blocks have the size of the largest group. The windows
    that have one size for each layer are divided into groups as large as those that have two. Sources: vllm 0.32
    `models/deepseek_v4/{attention,compressor}.py`, `v1/attention/backends/mla/sparse_swa.py` and
    `v1/core/kv_cache_utils.py` (_get_packed_kv_cache_groups).
    """
    pages: dict[tuple[int, int], Counter[float]] = {}  # by window and tokens of a block

    def add(window: int, block: int, row: float, number: int) -> None:
        page = ALIGNMENT * math.ceil(row / ALIGNMENT)
        pages.setdefault((window, block), Counter())[page] += number

    for mixer, number in mixers.items():
        if not isinstance(mixer, CompressedAttention):
            continue
        row, index, rate = mixer.head_dim + ROW, mixer.index_dim + INDEX_ROW, mixer.rate
        add(mixer.window, WINDOW_BLOCK, WINDOW_BLOCK * row, number)
        if not rate:
            continue
        overlap, block = (2, 4) if mixer.index_heads else (1, 8)
        add(0, PACKED_BLOCK, PACKED_BLOCK // rate * row, number)
        add(overlap * rate, block, block * 8.0 * overlap * mixer.head_dim, number)
        if mixer.index_heads:
            add(0, PACKED_BLOCK, PACKED_BLOCK // rate * index, number)
            add(overlap * rate, block, block * 8.0 * overlap * mixer.index_dim, number)
    counts = {key: max(each.values()) for key, each in pages.items() if len({*each.values()}) == 1}
    least = max((count for key, count in counts.items() if len(pages[key]) > 1), default=0)
    sizes = range(least, max(counts.values()) + 1) if least else ()
    size = min(sizes, key=lambda each: (sum(-count % each for count in counts.values()), -each), default=math.inf)
    parts = {key: max(math.ceil(counts.get(key, 1) / size), 1) for key in pages}
    widest = max(sum(page * math.ceil(of / parts[key]) for page, of in pages[key].items()) for key in pages)
    groups = [
        Groups(number=zero + parts[window, block], block=zero + block, window=window, states=zero, running=zero)
        for window, block in pages
    ]
    return Blocks(bytes=np.asarray(widest / stages), groups=groups)
