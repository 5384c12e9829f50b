"""Facts of a plugin that no check can confirm: those that look wrong, with the reason, then those that none guards."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from flagcore.domain.chip import Chip, Fact
from flagcore.domain.cluster import NodeGroup
from flagcore_testing import checks
from flagcore_testing.checks.detector import missing_variables
from flagcore_testing.checks.sources import is_close, is_one_of
from flagcore_testing.kit import Skip, Subject

LINES = 8
"""Maximum number of lines about chips."""
UNITS = (
    ("link.bytes_per_second", 1e9, "GB/s sent by one device in one direction"),
    ("bytes_per_second", 1e9, "GB/s"),
    ("memory_bytes", 2.0**30, "GiB"),
    ("flops_per_second", 1e12, "TFLOP/s without sparsity"),
    ("tdp_watts", 1.0, "W"),
)
"""The unit in which a figure is shown, by a part of its key."""


def facts_by_hand(plugin: Subject) -> Iterator[str]:
    """Yield a line for each figure that looks wrong, two lines for the detector, and one for each of the first chips,
    with the figures that could be half or twice as large without a failed check."""
    yield from _unlike_neighbours(plugin)
    yield from _unshared_levels(plugin)
    yield from _unusual_ratios(plugin)
    if detector := plugin.detector:
        variables = ", ".join(name for name in (detector.outer, *detector.visible) if name)
        yield f"PCI vendor {detector.pci_vendor:#06x} (lspci -nn), device files /{detector.device_file}"
        yield f"devices are selected by {variables}, and are torch.{detector.torch_device}"
        for key in ("visible", "vendor_variables"):
            if missing := missing_variables(plugin, key):
                yield f"discover.py: {missing}"
    unguarded = [f"{chip.name}: {facts}" for chip in plugin.chips if (facts := "; ".join(_unguarded(chip)))]
    yield from unguarded[:LINES]
    if len(unguarded) > LINES:
        yield f"the same of {len(unguarded) - LINES} more chips"


def shown(key: str, value: float) -> str:
    """Return a figure with its key and unit, such as `memory_bytes 64 GiB`."""
    unit, words = next(((unit, words) for part, unit, words in UNITS if part in key), (1.0, ""))
    return f"{key.removeprefix('dense_flops_per_second.')} {value / unit:.4g} {words}"


AGREE, NEAR = 3, (0.85, 1.18)
"""Two chips resemble each other if at least so many of their figures agree, and all but one kind."""
SLIPS, ROUNDED = (2.0, 4.0, 7.0, 8.0, 10.0, 16.0), 0.06
"""Ratios that slips lead to: both directions, cards of several devices, one of several links, bits, powers of ten.
The second figure is the tolerance."""


def _unlike_neighbours(plugin: Subject) -> Iterator[str]:
    """Yield the figures that are a multiple of those of a chip that has the other figures in common."""
    for place, chip in enumerate(plugin.chips):
        others = (*plugin.chips[place + 1 :], *plugin.others.chips())
        pairs = ((other, found) for other in others if (found := _odd(chip, other)))
        if first := next(pairs, None):
            other, (keys, ratio) = first
            facts = ", ".join(shown(key, chip.figures[key].value) for key in keys)
            yield f"{chip.name}: {facts}: {ratio:.3g} times that of {other.name}, and their other figures agree"


def _odd(chip: Chip, other: Chip) -> tuple[list[str], float] | None:
    """Return the keys of the only kind of figure that differs between two chips, and its ratio if it is a slip's."""
    keys = (chip.figures.keys() & other.figures.keys()) - {"tdp_watts"}
    ratios = {key: fact.value / other.figures[key].value for key, fact in chip.figures.items() if key in keys}
    off = {key: ratio for key, ratio in ratios.items() if not NEAR[0] <= ratio <= NEAR[1]}
    kinds = {"peaks" if "flops" in key else key for key in off}
    if len(ratios) - len(off) < AGREE or len(kinds) != 1:
        return None
    most = next(iter(off.values()))
    is_one = is_one_of(most, SLIPS, ROUNDED) or is_one_of(1 / most, SLIPS, ROUNDED)
    return ([*off], most) if is_one and all(is_close(ratio, most, ROUNDED) for ratio in off.values()) else None


