"""Compressed attention of DeepSeek-V4: over a window, and over one key for several tokens."""

from dataclasses import dataclass

from flagcore.domain.model import Mixer, Product
from flagcore_models.mixers.attention import Indexer


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(Mixer):
    """`num_heads` query heads of `head_dim` elements share one key, which is also the value.

    A token attends to the `window` tokens before it, and to one compressed key for every `rate` tokens (0: to none).
    With `index_heads` indexer heads of `index_dim` elements, it attends to the best `index_top_k` of them. Queries are
    projected over `query_rank` elements, outputs in `output_groups` groups over `output_rank` elements each.
    Source: transformers 5.24 `models/deepseek_v4`.
    """

    label = "Compressed attention"
    recurrent = False

    num_heads: int
    head_dim: int
    query_rank: int
    window: int
    output_groups: int
    output_rank: int
    rate: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_top_k: int = 0

    @property
    def heads(self) -> int:
        return self.num_heads

    @property
    def _width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def _compressors(self) -> int:
        """The width of the compressors: a value and a gate, with an indexer of two blocks and for its keys."""
        overlap = 2 if self.index_heads else 1
        return 2 * overlap * (self.head_dim + self.index_dim) if self.rate else 0

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        """Compressors and weights of the indexer's heads keep 16 bits (vLLM 0.32 `deepseek_v4/compressor.py`)."""
        found = [
            Product(inputs=hidden_size, outputs=self.query_rank + self.head_dim, split=""),
            Product(inputs=self.query_rank, outputs=self._width, name="queries"),
            Product(inputs=self._width // self.output_groups, outputs=self.output_groups * self.output_rank),
            Product(inputs=self.output_groups * self.output_rank, outputs=hidden_size, split="inputs"),
        ]
        if self.rate:
            found.append(Product(inputs=hidden_size, outputs=self._compressors + self.index_heads, split="", group=""))
        if self.index_heads:
            found.append(Product(inputs=self.query_rank, outputs=self.index_heads * self.index_dim, split=""))
        return tuple(found)

    @property
    def moved(self) -> float:
        """Norms and rotation of queries and keys; the compressors' inputs."""
        return 5.0 * self._width + 4.0 * self.head_dim + self._compressors

    @property
    def saved(self) -> float:
        """Compressed queries and the key before and after their norms, compressors, indexer queries; queries before and
        after their norm, the output, the inputs of both output products; two 16-bit elements a head for the softmax."""
        inputs = 2.0 * self.query_rank + 2.0 * self.head_dim + self._compressors
        index = self.index_heads * (self.index_dim + 1)
        return inputs + index + 3.0 * self._width + self.output_groups * self.output_rank + 2.0 * self.num_heads

    def core_flops(self, tokens: float) -> float:
        """Scores and values over the keys, as a mean over the sequence, and the scores of the indexer."""
        compressed = tokens / 2.0 / self.rate if self.rate else 0.0
        chosen = min(compressed, self.index_top_k) if self.index_heads else compressed
        attended = 4.0 * self._width * (min(self.window, tokens / 2.0) + chosen)
        return attended + 2.0 * self.index_heads * self.index_dim * compressed

    @property
    def state_bytes(self) -> float:
        """The keys of the window, in 16 bits."""
        return 2.0 * self.window * self.head_dim

    @property
    def index_bytes(self) -> float:
        """The bytes per token in the cache of the indexer."""
        return Indexer(heads=self.index_heads, head_dim=self.index_dim, top_k=self.index_top_k).token_bytes / self.rate

    def token_bytes(self, element_bytes: float) -> float:
        return self.head_dim * element_bytes / self.rate + self.index_bytes if self.rate else 0.0

    def read(self, tokens: float) -> float:
        """The compressed keys that are chosen, and all keys of the indexer, relative to all keys in 16 bits."""
        if not self.index_heads:
            return tokens
        keys = 2.0 * self.head_dim / self.rate
        read = min(tokens, self.index_top_k * self.rate) * keys + tokens * self.index_bytes
        return read / (keys + self.index_bytes)
