"""The peak rate of one core of this machine, estimated from the features that the processor reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flagcore.domain.chip import Chip, Fact, Source
from flagcore.vendorkit import cgroup
from flagcore_cpu.discover import memory_bytes_per_device

BOOST = 1.4
"""Boost clock over the nominal clock that a virtual machine reports, as on an AMD EPYC 9004 (2.6 and 3.7 GHz)."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor as reported by the operating system.

    `double_pumped`: AVX-512 instructions run in two halves (AMD Zen 4). `threads_per_core` is above 1 if siblings share
    a core.
    """

    model: str
    flags: frozenset[str]
    clock_hz: float
    clock_from: str
    double_pumped: bool
    threads_per_core: float

    @classmethod
    def read(cls, root: Path = Path("/")) -> Processor | None:
        """Return the first processor of /proc/cpuinfo, None if information is missing."""
        try:
            blocks = (root / "proc/cpuinfo").read_text().strip().split("\n\n")
        except OSError:
            return None
        entries = [dict(_pair(line) for line in block.splitlines() if ":" in line) for block in blocks]
        first = entries[0]
        flags = frozenset((first.get("flags") or first.get("Features") or "").split())
        clock = _clock(first, root)
        if not flags or clock is None:
            return None
        places = {(entry.get("physical id"), entry.get("core id", str(row))) for row, entry in enumerate(entries)}
        zen4 = first.get("vendor_id") == "AuthenticAMD" and first.get("cpu family") == "25"
        return cls(first.get("model name", "cpu"), flags, *clock, zen4, len(entries) / len(places))

    def fp32_flops_per_cycle(self) -> int:
        """Return 2 x lanes x multiply-add units: 16 lanes for AVX-512 (8 if it is double-pumped), 8 for AVX2."""
        if "avx512f" in self.flags and not self.double_pumped:
            return 64
        if {"avx2", "fma"} <= self.flags:
            return 32
        return 16 if self.flags & {"avx", "asimd"} else 8

    def bf16_flops_per_cycle(self) -> float:
        """Return the native rate, or half of fp32 if bf16 is emulated by conversion.

        One AMX tile product is 16 x 16 x 32 multiply-adds in 16 cycles; a dot-product instruction doubles fp32.
        """
        if "amx_bf16" in self.flags:
            return 1024
        if self.flags & {"avx512_bf16", "avx_bf16", "bf16"}:
            return 2 * self.fp32_flops_per_cycle()
        return self.fp32_flops_per_cycle() / 2


def this_machine(chip: Chip, processor: Processor | None) -> Chip:
    """Return `chip` with the memory and the peak rates of the machine that flagcore runs on."""
    how = "share of the memory of the machine or container, divided by its usable cores"
    memory = Fact(value=memory_bytes_per_device(), source=Source(kind="measured", detail=how))
    chip = replace(chip, devices_per_node=cgroup.cores(), memory_bytes=memory)
    if processor is None:
        return chip
    rates = {"fp32": processor.fp32_flops_per_cycle(), "bf16": processor.bf16_flops_per_cycle()}
    emulated = rates["bf16"] < rates["fp32"]
    notes = (
        "This processor has no bf16 instructions: bf16 is emulated and slower than fp32." if emulated else chip.notes
    )
    flops = {name: _estimate(rate, processor, emulated and name == "bf16") for name, rate in rates.items()}
    return replace(chip, aliases=(processor.model,), dense_flops_per_second=flops, notes=notes)


def _estimate(per_cycle: float, processor: Processor, emulated: bool) -> Fact:
    value = per_cycle * processor.clock_hz / processor.threads_per_core
    method = f"{per_cycle:g} flop a cycle x {processor.clock_hz / 1e9:.2f} GHz ({processor.clock_from})"
    if processor.threads_per_core > 1:
        method += f" / {processor.threads_per_core:g} threads per core"
    return Fact(value=value, source=Source(kind="estimated", detail=method + (", bf16 emulated" if emulated else "")))


def _clock(first: dict[str, str], root: Path) -> tuple[float, str] | None:
    try:
        kilohertz = (root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()
        return float(kilohertz) * 1e3, "cpufreq's maximum"
    except (OSError, ValueError):
        pass
    try:
        return float(first["cpu MHz"]) * 1e6 * BOOST, f"reported clock x {BOOST} for boost"
    except (KeyError, ValueError):
        return None


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()
