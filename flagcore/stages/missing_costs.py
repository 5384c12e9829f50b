"""missing_costs: describe the unknown rates that prevent the prediction of times, and how to provide them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flagcore.contracts import CollectiveCosts, Costs
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import PRECISIONS, Task

MEASURED = "`flag calibrate` measures it on such a device"
BUDGET = "give cluster.memory_per_device"
NETWORK = "give cluster.nic_bytes_per_second"


def no_time(task: Task, costs: Costs) -> str:
    """Return why no time can be predicted for a task: the unknown rates, and how to provide them."""
    precision, unlisted, by_fix = task.spec.work.precision, list[str](), dict[str, list[str]]()
    for group, group_costs in zip(task.cluster.groups, costs.groups, strict=False):
        known = _known_precisions(group_costs)
        if known and precision not in known:
            unlisted.append(_other_precision(group, known, precision))
        for rate, fix in _unknown_rates(group, group_costs, bool(known), precision):
            by_fix.setdefault(fix, []).append(rate)
    if costs.between is not None and _is_unknown(costs.between, "send", 2, 1):
        fix = "give nic_bytes_per_second in each of cluster.groups"
        by_fix.setdefault(fix, []).append("the network between node groups")
    if not by_fix and not unlisted:
        is_serving = isinstance(task.spec.work, ServeSpec)
        rate = "the host's speed for layers that are not on a device" if is_serving else "a rate of the device"
        by_fix["trials measure it" if is_serving else MEASURED] = [rate]
    named = ", ".join(f"{' and '.join(rates)} ({fix})" for fix, rates in by_fix.items())
    chips = {group.chip.name: group for group in task.cluster.groups}
    unlimited = [
        f"unknown memory of {name}, so all candidates are assumed to fit ({BUDGET})"
        for name, group in chips.items()
        if group.memory_bytes is None and group.chip.memory_bytes is None
    ]
    return "; ".join([*dict.fromkeys(unlisted), *([f"unknown: {named}"] if named else []), *unlimited])


def _known_precisions(costs: Costs) -> list[str]:
    size = np.array([1024.0])
    return [each for each in PRECISIONS if not np.isnan(costs.kernels.gemm_seconds(size, size, size, each)).any()]


def _other_precision(group: NodeGroup, known: list[str], precision: str) -> str:
    """Return a message with the precisions of a chip that can be predicted."""
    *others, last = [each for each in known if each in group.chip.dense_flops_per_second] or known
    usable = f"{', '.join(others)} or {last}" if others else last
    return f"{group.chip.name} lists no rate in {precision} (use train.precision {usable})"


def _unknown_rates(group: NodeGroup, costs: Costs, has_peak: bool, precision: str) -> Iterator[tuple[str, str]]:
    """Yield each unknown rate of a node group, and how to provide it."""
    chip = group.chip.name
    if not has_peak:
        yield f"the peak rate of {chip} in {precision}", MEASURED
    if np.isnan(costs.kernels.memory_seconds(np.array([1024.0]))).any():
        yield f"the memory bandwidth of {chip}", MEASURED
    if _is_unknown(costs.collectives, "all_reduce", group.devices_per_node, 1):
        yield f"the link between the {group.devices_per_node} devices of a node of {chip}", MEASURED
    if _is_unknown(costs.collectives, "all_reduce", group.nodes, group.devices_per_node):
        yield f"the network between nodes of {chip}", NETWORK


def _is_unknown(costs: CollectiveCosts, kind: str, ranks: int, stride: int) -> bool:
    seconds = costs.seconds(kind, np.array([2.0**20]), np.array([ranks]), np.array([stride]))
    return ranks > 1 and bool(np.isnan(seconds).any())
