"""Kimi Delta Attention: a gated delta rule with a decay for each channel (arXiv 2510.26692), as in Kimi Linear."""

from dataclasses import dataclass

from flagcore.domain.model import Mixer, Output, Product


@dataclass(frozen=True, kw_only=True)
class KimiDeltaAttention(Mixer):
    """Queries, keys, values and gates have `num_heads` heads of `head_dim` elements.

    Decays and gates are projected over `head_dim` elements, or each by one layer (`whole_gates`, as in Ling 3.0).
    Queries, keys and values each pass through a convolution over `kernel` tokens.

    Sources: transformers 5.24 `models/kimi_linear` and `models/bailing_hybrid`.
    """

    label = "Kimi Delta Attention"

    num_heads: int
    head_dim: int
    kernel: int = 4
    whole_gates: bool = False

    @property
    def width(self) -> int:
        """The total width of queries, keys or values."""
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> int:
        return self.num_heads

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        width, rank = self.width, self.head_dim
        first = [(name, width) for name in ("q_proj", "k_proj", "v_proj")] + [("b_proj", self.num_heads)]
        first += [("f_proj", width), ("g_proj", width)] if self.whole_gates else []
        low = (
            _joined(hidden_size, [("f_a_proj", rank), ("g_a_proj", rank)], split=""),
            _joined(rank, [("f_b_proj", width), ("g_b_proj", width)]),
        )
        output = _joined(width, [("o_proj", hidden_size)], split="inputs")
        return _joined(hidden_size, first), *(() if self.whole_gates else low), output

    @property
    def other_weights(self) -> int:
        return 3 * self.kernel * self.width + 2 * self.width + self.num_heads + self.head_dim

    @property
    def moved(self) -> float:
        """As in a gated DeltaNet without repeated keys. Five kernels also read the decays of channels, in 32 bits."""
        states, matrices = self.width * self.head_dim / self.chunk, self.num_heads * self.chunk
        return (6.0 + 10.0 + 9.0 + 10.0) * self.width + 2.0 * states + 2.0 * matrices

    @property
    def moved_back(self) -> float:
        """As `moved`. Nine kernels also read the decays, or write their gradients."""
        states, matrices = self.width * self.head_dim / self.chunk, self.num_heads * self.chunk
        return (9.0 + 27.0 + 20.0 + 18.0) * self.width + 4.0 * states + 4.0 * matrices

    @property
    def saved(self) -> float:
        """As in a gated DeltaNet, with the decays of all channels and their sums in 32 bits."""
        inputs = 3.0 * self.width + self.num_heads + 2.0 * self.head_dim + 2.0 * self.width
        recurrence = 2.0 * self.width + self.num_heads * (2.0 * self.chunk + 2.0) + 2.0 * self.width
        return inputs + 3.0 * self.width + recurrence + 2.0 * self.width

    def core_flops(self, tokens: float) -> float:
        """As in a gated DeltaNet (arXiv 2510.26692, section 3.2)."""
        chunk, dim = float(self.chunk), float(self.head_dim)
        return self.num_heads * (2.0 * chunk * 5.0 * dim + chunk**2 + 6.0 * dim * dim)

    @property
    def state_bytes(self) -> float:
        return 4.0 * self.num_heads * self.head_dim**2 + 2.0 * 3.0 * (self.kernel - 1) * self.width


def _joined(inputs: int, layers: list[tuple[str, int]], split: str = "outputs") -> Product:
    """Return the product that joins layers of these names and outputs."""
    joined = tuple(Output(name, outputs) for name, outputs in layers)
    return Product(inputs=inputs, outputs=sum(each.width for each in joined), joined=joined, split=split)
