"""The devices of this machine, one per core, and the rates of a core: measured, or else estimated from what the
processor reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flagcore.domain import host
from flagcore.domain.chip import Chip, Device, Fact, Link, Source
from flagcore.physics.collective_costs import EFFICIENCY
from flagcore_cpu.rates import Rates

SHARE_OF_TOTAL = 0.75
SHARE_OF_AVAILABLE = 0.9
"""Memory that all trials together may use; the rest is for the system and flagcore. The smaller value applies."""


def memory_bytes_per_device() -> int:
    """Return the memory of one device: a safe share of the memory of the machine or container, divided by the cores."""
    import psutil  # plans for other chips do not need it

    memory = psutil.virtual_memory()
    total = min(memory.total, host.allowed_memory_bytes() or memory.total)
    return int(min(total * SHARE_OF_TOTAL, memory.available * SHARE_OF_AVAILABLE)) // host.cores()


def devices() -> tuple[Device, ...]:
    """Return one device per usable core."""
    memory = memory_bytes_per_device()
    return tuple(Device(index=index, chip="cpu", memory_bytes=memory) for index in range(host.cores()))


BOOST = 1.4
"""Ratio of the boost clock to the nominal clock that a virtual machine reports, as on an AMD EPYC 9004 (3.7 and 2.6
GHz)."""

USUAL_HERTZ = 2.5e9
"""The clock that is assumed if the system reports none, as on many ARM servers."""

ZEN_1, ZEN_4 = 23, 25
"""AMD's processor families. Models of the first one up to `LAST_ZEN_1` have vector units of 128 bits, the second one of
256 bits (en.wikichip.org/wiki/flops: two 128-bit units for multiply-adds per core of Zen, 2 x 8 operations per cycle
in single precision; its additional adders are not counted, because products use multiply-adds)."""
LAST_ZEN_1 = 0x2F

PLAIN_LOOP = 0.5
"""Operations per cycle in a format for which torch has no kernel, measured on an AMD EPYC of the first generation."""

EMULATED = 0.9
"""A format counts as emulated if its rate is below this share of the fp32 rate."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor as reported by the operating system.

    `width` is the number of bits of its vector units if they are narrower than its instructions. `threads_per_core` is
    above 1 if hardware threads share a core.
    """

    model: str
    flags: frozenset[str]
    clock_hz: float
    clock_from: str
    width: int
    threads_per_core: float

    @classmethod
    def read(cls, root: Path = Path("/")) -> Processor | None:
        """Return the first processor of /proc/cpuinfo, or None if no instruction sets are listed."""
        blocks = host.text_of(root / "proc/cpuinfo").split("\n\n")
        entries = [dict(_pair(line) for line in block.splitlines() if ":" in line) for block in blocks]
        entries = [entry for entry in entries if "processor" in entry]  # on ARM the last block describes the board
        first = entries[0] if entries else {}
        flags = frozenset((first.get("flags") or first.get("Features") or "").split())
        if not flags:
            return None
        arm = " ".join(["ARM", first.get("CPU implementer", ""), first.get("CPU part", "")])
        places = {(entry.get("physical id"), entry.get("core id", str(row))) for row, entry in enumerate(entries)}
        name = first.get("model name", arm)
        return cls(name, flags, *_clock(first, root), _width(first), len(entries) / len(places))

    @property
    def identity(self) -> str:
        """A text that identifies the processor: its model and its instruction sets."""
        return " ".join([self.model, *sorted(self.flags)])

    @property
    def is_wide(self) -> bool:
        """Whether torch's kernels use vector units of 512 bits, twice as fast as instructions of 256 bits."""
        return self.width == 512 and {"avx512f", "avx2", "fma"} <= self.flags

    def flops_per_cycle(self) -> dict[str, float]:
        """Return the operations per cycle of torch's kernels by precision. Some kernels need more than the instructions
        of a format.

        fp32 does 2 x lanes x multiply-add units. One AMX tile product is 16 x 16 x 32 multiply-adds in 16 cycles; a
        dot-product instruction doubles fp32. Without its own instructions, bf16 is converted in AVX-512 at half the
        rate of fp32.
        """
        flags, fp32 = self.flags, 16.0 if self.flags & {"avx", "asimd"} else 8.0
        if {"avx2", "fma"} <= flags and self.width > 128:
            fp32 = 64.0 if self.is_wide else 32.0
        bf16 = fp16 = PLAIN_LOOP
        if {"avx512bw", "avx512vl", "avx512dq"} <= flags:
            bf16 = 1024.0 if "amx_bf16" in flags else (2.0 if "avx512_bf16" in flags else 0.5) * fp32
            if flags & {"amx_fp16", "avx512_fp16"}:
                fp16 = 1024.0 if "amx_fp16" in flags else 2.0 * fp32
        elif "asimd" in flags:
            bf16, fp16 = (2.0 * fp32 if name in flags else PLAIN_LOOP for name in ("bf16", "asimdhp"))
        return {"fp32": fp32, "bf16": bf16, "fp16": fp16}


