"""The figures of a chip, for checks."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.domain.chip import Chip, Fact


def facts_of(chip: Chip) -> Iterator[tuple[str, Fact]]:
    """Yield the key and the fact of every figure of `chip`."""
    single = {
        "memory_bytes": chip.memory_bytes,
        "memory_bandwidth_bytes_per_second": chip.memory_bandwidth_bytes_per_second,
        "link.bytes_per_second": chip.link.bytes_per_second if chip.link else None,
        "host_bytes_per_second": chip.host_bytes_per_second,
        "nic_bytes_per_second": chip.nic_bytes_per_second,
    }
    yield from ((key, fact) for key, fact in single.items() if fact is not None)
    yield from ((f"dense_flops_per_second.{name}", fact) for name, fact in chip.dense_flops_per_second.items())
