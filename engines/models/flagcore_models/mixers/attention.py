"""Softmax attention with a key for each query head or for several of them (arXiv 2305.13245), over all tokens, over a
window, or over the tokens that an indexer selects (DeepSeek-V3.2, arXiv 2512.02556)."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from flagcore.domain.model import Mixer, Output, Product
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556).

    A layer has an indexer with `heads` heads of `head_dim` elements, which scores all tokens. Attention then uses
    only the `top_k` tokens with the highest scores. The indexer caches one key per token, with 8 bits per element and
    a 32-bit scale per 128 elements.
    """

    heads: int
    head_dim: int
    top_k: int

    @property
    def token_bytes(self) -> float:
        """The bytes per token in the indexer cache of one layer."""
        return self.head_dim * (1.0 + 4.0 / 128.0)


@dataclass(frozen=True, kw_only=True)
class Attention(Mixer):
    """`num_heads` query heads of `head_dim` elements, which share `groups` keys, and values of `value_dim` elements.

    `window`: the number of tokens to which a token attends. None: all tokens. `pieces`: whether it attends to those of
    its own piece of so many tokens instead, as in Llama 4.
    `indexer`: what selects the tokens, in sparse attention. Without heads: those that an earlier layer selects.
    `projections`: 2 if keys and values have their own projections, 1 if keys are also the values, 0 if both are those
    of an earlier layer, which caches them.
    `gate`: whether a gate, of the width of the output, scales the output.
    `bias`: whether queries, keys and values have biases. `qk_norm`: whether queries and keys have norms.
    """

    label = "Attention"

    num_heads: int
    groups: int
    head_dim: int
    value_dim: int
    window: int | None = None
    pieces: bool = False
    indexer: Indexer | None = None
    projections: int = 2
    gate: bool = False
    bias: bool = False
    qk_norm: bool = False

    @property
    def heads(self) -> int:
        return self.num_heads

    @property
    def query_width(self) -> int:
        """The total width of the queries over all heads."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """The total width of the keys over all heads, of this layer or of the earlier one that has them."""
        return self.groups * self.head_dim

    @property
    def value_width(self) -> int:
        """As `key_width`, of the values."""
        return self.groups * self.value_dim

    @property
    def attended(self) -> int:
        """The total width of the output of the attention core over all heads."""
        return self.num_heads * self.value_dim

    @property
    def rotated(self) -> int:
        """The total width of queries and keys that rotary embeddings change."""
        return (self.num_heads + self.groups) * self.head_dim

    @property
    def norms(self) -> tuple[int, ...]:
        return (self.head_dim, self.head_dim) if self.qk_norm else ()

    def inputs(self, hidden_size: int) -> tuple[Product, ...]:
        """Return the products before the attention core."""
        found = [Output("q_proj", self.query_width + self.gate * self.attended)]
        if self.projections:
            found.append(Output("k_proj", self.key_width, self.groups))
        if self.projections == 2:
            found.append(Output("v_proj", self.value_width, self.groups))
        outputs = sum(each.width for each in found)
        joint = Product(
            inputs=hidden_size, outputs=outputs, name="qkv", joined=tuple(found), bias=self.bias, component="qkv_proj"
        )
        return joint, *self._index(hidden_size, hidden_size)

    def _index(self, hidden_size: int, query_rank: int) -> tuple[Product, ...]:
        """Return the products of the indexer, if the layer has one: of its queries, and of its keys with weights."""
        if (index := self.indexer) is None or not index.heads:
            return ()
        part = partial(Product, split="", name="index", adapts=False, component="qkv_proj")
        return (
            part(inputs=query_rank, outputs=index.heads * index.head_dim),
            part(
                inputs=hidden_size,
                outputs=index.head_dim + index.heads,
                joined=(Output("key", index.head_dim), Output("weights", index.heads)),
            ),
        )

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        output = Product(
            inputs=self.attended,
            outputs=hidden_size,
            split="inputs",
            name="output",
            joined=(Output("o_proj", hidden_size),),
            component="out_proj",
        )
        return *self.inputs(hidden_size), output

    @property
    def saved(self) -> float:
        """Queries, keys, values and the output; two 16-bit elements a head for the softmax (arXiv 2307.08691)."""
        norms = (self.query_width + self.key_width) * self.qk_norm
        return float(self.query_width + self.key_width + self.value_width + self.attended + 2 * self.num_heads + norms)

    def pairs(self, tokens: float) -> float:
        """Return the query-key pairs that the layer computes, as a share of those of full attention over `tokens`."""
        if attended := self.window or (self.indexer and self.indexer.top_k):
            part = min(attended / max(tokens, 1.0), 1.0)
            whole = 1.0 // part * part  # the share of tokens in whole pieces
            return whole * part + (1.0 - whole) ** 2 if self.pieces else part * (2.0 - part)
        return 1.0

    def cached(
        self, tokens: FloatArray | float, computed: FloatArray | float = 0.0, *, frees_windows: bool = True
    ) -> FloatArray | float:
        """Return the share of `tokens` tokens that the layer caches.

        A window holds fewer tokens, unless the engine does not free the others (`frees_windows`). While a prompt is
        processed, it also holds the `computed` tokens that are processed at once. Of a piece, half is held on average.
        """
        if self.window is None or not frees_windows:
            return 1.0
        if self.pieces and np.all(np.asarray(tokens) > self.window):
            computed = computed - 0.5 * self.window
        return np.minimum((self.window + computed) / np.maximum(tokens, 1.0), 1.0)

    def read_share(self, tokens: float) -> float:
        """Return the share of the cache of full attention that the layer reads, for a token after `tokens` tokens."""
        share = float(self.cached(tokens))
        if self.indexer is not None:
            share -= 1.0 - min(self.indexer.top_k / max(tokens, 1.0), 1.0)
        return share

    @property
    def cached_width(self) -> int:
        """The width of a cached key and value of one head. 0 if an earlier layer caches them."""
        return (self.head_dim + self.value_dim) * (self.projections > 0)

    @property
    def cached_heads(self) -> int:
        """The number of heads of a cached key. More tensor-parallel ranks than these have copies of the cache."""
        return self.groups

    def cached_on(self, ranks: FloatArray | float) -> FloatArray | float:
        """Return the cached elements per token on one of `ranks` tensor-parallel ranks, without those of an indexer."""
        return np.maximum(self.groups / ranks, 1.0) * self.cached_width

    @property
    def index_bytes(self) -> float:
        """The bytes per token in the cache of the indexer."""
        return self.indexer.token_bytes if self.indexer else 0.0

    def core_flops(self, tokens: float) -> float:
        """Scores and values of the causal half of the pairs."""
        return self.pairs(tokens) * tokens * float(self.query_width + self.attended)
