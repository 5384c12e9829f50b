"""The cost, the energy and the carbon of tokens and of the planned job.

Costs are in the currency of `cluster.price_per_device_hour`. Energy is that of the devices: measured, or else what
their TDP allows, which is more than they usually take. Hosts, networks and cooling are not included.
"""

from __future__ import annotations

from flagcore.domain.spec import Task

HOUR, DAY = 3600.0, 86400.0
JOULES_PER_KWH = 3.6e6
MEASURED, TDP = "telemetry", "tdp"
"""Sources of the power of a device."""
COST = (
    *("cost_per_million_tokens", "planned_days", "planned_cost"),
    *("energy_kwh_per_million_tokens", "planned_energy_kwh"),
    *("co2_kg_per_million_tokens", "planned_co2_kg", "energy_source"),
)
"""The names of the figures."""


def cost_figures(
    task: Task, step_time_s: float, tokens_per_s_per_device: float | None, watts: float | None = None
) -> dict[str, float | str]:
    """Return what a million tokens and the planned steps cost, take and emit, without unknown figures.

    `watts` is the measured power of a device, None for its TDP. Energy by the TDP is left out if the spec gives neither
    a price, nor `planned_steps`, nor a factor for carbon. On node groups with different prices and chips, means over
    all devices are used: every device is paid as long as the job runs.
    """
    price, steps = price_per_device_hour(task), task.spec.control.planned_steps
    grams = task.spec.cluster.grams_co2_per_kwh
    figures: dict[str, float | str] = {}
    million_s = 1e6 / tokens_per_s_per_device if tokens_per_s_per_device else None
    planned_s = None if steps is None else steps * step_time_s
    if price is not None and million_s is not None:
        figures["cost_per_million_tokens"] = price / HOUR * million_s
    if planned_s is not None:
        figures["planned_days"] = planned_s / DAY
        if price is not None:
            figures["planned_cost"] = planned_s / HOUR * price * task.cluster.devices
    power = tdp_watts(task) if watts is None else watts
    if power is None or (watts is None and price is None and steps is None and grams is None):
        return figures
    device_s = {"million_tokens": million_s, "planned": planned_s and planned_s * task.cluster.devices}
    for name, seconds in device_s.items():
        if seconds is not None:
            energy, carbon = ENERGY[name]
            figures[energy] = seconds * power / JOULES_PER_KWH
            if grams is not None:
                figures[carbon] = seconds * power / JOULES_PER_KWH * grams / 1000.0
    return {**figures, "energy_source": TDP if watts is None else MEASURED}


ENERGY = {
    "million_tokens": ("energy_kwh_per_million_tokens", "co2_kg_per_million_tokens"),
    "planned": ("planned_energy_kwh", "planned_co2_kg"),
}
"""The names of the energy and of the carbon of a million tokens and of the planned steps."""


def price_per_device_hour(task: Task) -> float | None:
    """Return the mean price of a device for an hour, None if the spec does not give it for all devices."""
    cluster = task.spec.cluster
    return _mean(task, [group.price_per_device_hour for group in cluster.groups or (cluster,)])


def tdp_watts(task: Task) -> float | None:
    """Return the mean TDP of a device in watts, None if that of a chip is unknown."""
    facts = [group.chip.tdp_watts for group in task.cluster.groups]
    return _mean(task, [None if fact is None else float(fact.value) for fact in facts])


def _mean(task: Task, values: list[float | None]) -> float | None:
    """Return the mean of a figure of each node group over all devices, None if one is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    counts = [group.devices for group in task.cluster.groups]
    return sum(value * count for value, count in zip(known, counts, strict=True)) / sum(counts)
