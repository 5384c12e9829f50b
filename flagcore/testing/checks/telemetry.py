"""Telemetry: the figures read from devices during trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagcore.domain.chip import Device
from flagcore.testing import fakes
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject

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


def telemetry_names_are_known(plugin: Subject) -> Iterator[Problem]:
    for device, sample in _samples(plugin):
        for name, value in sample.items():
            if not any(name == prefix or name.startswith(f"{prefix}_") for prefix in RANGES):
                yield Problem(
                    f"flagcore_telemetry of device {device.index}: {name} is an unknown figure",
                    f"the names are {', '.join(RANGES)}",
                )
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                yield Problem(
                    f"flagcore_telemetry of device {device.index}: {name} = {value!r} is not a number",
                    "leave out what the tool does not report (N/A)",
                )


def telemetry_is_plausible(plugin: Subject) -> Iterator[Problem]:
    for device, sample in _samples(plugin):
        for name, value in sample.items():
            low, high = next((limits for prefix, limits in RANGES.items() if name.startswith(prefix)), (-1e30, 1e30))
            if isinstance(value, (int, float)) and not low <= value <= high:
                yield Problem(
                    f"flagcore_telemetry of device {device.index}: {name} = {value:g}, not {low:g} to {high:g}",
                    "give bytes, watts, degrees, shares of 1 and hertz",
                )


def telemetry_has_memory_in_use(plugin: Subject) -> Iterator[Problem]:
    for device, sample in _samples(plugin):
        if "memory_used_bytes" not in sample:
            yield Problem(
                f"flagcore_telemetry of device {device.index} lacks memory_used_bytes",
                "read it from the same output: trials are judged by what the device reports",
            )


def telemetry_is_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_telemetry")
    for chip in plugin.chips:
        plugin.loaded.telemetry(Device(index=0, chip=chip.name))
    yield from plugin.problems_of("flagcore_telemetry")


def telemetry_accepts_chip_aliases(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_telemetry")
    for chip in plugin.chips:
        if plugin.loaded.telemetry(Device(index=0, chip=chip.name)) is None:
            continue
        for name in sorted({*chip.aliases, chip.name.lower(), f"{chip.vendor} {chip.name}"}):
            if plugin.loaded.telemetry(Device(index=0, chip=name)) is None:
                yield Problem(
                    f"flagcore_telemetry accepts {chip.name}, but not its other name {name!r}",
                    "compare names with chip.has_name(device.chip)",
                )


def _samples(plugin: Subject) -> list[tuple[Device, Mapping[str, float]]]:
    """Return a reading of each device of this machine, or else of the first transcript with known chips."""
    plugin.implements("flagcore_telemetry")
    if "samples" not in plugin.memory:
        plugin.memory["samples"] = _read(plugin)
    found: list[tuple[Device, Mapping[str, float]]] = plugin.memory["samples"]
    if not found:
        raise Skip("there is no device of a prefix chip, neither here nor in a transcript with its memory")
    return found


def _read(plugin: Subject) -> list[tuple[Device, Mapping[str, float]]]:
    def sample(device: Device) -> list[tuple[Device, Mapping[str, float]]]:
        reader = plugin.loaded.telemetry(device)
        return [(device, reader.sample())] if reader else []

    here = plugin.loaded.devices()
    if here:
        return [pair for device in here for pair in sample(device)]
    try:
        listings = plugin.listings
    except Skip:
        return []
    for each in listings:
        if all(plugin.loaded.find_chip(listed.chip) and listed.memory_mib for listed in each.lists):
            with fakes.machine({each.tool: fakes.prints(each.text)}):
                return [pair for device in fakes.ask(plugin) for pair in sample(device)]
    return []
