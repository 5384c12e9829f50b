"""Norms, and hyper-connections of several residual streams: what is before and after each mixer and network."""

from dataclasses import dataclass
from typing import ClassVar

from flagcore.domain.model import Part, Product


@dataclass(frozen=True, kw_only=True)
class Norm(Part):
    """An RMS norm (arXiv 1910.07467) of `width` elements. It saves its input, and one fp32 number a token.

    `passes`: how often it moves its tensor, forward and backward. On one accelerator, 2.3 to 3.3 and 6.3 to 7.5 were
    measured at sizes that keep it fully busy.
    """

    passes: ClassVar[tuple[float, float]] = (2.5, 5.0)

    width: int

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return ()

    @property
    def norms(self) -> tuple[int, ...]:
        return (self.width,)


@dataclass(frozen=True, kw_only=True)
class Streams(Norm):
    """The hyper-connection of `count` residual streams, with `width` weights (arXiv 2512.24880). It saves all streams.

    `moved`: elements per element of the hidden size, of streams that are read twice and their sum before a part, and of
    its output and streams that are read and written after it. Backward is counted with twice this traffic.
    """

    count: int

    @property
    def moved(self) -> float:
        return 4.0 * self.count - 1.0
