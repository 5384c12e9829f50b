"""Mamba: a selective state space with a decay for each channel (arXiv 2312.00752), as in Jamba."""

from dataclasses import dataclass

from flagcore.domain.model import Mixer, Product


@dataclass(frozen=True, kw_only=True)
class Mamba(Mixer):
    """`width` channels, each with a state of `state_size` elements. Decays are projected over `rank` elements.
    `element_bytes`: as in `Mamba2`.

    Source: transformers 5.24 `models/jamba` (`JambaMambaMixer`).
    """

    label = "Mamba"

    width: int
    state_size: int = 16
    rank: int = 256
    kernel: int = 4
    element_bytes: int = 0

    @property
    def heads(self) -> int:
        return self.width

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return (
            Product(inputs=hidden_size, outputs=2 * self.width),
            Product(inputs=self.width, outputs=self.rank + 2 * self.state_size, split="inputs"),
            Product(inputs=self.rank, outputs=self.width),
            Product(inputs=self.width, outputs=hidden_size, split="inputs"),
        )

    @property
    def other_weights(self) -> int:
        return (self.kernel + self.state_size + 3) * self.width + self.rank + 2 * self.state_size

    @property
    def moved(self) -> float:
        """Convolution, scan and gate each read one or two tensors of all channels and write one."""
        return 2.0 * self.width + 3.0 * self.width + 3.0 * self.width

    @property
    def saved(self) -> float:
        return 2.0 * self.width + self.width + 2.0 * self.width + self.width

    def core_flops(self, tokens: float) -> float:
        """Each channel decays, adds to and reads its state."""
        return 6.0 * self.width * self.state_size

    @property
    def state_bytes(self) -> float:
        return float(self.element_bytes or 4) * self.width * self.state_size + 2.0 * (self.kernel - 1) * self.width
