"""Lightning attention: linear attention with a fixed decay per head (arXiv 2401.04658), as in MiniMax-01 and Ling."""

from dataclasses import dataclass

from flagcore.domain.model import Mixer, Product


@dataclass(frozen=True, kw_only=True)
class LightningAttention(Mixer):
    """Queries, keys, values and gates have `num_heads` heads of `head_dim` elements. `element_bytes`: as in `Mamba2`.

    Source: transformers 5.24 `models/minimax` (`MiniMaxLightningAttention`).
    """

    label = "Lightning attention"
    chunk = 256

    num_heads: int
    head_dim: int
    element_bytes: int = 0

    @property
    def width(self) -> int:
        """The total width of queries, keys, values or gates."""
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> int:
        return self.num_heads

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return (
            Product(inputs=hidden_size, outputs=4 * self.width),
            Product(inputs=self.width, outputs=hidden_size, split="inputs"),
        )

    @property
    def other_weights(self) -> int:
        return self.width

    @property
    def moved(self) -> float:
        """The activation function reads and writes queries, keys and values; the recurrence reads them and writes
        values and the states of chunks; norm and gate read values and gates, and write values."""
        return 6.0 * self.width + 4.0 * self.width + 4.0 * self.width + 4.0 * self.width * self.head_dim / self.chunk

    @property
    def saved(self) -> float:
        return 4.0 * self.width + 3.0 * self.width + 3.0 * self.width

    def core_flops(self, tokens: float) -> float:
        """Per head and chunk: Q K^T and its product with V, computed whole, and two products with the state."""
        return self.num_heads * (4.0 * self.chunk * self.head_dim + 4.0 * self.head_dim**2)

    @property
    def state_bytes(self) -> float:
        return float(self.element_bytes or 4) * self.num_heads * self.head_dim**2
