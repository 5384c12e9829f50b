"""Kernels that were measured on one chip."""

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
"""The kernels of a sheet, and the sizes of each: as in `flagcore.contracts.KernelCosts`. `copy` and
`elementwise` move bytes in all: one copies, the other is a kernel of a framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One measured kernel: `sizes` in the order of `SIZES`.

    Where `bound` is true the host was slower than the device, and the device took at most these `seconds`.
    """

    name: str
    precision: str = ""
    sizes: tuple[float, ...]
    seconds: float
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Kernels of one kind and precision: a row each of `sizes`, its time, and whether that is only a bound."""

    sizes: FloatArray
    seconds: FloatArray
    bound: BoolArray

    def select(self, rows: BoolArray) -> Rows:
        """Return some rows."""
        return Rows(self.sizes[rows], self.seconds[rows], self.bound[rows])

    @property
    def exact(self) -> Rows:
        """Return the rows whose time is the device's."""
        return self.select(~self.bound)

    def attention_shape(self) -> AttentionShape:
        """Return the sizes of rows that are attention's, an element each."""
        return AttentionShape(**dict(zip(ATTENTION, self.sizes.T, strict=True)))


@dataclass(frozen=True, slots=True)
class KernelSheet:
    """Measured kernels by kind and precision."""

    kernels: tuple[Kernel, ...]

    def rows(self, name: str, precision: str = "") -> Rows:
        """Return the kernels of one kind and precision; none is an empty array."""
        found = [kernel for kernel in self.kernels if kernel.name == name and kernel.precision == precision]
        sizes = np.array([kernel.sizes for kernel in found], dtype=np.float64).reshape(len(found), len(SIZES[name]))
        seconds = np.array([kernel.seconds for kernel in found], dtype=np.float64)
        return Rows(sizes, seconds, np.array([kernel.bound for kernel in found], dtype=bool))

    def precisions(self, name: str) -> tuple[str, ...]:
        """Return the precisions in which a kind was measured."""
        return tuple(dict.fromkeys(kernel.precision for kernel in self.kernels if kernel.name == name))
