"""The cost of tokens and of the planned job, in the currency of `cluster.price_per_device_hour`."""

from __future__ import annotations

from flagcore.domain.spec import Task

HOUR, DAY = 3600.0, 86400.0
COST = ("cost_per_million_tokens", "planned_days", "planned_cost")
"""The names of the figures."""


def cost_figures(task: Task, step_time_s: float, tokens_per_s_per_device: float | None) -> dict[str, float]:
    """Return the cost per million tokens, and the days and the cost of the planned steps, without unknown figures."""
    price, steps = price_per_device_hour(task), task.spec.control.planned_steps
    figures: dict[str, float] = {}
    if price is not None and tokens_per_s_per_device:
        figures["cost_per_million_tokens"] = price / HOUR / tokens_per_s_per_device * 1e6
    if steps is not None:
        figures["planned_days"] = steps * step_time_s / DAY
        if price is not None:
            figures["planned_cost"] = steps * step_time_s / HOUR * price * task.cluster.devices
    return figures


def price_per_device_hour(task: Task) -> float | None:
    """Return the mean price of a device for an hour, None if the spec does not give it for all devices."""
    cluster = task.spec.cluster
    prices = [group.price_per_device_hour for group in cluster.groups or (cluster,)]
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    counts = [group.nodes * group.devices_per_node for group in task.cluster.groups]
    return sum(price * count for price, count in zip(known, counts, strict=True)) / sum(counts)
