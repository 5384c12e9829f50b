"""Gated short convolutions, as in LFM2 (arXiv 2511.23404)."""

from dataclasses import dataclass

from flagcore.domain.model import Mixer, Product


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Mixer):
    """`width` channels with two gates and a convolution over `kernel` tokens.

    Source: transformers 5.24 `models/lfm2`.
    """

    label = "Short convolution"

    width: int
    kernel: int = 3

    @property
    def heads(self) -> int:
        return self.width

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return (
            Product(inputs=hidden_size, outputs=3 * self.width),
            Product(inputs=self.width, outputs=hidden_size, split="inputs"),
        )

    @property
    def other_weights(self) -> int:
        return self.kernel * self.width

    @property
    def moved(self) -> float:
        """The first gate and the convolution each read and write; the second gate reads two tensors and writes one."""
        return 3.0 * self.width + 2.0 * self.width + 3.0 * self.width

    @property
    def saved(self) -> float:
        return 3.0 * self.width + 3.0 * self.width

    @property
    def state_bytes(self) -> float:
        return 2.0 * (self.kernel - 1) * self.width