PAIRS = (("fp16", "tf32"), ("bf16", "tf32"), ("int8", "fp16"), ("int8", "bf16"), ("fp8", "fp16"), ("fp8", "bf16"))
USUAL = (0.5, 1.0, 2.0, 4.0)
"""Ratios of the peaks of two formats, and the formats: units take half or twice the operations of another format."""
UNLIKE = 0.15
"""Difference from which the ratio of two peaks is unlike that of the vendor's similar chips."""


def _unusual_ratios(plugin: Subject) -> Iterator[str]:
    """Yield the first peak of a chip that is no usual multiple of another one, and peaks whose ratio differs from that
    of chips whose names begin alike."""
    for chip in plugin.chips:
        peaks = {name: fact.value for name, fact in chip.dense_flops_per_second.items()}
        ratios = [(*pair, peaks[pair[0]] / peaks[pair[1]]) for pair in PAIRS if {*pair} <= {*peaks}]
        odd = [each for each in ratios if each[2] > 0.2 and not is_one_of(each[2], USUAL, ROUNDED)]
        for name, base, ratio in odd[:1]:
            fact = shown(f"dense_flops_per_second.{name}", peaks[name])
            yield f"{chip.name}: {fact}: {ratio:.3g} times {base}, no power of two"
        kin = [each for each in plugin.chips if each is not chip and each.name[:4] == chip.name[:4]]
        own, of_kin = _to_fp32(chip), [found for each in kin if (found := _to_fp32(each))]
        if own and of_kin and all(abs(own / each - 1) > UNLIKE for each in of_kin):
            usual = ", ".join(f"{each:.3g}" for each in of_kin[:3])
            yield f"{chip.name}: 16-bit peaks are {own:.3g} times fp32, and {usual} times on chips with similar names"


def _to_fp32(chip: Chip) -> float:
    peaks = chip.dense_flops_per_second
    narrow = peaks.get("fp16") or peaks.get("bf16")
    return narrow.value / peaks["fp32"].value if narrow and "fp32" in peaks else 0.0


def _unshared_levels(plugin: Subject) -> Iterator[str]:
    """Yield the outer levels of a node in which each device has the whole rate of an interface to the host."""
    for chip in plugin.chips:
        group = NodeGroup(chip=chip, nodes=1, devices_per_node=chip.devices_per_node)
        topology, host = plugin.loaded.topology(group), chip.host_bytes_per_second
        for level in topology.levels[1:] if topology else ():
            if host and level.bytes_per_second > 0.9 * host.value:
                rate = f"{level.bytes_per_second / 1e9:g} GB/s for each device at the level {level.name}"
                yield f"{chip.name}: {rate}, as much as to the host; the devices of a group share its link"


_NAMES = (
    *("figures_are_plausible", "links_are_what_they_claim", "link_rates_are_one_way_and_of_all_links"),
    *("pcie_rates_are_one_way", "figures_match_their_sources"),
)
CHECKS = tuple(check for check in checks.CHECKS if check.__name__ in _NAMES)
"""The checks of a chip's figures."""


def _unguarded(chip: Chip) -> Iterator[str]:
    """Yield the figures that could be half as large without a failed check, and those that could be twice as large."""
    for by, words in ((0.5, "no check fails for half of"), (2.0, "no check fails for twice")):
        figures = (each for each in chip.figures.items() if each[0] != "tdp_watts")
        if free := [shown(key, fact.value) for key, fact in figures if not _is_noticed(_with(chip, key, fact, by))]:
            yield f"{words} {', '.join(free)}"


def _with(chip: Chip, key: str, fact: Fact, by: float) -> Chip:
    changed = replace(fact, value=fact.value * by)
    name, _, part = key.partition(".")
    if name == "dense_flops_per_second":
        return replace(chip, dense_flops_per_second={**chip.dense_flops_per_second, part: changed})
    if name == "link" and chip.link:
        return replace(chip, link=replace(chip.link, bytes_per_second=changed))
    fields: dict[str, Any] = {name: changed}
    return replace(chip, **fields)


def _is_noticed(chip: Chip) -> bool:
    plugin: Any = SimpleNamespace(chips=(chip,), own_chips=lambda: (chip,))
    for check in CHECKS:
        with suppress(Skip):
            if next(iter(check(plugin)), None):
                return True
    return False
