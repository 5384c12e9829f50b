"""Norms, and the hyper-connections of several residual streams: what is before and after each mixer and network."""

from dataclasses import dataclass
from typing import ClassVar

from flagcore.domain.model import Part, Product


@dataclass(frozen=True, kw_only=True)
class Norm(Part):
    """An RMS norm (arXiv 1910.07467) of `width` elements, which each tensor-parallel rank has whole.

    A pass moves the tensor `passes` times: forward and backward. On one accelerator, 2.3 to 3.3 and 6.3 to 7.5 were
    measured at sizes that keep it fully busy. It saves its input, and one fp32 number a token.
    """

    label = "Norm"
    passes: ClassVar[tuple[float, float]] = (2.5, 5.0)

    width: int

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return ()

    @property
    def norms(self) -> tuple[int, ...]:
        return (self.width,)


@dataclass(frozen=True, kw_only=True)
class Streams(Norm):
    """The hyper-connection of `count` residual streams of `hidden_size` elements: `width` weights (arXiv 2512.24880).

    Kernels before a part read the streams twice and write their sum, and one after it reads and writes them and reads
    the part's output. Backward is counted with twice this traffic. It saves all streams.
    """

    label = "Residual streams"

    count: int

    @property
    def moved(self) -> float:
        """Elements per element of the hidden size that a forward pass reads and writes."""
        return 4.0 * self.count - 1.0
