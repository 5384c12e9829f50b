"""Chips: whether peaks are dense. Peaks with structured sparsity are twice as high."""

from __future__ import annotations

import re

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.chip import Chip, Fact
from flagcore.testing.kit import Problems, check, chips
from flagcore.testing.subject import Problem, Subject

DOUBLES = (("tf32", "bf16"), ("tf32", "fp16"), ("bf16", "fp8"), ("fp16", "fp8"), ("fp8", "fp4"))
"""Half the bits are about twice the rate; four times are twice and sparsity. Integers need not follow."""
SPARSE = 3.8

INTENSITY = 330.0
"""Operations per byte of memory traffic in 16 bits. Few chips do more; most would if their peaks were doubled."""
PREFIX = 2000.0
"""From here on, a prefix is wrong, which another check reports."""
OVER_FP32 = 40.0
"""Maximum ratio of a 16-bit peak to fp32; 31 is the largest of a known chip."""
SAME = (0.9, 1.25)
"""8 bits are about twice 16 bits, or integers are slow; as fast as 16 bits is a dense peak beside a sparse one."""

REACHED = 0.3
"""Minimum share of a dense peak that large products reach; of a peak that was doubled they reach half as much."""

DENSE = re.compile(r"\bdense\b|(without|no|not) (structured )?sparsity", re.I)
"""Words of a source or of the notes that confirm a dense peak."""


@check(each=chips)
def peaks_are_dense(chip: Chip) -> Problems:
    peaks = chip.dense_flops_per_second
    for wide, narrow in DOUBLES:
        if wide in peaks and narrow in peaks and (ratio := peaks[narrow].value / peaks[wide].value) > SPARSE:
            yield Problem(
                f"{chip.name}: {narrow} = {peaks[narrow].value:g} is {ratio:.1f} times {wide}",
                f"give the dense peak of {narrow}: half of what is published with structured sparsity",
            )
    for name in ("bf16", "fp16"):
        if name in peaks and not _is_dense(chip, peaks[name]) and (why := _too_fast(chip, name)):
            yield Problem(
                f"{chip.name}: {name} = {peaks[name].value:g} {why}",
                "give dense peaks, half of what is published with structured sparsity; if they are dense, add the "
                "word 'dense' to the source or the notes",
            )


@check("give the dense peak, and say so in the source: 'dense' or 'without sparsity'", each=chips)
def peak_sources_are_dense(chip: Chip) -> Problems:
    for name, peak in chip.dense_flops_per_second.items():
        detail = peak.source.detail
        if re.search(r"spars|\u7a00\u758f", detail, re.I) and not DENSE.search(detail) and "half" not in detail:
            yield f"{chip.name}: {name} has the source {detail[:120]!r}, which mentions sparsity"


@check(
    "look for a peak with sparsity, a time in another unit than us in kernels.jsonl, or a small gemm_share in "
    "curve.yaml",
    each=Subject.own_costs,
)
def large_matmuls_reach_the_peak(chip: Chip, costs: KernelCosts) -> Problems:
    side = np.full(1, 8192.0)
    for name in ("bf16", "fp16"):
        peak = chip.dense_flops_per_second.get(name)
        rate = 2.0 * 8192.0**3 / float(costs.gemm_seconds(side, side, side, name)[0])
        if peak and rate < REACHED * peak.value:  # false for NaN
            yield f"{chip.name}: a product of 8192 cubed reaches {rate / peak.value:.0%} of the peak in {name}"


def _too_fast(chip: Chip, name: str) -> str:
    """Return why a 16-bit peak looks sparse; empty if it does not."""
    peaks, rate = chip.dense_flops_per_second, chip.memory_bandwidth_bytes_per_second
    peak = peaks[name].value
    if rate and INTENSITY * rate.value < peak <= PREFIX * rate.value:
        return f"is {peak / rate.value:.0f} operations a byte of memory traffic, more than any known chip"
    if "fp32" in peaks and peak > OVER_FP32 * peaks["fp32"].value:
        return f"is {peak / peaks['fp32'].value:.0f} times fp32, more than any known chip"
    for narrow in ("fp8", "int8"):
        if narrow in peaks and SAME[0] <= peaks[narrow].value / peak <= SAME[1]:
            return f"equals the peak of {narrow}, which has half the bits"
    return ""


def _is_dense(chip: Chip, peak: Fact) -> bool:
    return bool(DENSE.search(peak.source.detail) or DENSE.search(chip.notes))
