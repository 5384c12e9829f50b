"""Telemetry: the figures read from devices during trials."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.domain.chip import Device
from flagcore.testing import fakes
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Problem, Skip, Subject

RANGES: Mapping[str, tuple[float, float]] = {
    "memory_used_bytes": (0, 2**42),
    "power_watts": (0, 5000),
    "power_limit_watts": (1, 5000),
    "temperature_celsius": (-40, 150),
    "utilization_share": (0, 1),
    "clock_hertz": (0, 1e10),
    "load_average": (0, 1e5),
    "throttled": (0, 1),
}
"""Range of each figure; a name ends in its unit."""
Sample = tuple[Device, Mapping[str, float]]


def _samples(plugin: Subject) -> list[Sample]:
    """Return a reading of each device of this machine, or else of the first transcript with known chips."""
    plugin.implements("flagcore_telemetry")
    found = plugin.once("samples", lambda: _read(plugin))
    if not found:
        raise Skip("there is no device of a known chip, neither here nor in a transcript with its memory")
    return found


def _read(plugin: Subject) -> list[Sample]:
    def sample(device: Device) -> list[Sample]:
        reader = plugin.loaded.telemetry(device)
        return [(device, reader.sample())] if reader else []

    if here := plugin.loaded.devices():
        return [pair for device in here for pair in sample(device)]
    try:
        listings = plugin.listings
    except Skip:
        return []
    for each in listings:
        if all(plugin.loaded.find_chip(listed.chip) and listed.memory_mib for listed in each.lists):
            with fakes.machine(fakes.printing(each)):
                return [pair for device in fakes.ask(plugin) for pair in sample(device)]
    return []


@check(each=_samples)
def telemetry_names_are_known(device: Device, sample: Mapping[str, float]) -> Problems:
    where = f"flagcore_telemetry of device {device.index}: "
    for name, value in sample.items():
        if not any(name == prefix or name.startswith(f"{prefix}_") for prefix in RANGES):
            yield Problem(f"{where}{name} is an unknown figure", f"the names are {', '.join(RANGES)}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            yield Problem(f"{where}{name} = {value!r} is not a number", "leave out what the tool does not report (N/A)")


@check("give bytes, watts, degrees, shares of 1 and hertz", each=_samples)
def telemetry_is_plausible(device: Device, sample: Mapping[str, float]) -> Problems:
    for name, value in sample.items():
        low, high = next((limits for prefix, limits in RANGES.items() if name.startswith(prefix)), (-1e30, 1e30))
        if isinstance(value, (int, float)) and not low <= value <= high:
            yield f"flagcore_telemetry of device {device.index}: {name} = {value:g}, not {low:g} to {high:g}"


@check("read it from the same output: trials are judged by what the device reports", each=_samples)
def telemetry_has_memory_in_use(device: Device, sample: Mapping[str, float]) -> Problems:
    if "memory_used_bytes" not in sample:
        yield f"flagcore_telemetry of device {device.index} lacks memory_used_bytes"


@check("compare names with chip.has_name(device.chip)")
def telemetry_accepts_chip_aliases(plugin: Subject) -> Problems:
    plugin.implements("flagcore_telemetry")
    for chip in plugin.chips:
        if plugin.loaded.telemetry(Device(index=0, chip=chip.name)) is None:
            continue
        for name in sorted({*chip.aliases, chip.name.lower(), f"{chip.vendor} {chip.name}"}):
            if plugin.loaded.telemetry(Device(index=0, chip=name)) is None:
                yield f"flagcore_telemetry accepts {chip.name}, but not its other name {name!r}"
