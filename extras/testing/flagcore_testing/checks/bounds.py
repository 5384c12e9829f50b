"""The bounds of figures: a table by subject, and the function that reads it.

Figures in another unit (GB for bytes, both directions for one, bits for bytes, a sparse rate for a dense one) are
outside. Each bound leaves a margin around the figures of all known chips.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from re import search
from typing import NamedTuple

from flagcore.domain.chip import CORES, DISK_WAIT, OTHERS_CORES, SWAPPED, Chip
from flagcore_testing.kit import Case

BANDWIDTH, LINK, NIC = "memory_bandwidth_bytes_per_second", "link.bytes_per_second", "nic_bytes_per_second"
HOST, PEAK, WATTS, MEMORY = "host_bytes_per_second", "dense_flops_per_second.", "tdp_watts", "memory_bytes"
USABLE = "usable_bytes"
BF16, FP16, FP32, TF32, FP8, INT8 = (f"{PEAK}{name}" for name in ("bf16", "fp16", "fp32", "tf32", "fp8", "int8"))
ACCELERATOR_BANDWIDTH = 1e11
"""Memory bandwidth in bytes per second above which a chip is an accelerator."""
DENSE = r"(?i)\bdense\b|(without|no|not) (structured )?sparsity"
"""Words of a source or of the notes that confirm a dense peak."""


class Bound(NamedTuple):
    """The bounds of a quantity, or of its ratio to the quantity `per`. NaN is always inside.

    `quantity`: its name, also of those whose names continue after `_` or `.`. If `low` is above `high`, the values
    between them are wrong. `unless`: a pattern of the words that explain another value. `zero`: whether 0 means none.
    `why`: what the ratio is.
    """

    quantity: str
    low: float
    high: float
    fix: str = ""
    per: str = ""
    unless: str = "$."
    zero: bool = False
    why: str = ""

    def holds(self, value: float) -> bool:
        """Return whether a value is inside, or NaN."""
        if self.low > self.high:
            return not self.high <= value <= self.low
        return not (value < self.low or value > self.high) or (self.zero and value == 0)

    def __str__(self) -> str:
        if self.low > self.high:
            return f"not {self.high:g} to {self.low:g}"
        ends = {self.high == inf: f"at least {self.low:g}", self.low == 0: f"at most {self.high:g}"}
        return ends.get(True, f"{self.low:g} to {self.high:g}")


UNITS = "write bytes, seconds, bytes or flops per second, without prefixes; YAML wants 3.0e+14"
FIGURES = (
    Bound(MEMORY, 2**27, 2**40, UNITS),
    Bound(BANDWIDTH, 1e9, 1e14, UNITS),
    Bound("dense_flops_per_second", 1e8, 1e17, UNITS),
    Bound(LINK, 1e8, 1e13, UNITS),
    Bound("link.latency_seconds", 1e-8, 1e-3, UNITS),
    Bound(HOST, 1e8, 1e12, UNITS),
    Bound(NIC, 1e8, 1e12, UNITS),
    Bound("nic_latency_seconds", 1e-7, 1e-3, "give seconds: 5 us are 5.0e-6"),
    Bound(WATTS, 1, 3000, UNITS),
)
"""Figures of one device in base units. The lower bounds are for one core of a small CPU."""

SPARSE = 3.8
"""Maximum ratio of the rates of two formats: half the bits give about twice the rate; four times is a sparse rate."""
DENSE_PEAK = (
    "check both peaks, and give dense ones: half of what is published with structured sparsity; if the chip emulates a "
    "format, say so in notes"
)
HALF_RATE = "give both dense and of matrix units; if one really has half the rate, say 'half the rate' in notes"
SLOW_INTEGERS = "check both; if the chip really has few units for integers, say so of int8 in notes"
ONE_DEVICE = (
    "give one device's share in bytes, not bits: 400 Gb/s are 5.0e+10; if links and network are one fabric, notes say "
    "the words 'same fabric'"
)
SAY_DENSE = (
    "give dense peaks, half of what is published with structured sparsity; if they are dense, add the word 'dense' to "
    "the source or the notes"
)
ONE_UNIT = "check both: one of them has another unit, or counts a card or a node"
ONE_WAY = "give bytes, not bits, that one device sends in one direction"
OF_MEMORY = "correct the bandwidth, the memory or the peak: bytes, not bits, of one device"
OPERATIONS, FEW = ", operations per byte of memory traffic", ", fewer operations per byte than any known chip"
HALVES = ", although it has half the bits"
EMULATED = "emulated"
RATIOS = (
    Bound(FP8, 0.999, SPARSE, DENSE_PEAK, BF16, "emulated|more than four"),
    Bound(PEAK + "fp4", 0.999, SPARSE, DENSE_PEAK, FP8, "emulated|more than four|half the rate"),
    Bound(FP32, 0.999, inf, DENSE_PEAK, PEAK + "fp64", EMULATED),
    Bound(TF32, 0.999, inf, DENSE_PEAK, FP32, EMULATED),
    *(Bound(peak, 1.6, SPARSE, DENSE_PEAK, TF32, EMULATED) for peak in (BF16, FP16)),
    Bound(BF16, 0.6, 1.5, HALF_RATE, FP16, "emulated|half the rate"),
    *(Bound(peak, 0.5, 2000, "correct a prefix", BANDWIDTH, EMULATED, why=OPERATIONS) for peak in (BF16, FP16)),
    Bound(LINK, 0, 0.75, ONE_WAY, BANDWIDTH),
    Bound(NIC, 0, 0.999, f"check both; {ONE_DEVICE}", LINK, "same fabric"),
    *(Bound(INT8, 0, SPARSE, DENSE_PEAK, peak, "half the rate|fp32 accumulation") for peak in (BF16, FP16)),
    *(Bound(INT8, 0, 2 * SPARSE, DENSE_PEAK, peak) for peak in (BF16, FP16)),
    Bound(INT8, 0, SPARSE, DENSE_PEAK, FP8),
    Bound(INT8, 0.999, inf, SLOW_INTEGERS, BF16, "int8"),
    Bound(NIC, 0, 1.001, ONE_DEVICE, HOST, "same fabric"),
    *(Bound(peak, 0, 460, SAY_DENSE, BANDWIDTH, why=OPERATIONS) for peak in (BF16, FP16)),
    *(Bound(peak, 0, 330, SAY_DENSE, BANDWIDTH, DENSE, why=OPERATIONS) for peak in (BF16, FP16)),
    *(Bound(peak, 0, 40, SAY_DENSE, FP32) for peak in (BF16, FP16)),
    *(Bound(narrow, 1.25, 0.9, SAY_DENSE, peak, why=HALVES) for narrow in (FP8, INT8) for peak in (BF16, FP16)),
)
"""Ratios of the figures of any chip. The narrower format of two is never slower, because it moves fewer bytes."""
OF_ACCELERATORS = (
    *(Bound(peak, 25, inf, OF_MEMORY, BANDWIDTH, why=FEW) for peak in (BF16, FP16)),
    Bound(USABLE, 0.9, 1, "give the memory that programs see, in bytes", MEMORY),
    Bound(MEMORY, 0.012, 0.5, OF_MEMORY, BANDWIDTH, why=", the seconds to read the whole memory"),
    *(Bound(peak, 2e11, 5e12, ONE_UNIT, WATTS, EMULATED) for peak in (BF16, FP16)),
    Bound(BANDWIDTH, 1e9, 1.6e10, ONE_UNIT, WATTS, EMULATED),
    Bound(MEMORY, 5e7, 1.2e9, ONE_UNIT, WATTS, EMULATED),
    Bound(LINK, 0.007, inf, ONE_UNIT, BANDWIDTH, EMULATED),
    Bound(HOST, 0.004, 0.25, ONE_UNIT, BANDWIDTH, EMULATED),
    Bound(NIC, 0.03, inf, ONE_UNIT, HOST, EMULATED),
    Bound(FP16, 500, 2.5e4, ONE_UNIT, MEMORY, EMULATED),
    *(Bound(peak, 1.6, inf, ONE_UNIT, FP32, EMULATED) for peak in (BF16, FP16)),
    Bound(TF32, 0.999, 20, ONE_UNIT, FP32, EMULATED),
)
"""Ratios of the figures of accelerators. Known chips are inside by a factor of about 1.5."""

READINGS = (
    Bound("memory_used_bytes", 2**20, 2**42, zero=True),
    Bound("power_watts", 0, 5000),
    Bound("power_limit_watts", 1, 5000, zero=True),
    Bound("temperature_celsius", -40, 150),
    Bound("utilization_share", 0, 1),
    Bound("clock_hertz", 1e6, 1e10, zero=True),
    Bound("load_average", 0, 1e5),
    Bound(OTHERS_CORES, 0, 1e4),
    Bound(CORES, 1, 1e4, zero=True),
    Bound(DISK_WAIT, 0, 1),
    Bound(SWAPPED, 0, 1e11),
    Bound("throttled", 0, 1),
)
"""Figures of telemetry. The end of a name is its unit."""

IDLE_SHARE = 0.25
BYTES = "give bytes; context, libraries and collective buffers take hundreds of MiB to a few GiB"
OF_MEMORY_MODEL = (
    Bound("device_used_bytes(0) of hooks.py", 2**20, 2**33, BYTES, zero=True),
    Bound("device_used_bytes(0) of hooks.py", 0, IDLE_SHARE, BYTES, "memory_bytes"),
    Bound("capacity_bytes()", 0, 1, BYTES, "memory_bytes"),
    Bound("workspace_bytes()", 0, 2**32, BYTES),
    Bound("communicator_bytes()", 2**20, 2**32, BYTES, zero=True),
    Bound(
        "reserved_bytes of the memory model", 0, 1.15, "give fragmentation as a share of the tensors, such as 0.02",
        "its argument",
    ),
)  # fmt: skip
"""Known chips take up to 3.9 GiB for the context; allocators reserve 1.0005 to 1.03 times the tensors."""

CONSTANTS = "give seconds for launches (8.0e-6) and a factor for runs (1 to 3), or NaN if unknown"
OF_KERNELS = (Bound("launch_seconds()", 1e-7, 1e-3, CONSTANTS), Bound("run_slowdown()", 1, 3, CONSTANTS))
LEVEL = "give seconds, and shares of 1; `efficiency` is the share of the rate that large messages reach"
OF_LEVELS = (Bound("latency_seconds", 1e-8, 1e-2, LEVEL), Bound("efficiency", 0.05, 1, LEVEL))
SHARES = ("gemm_share", "memory_share", "elementwise_share", "attention_share", "attention_backward_share")
CURVE = "give shares of 1, seconds, and bytes per second"
OF_CURVES = (
    *(Bound(name, 0.1, 1.05, CURVE) for name in (*SHARES, "gemm_shares", "attention_shares")),
    Bound("units", 1, 2000, CURVE),
    Bound("tile", 1, 1024, CURVE),
    Bound("kernel_seconds", 0, 1e-4, CURVE),
    Bound("launch_seconds", 0, 1e-3, CURVE),
    Bound("half_head", 0, 512, CURVE),
    Bound("attention_tail", 0, 2, CURVE),
    Bound("dense_flops_per_second", 4e11, 4e13, CURVE, "units", why=", the dense peak of each unit"),
    Bound("host_bytes_per_second", 0, 1.05, CURVE, "that of the chip"),
)
"""0.18 is the smallest share of a peak on a known chip; clocks and timers vary above 1. A unit's peak is its clock, of
1 to 2.5 GHz, times its operations in a clock."""


def outside(
    values: Mapping[str, float], bounds: Iterable[Bound], words: Mapping[str, str] | str = ""
) -> Iterator[Case]:
    """Yield the quantities, or ratios of two, that are outside their bounds, each once.

    `words`: the text in which `unless` is searched, for all quantities or for each.
    """
    seen = set[tuple[str, str]]()
    for bound in bounds:
        name, base = bound.quantity, values.get(bound.per, 0.0) if bound.per else 1.0
        for key in (each for each in values if base and (each == name or each.startswith((f"{name}.", f"{name}_")))):
            text = words if isinstance(words, str) else words.get(key, "")
            if (key, bound.per) in seen or bound.holds(values[key] / base) or search(bound.unless, text):
                continue
            seen.add((key, bound.per))
            ratio = f"{values[key] / base:.3g} times {bound.per} = {base:g}{bound.why}; expected {bound}"
            is_outside = ratio if bound.per else f"not in {bound.low:g} to {bound.high:g}"
            yield True, f"{key} = {values[key]:g} is {is_outside}", bound.fix


def figures_of(chip: Chip) -> dict[str, float]:
    """Return the figures of a chip by key, with the latencies of its link and adapter."""
    figures = {key: fact.value for key, fact in chip.figures.items()}
    latencies = {
        "link.latency_seconds": chip.link.latency_seconds if chip.link else None,
        "nic_latency_seconds": chip.nic_latency_seconds,
    }
    return {**figures, **{key: value for key, value in latencies.items() if value is not None}}
