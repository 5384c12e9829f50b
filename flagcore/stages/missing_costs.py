"""missing_costs: the unknown rates if a time cannot be predicted, and how to get them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flagcore.contracts import CollectiveCosts, Costs
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import PRECISIONS, Task

MEASURED = "`flag calibrate` on such a device measures that"
BUDGET = "give cluster.memory_per_device"
NETWORK = "give cluster.nic_bytes_per_second"


def no_time(task: Task, costs: Costs) -> str:
    """Return why no time can be predicted for a task: unknown rates, and how to get them."""
    precision, unlisted, rates = task.spec.work.precision, list[str](), dict[str, list[str]]()
    for group, own in zip(task.cluster.groups, costs.groups, strict=False):
        known = _known_precisions(own)
        if known and precision not in known:
            unlisted.append(_other_precision(group, known, precision))
        for what, how in _unknown(group, own, bool(known), precision):
            rates.setdefault(how, []).append(what)
    if costs.between is not None and _is_unknown(costs.between, "send", 2, 1):
        how = "give nic_bytes_per_second in each of cluster.groups"
        rates.setdefault(how, []).append("the network between node groups")
    if not rates and not unlisted:
        serves = isinstance(task.spec.work, ServeSpec)
        what = "how fast the host computes the layers that are not on a device" if serves else "a rate that it needs"
        rates["trials measure that" if serves else MEASURED] = [what]
    named = ", ".join(f"{' and '.join(several)} ({how})" for how, several in rates.items())
    chips = {group.chip.name: group for group in task.cluster.groups}
    unlimited = [
        f"unknown memory of {name}, so all seem to fit ({BUDGET})"
        for name, group in chips.items()
        if group.memory_bytes is None and group.chip.memory_bytes is None
    ]
    return "; ".join([*dict.fromkeys(unlisted), *([f"unknown: {named}"] if named else []), *unlimited])


def _known_precisions(costs: Costs) -> list[str]:
    size = np.array([1024.0])
    return [each for each in PRECISIONS if not np.isnan(costs.kernels.gemm_seconds(size, size, size, each)).any()]


def _other_precision(group: NodeGroup, known: list[str], precision: str) -> str:
    """Return the usable precisions of a chip: those that calibration measures."""
    *others, last = [each for each in known if each in group.chip.dense_flops_per_second] or known
    usable = f"{', '.join(others)} or {last}" if others else last
    return f"{group.chip.name} lists no rate in {precision} (use train.precision {usable})"


def _unknown(group: NodeGroup, costs: Costs, has_peak: bool, precision: str) -> Iterator[tuple[str, str]]:
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
