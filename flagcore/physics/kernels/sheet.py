"""Measured kernels of a chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.space import BoolArray, FloatArray

ATTENTION = tuple(size.name for size in fields(AttentionShape))

SIZES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention": ATTENTION,
    "attention_backward": ATTENTION,
    "copy": ("bytes",),
    "elementwise": ("bytes",),
    "host_copy": ("bytes",),
    "launch": (),
}
"""The kinds of kernels of a sheet and their sizes, as in `flagcore.contracts.KernelCosts`. The size of `copy` and
`elementwise` is the total number of bytes read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A measured kernel, with `sizes` in the order of `SIZES`.

    If `bound` is true, the host was slower than the device, so `seconds` is an upper bound.
    """

    name: str
    precision: str = ""
    sizes: tuple[float, ...]
    seconds: float
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """The kernels of one kind and precision: one row of `sizes` each, its time, and whether that is an upper bound."""

    sizes: FloatArray
    seconds: FloatArray
    bound: BoolArray

    def select(self, rows: BoolArray) -> Rows:
        """Return the rows that a mask selects."""
        return Rows(self.sizes[rows], self.seconds[rows], self.bound[rows])

    @property
    def exact(self) -> Rows:
        """The rows with measured times, without upper bounds."""
        return self.select(~self.bound)

    def attention_shape(self) -> AttentionShape:
        """Return the sizes of attention kernels, with one element per row."""
        return AttentionShape(**dict(zip(ATTENTION, self.sizes.T, strict=True)))


@dataclass(frozen=True, slots=True)
class KernelSheet:
    """Measured kernels by kind and precision."""

    kernels: tuple[Kernel, ...]

    def rows(self, name: str, precision: str = "") -> Rows:
        """Return the kernels of one kind and precision."""
        found = [kernel for kernel in self.kernels if kernel.name == name and kernel.precision == precision]
        sizes = np.array([kernel.sizes for kernel in found], dtype=np.float64).reshape(len(found), len(SIZES[name]))
        seconds = np.array([kernel.seconds for kernel in found], dtype=np.float64)
        return Rows(sizes, seconds, np.array([kernel.bound for kernel in found], dtype=bool))

    def precisions(self, name: str) -> tuple[str, ...]:
        """Return the precisions in which a kind of kernel was measured."""
        return tuple(dict.fromkeys(kernel.precision for kernel in self.kernels if kernel.name == name))