def this_machine(chip: Chip, processor: Processor | None, rates: Rates | None = None) -> Chip:
    """Return `chip` with the memory and the rates of the machine that flagcore runs on."""
    how = "share of the memory of the machine or container, divided by its usable cores"
    memory = Fact(value=memory_bytes_per_device(), source=Source(kind="measured", detail=how))
    aliases = (processor.model,) if processor else ()
    chip = replace(_as_estimated(chip), aliases=aliases, devices_per_node=host.cores(), memory_bytes=memory)
    if rates is not None:
        return _with_rates(chip, rates)
    if processor is None:
        return chip
    return _with_flops(
        chip, {name: _estimate(name, rate, processor) for name, rate in processor.flops_per_cycle().items()}
    )


def _with_rates(chip: Chip, rates: Rates) -> Chip:
    def fact(value: float, what: str) -> Fact:
        return Fact(value=value, source=Source(kind="measured", detail=f"{what}, {rates.how}"))

    flops = {
        name: fact(value, "products of linear layers, forward and backward") for name, value in rates.flops.items()
    }
    copied = fact(rates.bytes_per_second, "copy of 34 MB, read and written bytes")
    chip = replace(_with_flops(chip, flops), memory_bandwidth_bytes_per_second=copied)
    if chip.link is None or len(rates.reduction) < 2:
        return chip
    (_, start_s), *_, (reduced_bytes, seconds) = rates.reduction
    rate = fact(
        reduced_bytes / seconds / EFFICIENCY[chip.link.topology],
        f"all-reduce of two processes over gloo of {reduced_bytes:g} bytes",
    )
    return replace(chip, link=replace(chip.link, bytes_per_second=rate, latency_seconds=start_s / 2))


def _with_flops(chip: Chip, flops: dict[str, Fact]) -> Chip:
    fp32 = flops["fp32"].value
    slow = [f"{name} {fp32 / fact.value:.2g} times" for name, fact in flops.items() if fact.value < EMULATED * fp32]
    notes = f"No fast kernels here, emulated and slower than fp32: {', '.join(slow)}." if slow else chip.notes
    return replace(chip, dense_flops_per_second=flops, notes=notes)


def _as_estimated(chip: Chip) -> Chip:
    """Return `chip` with the figures of its file marked as estimates, because they were measured on another machine."""

    def estimated(fact: Fact) -> Fact:
        return replace(fact, source=Source(kind="estimated", detail=f"as on an AMD EPYC (Zen 4): {fact.source.detail}"))

    link: Link | None = chip.link and replace(chip.link, bytes_per_second=estimated(chip.link.bytes_per_second))
    bandwidth = chip.memory_bandwidth_bytes_per_second
    return replace(
        chip,
        link=link,
        memory_bandwidth_bytes_per_second=bandwidth and estimated(bandwidth),
        dense_flops_per_second={name: estimated(fact) for name, fact in chip.dense_flops_per_second.items()},
    )


def _estimate(name: str, per_cycle: float, processor: Processor) -> Fact:
    value = per_cycle * processor.clock_hz / processor.threads_per_core
    method = f"{name}: {per_cycle:g} flop a cycle x {processor.clock_hz / 1e9:.2f} GHz ({processor.clock_from})"
    if processor.threads_per_core > 1:
        method += f" / {processor.threads_per_core:g} threads per core"
    return Fact(value=value, source=Source(kind="estimated", detail=method))


def _clock(first: dict[str, str], root: Path) -> tuple[float, str]:
    try:
        kilohertz = (root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()
        return float(kilohertz) * 1e3, "cpufreq's maximum"
    except (OSError, ValueError):
        pass
    try:
        return float(first["cpu MHz"]) * 1e6 * BOOST, f"reported clock x {BOOST} for boost"
    except (KeyError, ValueError):
        return USUAL_HERTZ, "assumed"


def _width(first: Mapping[str, str]) -> int:
    """Return the number of bits of the vector units if they are narrower than the instructions, else 512."""
    if first.get("vendor_id") != "AuthenticAMD":
        return 512
    family, model = (int(first.get(key, "0")) for key in ("cpu family", "model"))
    return 128 if family == ZEN_1 and model <= LAST_ZEN_1 else 256 if family <= ZEN_4 else 512


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()
