"""The indexer of sparse attention: it selects the tokens to which others attend."""

from dataclasses import dataclass


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
