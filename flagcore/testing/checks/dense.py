"""Chips: whether peaks are dense. Peaks with structured sparsity are twice as high."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from flagcore.domain.chip import Chip, Fact
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

DOUBLES = (("tf32", "bf16"), ("tf32", "fp16"), ("bf16", "fp8"), ("fp16", "fp8"), ("fp8", "fp4"))
"""Half the bits are about twice the rate; four times are twice and sparsity. Integers need not follow."""
SPARSE = 3.8

INTENSITY = 330.0
"""Operations a byte of memory traffic, in 16 bits. Few chips do more, and most do if their peaks are doubled."""
PREFIX = 2000.0
"""From here on, a prefix is wrong, which another check tells."""
OVER_FP32 = 40.0
"""What 16 bits do of fp32, at most: 31 is the most that is known."""
SAME = (0.9, 1.25)
"""8 bits are about twice 16 bits, or integers are slow; as fast as 16 bits is a dense peak beside a sparse one."""

REACHED = 0.3
"""The least that large products reach of a dense peak; half of it would be all of a peak that was doubled."""

DENSE = re.compile(r"\bdense\b|(without|no|not) (structured )?sparsity", re.I)
"""Words of a source, or of the notes, that settle it."""


def peaks_are_dense(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        peaks = chip.dense_flops_per_second
        for wide, narrow in DOUBLES:
            if wide in peaks and narrow in peaks and peaks[narrow].value > SPARSE * peaks[wide].value:
                yield Problem(
                    f"{chip.name}: {narrow} = {peaks[narrow].value:g} is "
                    f"{peaks[narrow].value / peaks[wide].value:.1f} times {wide}",
                    f"give the dense peak of {narrow}: half of what is published with structured sparsity",
                )
        for name in ("bf16", "fp16"):
            if name in peaks and not _is_dense(chip, peaks[name]) and (why := _too_fast(chip, name)):
                yield Problem(
                    f"{chip.name}: {name} = {peaks[name].value:g} {why}",
                    "give dense peaks, half of what is published with structured sparsity; if they are, add the "
                    "source or the notes say the word 'dense'",
                )


def peak_sources_are_dense(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for name, peak in chip.dense_flops_per_second.items():
            detail = peak.source.detail
            if re.search(r"spars|\u7a00\u758f", detail, re.I) and not DENSE.search(detail) and "half" not in detail:
                yield Problem(
                    f"{chip.name}: {name} has the source {detail[:120]!r}, which mentions sparsity",
                    "give the dense peak, and say so in the source: 'dense' or 'without sparsity'",
                )


def large_matmuls_reach_the_peak(plugin: Subject) -> Iterator[Problem]:
    side = np.full(1, 8192.0)
    for chip, costs in plugin.own_costs():
        for name in ("bf16", "fp16"):
            peak = chip.dense_flops_per_second.get(name)
            rate = 2.0 * 8192.0**3 / float(costs.gemm_seconds(side, side, side, name)[0])
            if peak and rate < REACHED * peak.value:  # NaN is not
                share = f"{rate / peak.value:.0%} of the peak in {name}"
                yield Problem(
                    f"{chip.name}: a product of 8192 cubed reaches {share}",
                    "look for a peak with sparsity, a time in another unit than us in kernels.jsonl, or a small "
                    "gemm_share in curve.yaml",
                )


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
