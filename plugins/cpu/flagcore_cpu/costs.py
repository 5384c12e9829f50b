"""Kernel times of one core from its measured rates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import BYTES, Curve, Roofline
from flagcore_cpu.machine import Processor
from flagcore_cpu.measure import ATTENTION
from flagcore_cpu.rates import MAPPED_BYTES, Rates

LAUNCH = 2.8
"""Ratio of the host's time for a kernel of a layer to its time for a tiny kernel alone: 6.5 and 2.3 microseconds on an
AMD EPYC (Zen 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensors(Roofline):
    """A roofline whose products return new tensors. Large ones have new pages, which take `page_s` seconds per byte."""

    page_s: float

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        result_bytes = m * n * BYTES.get(precision, 2.0)
        pages = np.where(result_bytes >= MAPPED_BYTES, result_bytes * self.page_s, 0.0)
        return Roofline.gemm_seconds(self, m, n, k, precision) + pages


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Kernel costs (`flagcore.contracts.KernelCosts`) from measured rates. Attention and element-wise kernels may be
    fast in formats in which matrix products are slow, so they have separate rates. Calibrations correct `products`."""

    products: NewTensors
    forward: Roofline
    backward: Roofline
    rates: Rates

    @classmethod
    def of(cls, chip: Chip, curve: Curve, rates: Rates) -> MeasuredCosts:
        """Return the costs of `chip`, whose facts are from `rates`. `curve` contains the shares of the rates at small
        sizes."""
        curve = replace(curve, launch_seconds=LAUNCH * rates.launch_s)
        roofline = NewTensors(chip=chip, curve=curve, page_s=rates.new_page_seconds)
        batch, heads, length, width = (np.array(float(each)) for each in ATTENTION)
        shape = AttentionShape(batch=batch, heads=heads, groups=heads, queries=length, keys=length, head_dim=width)

        def fitted(direction: int) -> Roofline:
            model = (roofline.attention_seconds, roofline.attention_backward_seconds)[direction]
            flops = {}
            for name, seconds in rates.attention_s.items():
                fact = chip.dense_flops_per_second[name]
                flops[name] = replace(fact, value=fact.value * float(model(shape, name)) / seconds[direction])
            return replace(roofline, chip=replace(chip, dense_flops_per_second=flops))

        return cls(roofline, fitted(0), fitted(1), rates)

    @property
    def curve(self) -> Curve:
        """The curve for small sizes."""
        return self.products.curve

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        return self.products.gemm_seconds(m, n, k, precision)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self.forward.attention_seconds(shape, precision)

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self.backward.attention_backward_seconds(shape, precision)

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time at the rate of the nearest measured sizes, interpolated on logarithmic axes."""
        moved, seconds = np.array(self.rates.elementwise).T
        rate = np.exp(np.interp(np.log(np.maximum(bytes_moved, 1.0)), np.log(moved), np.log(moved / seconds)))
        result: FloatArray = bytes_moved / rate + self.curve.kernel_seconds
        return result

    def launch_seconds(self) -> float:
        return self.products.launch_seconds()

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self.products.host_copy_seconds(bytes_moved)

    def run_slowdown(self) -> float:
        return 1.0


SERVER_SHARE = 0.54
"""Share of the fp32 rate with instructions of 256 bits that the products of xllamacpp's server reach with weights in
q8_0: 0.48 on an AMD EPYC (Zen 4), 0.60 on an Intel Xeon (Sapphire Rapids). The wheel is built for AVX2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCosts(Roofline):
    """Kernel costs (`flagcore.contracts.KernelCosts`) of a server with its own kernels, which compute all formats at
    the same rate."""

    @classmethod
    def of(cls, chip: Chip, curve: Curve, processor: Processor | None) -> ServerCosts:
        """Return the costs of a server on `chip`, the cores of `processor`."""
        fp32 = chip.dense_flops_per_second["fp32"]
        lanes = 0.5 if processor and processor.is_wide else 1.0
        rate = replace(fp32, value=fp32.value * lanes * SERVER_SHARE / curve.gemm_share)
        chip = replace(chip, dense_flops_per_second=dict.fromkeys(("fp32", "bf16", "fp16"), rate))
        return cls(chip=chip, curve=curve)

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of reading the weights plus the time of each row of the batch.

        The computation of rows does not overlap with reading the weights. Rows of 1, 4, 8 and 16 sequences took 4, 14,
        24 and 38 ms of processor time (50 million parameters in q8_0, one thread of an AMD EPYC, Zen 4), and 7, 16, 27
        and 44 ms (Sapphire Rapids).
        """
        rows = Roofline(chip=self.chip, curve=replace(self.curve, tile=1.0, memory_share=1e9))
        reading = k * n * (2.0 / (self._bandwidth() * self.curve.memory_share))
        return rows.gemm_seconds(m, n, k, precision) + reading
