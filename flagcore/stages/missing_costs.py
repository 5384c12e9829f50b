"""missing: which rates are unknown if a time cannot be predicted, and how to get them."""

from __future__ import annotations

from itertools import chain

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.serving import ServeSpec
from flagcore.domain.space import IntArray
from flagcore.domain.spec import Task
from flagcore.spec.limits import PRECISIONS

MEASURED = "`flag calibrate` on such a device measures that"
BUDGET = "give cluster.memory_per_device"
GIVEN = "give cluster.nic_bytes_per_second"
BYTES = 2.0**20


def no_time(task: Task, costs: Costs) -> str:
    """Return why no time can be predicted for a task: each unknown rate, and how to get it."""
    unknown: dict[str, list[str]] = {}
    unlisted = dict.fromkeys(chain(*(_unlisted(*pair, task.spec.work.precision) for pair in _pairs(task, costs))))
    for what, how in _unknown(task, costs) or ([] if unlisted else [_other(task)]):
        unknown.setdefault(how, []).append(what)
    rates = ", ".join(f"{' and '.join(rates)} ({how})" for how, rates in unknown.items())
    return "; ".join([*unlisted, *([f"unknown: {rates}"] if rates else []), *_unlimited(task)])


def _unlimited(task: Task) -> list[str]:
    """Return the chips of unknown memory: nothing is removed for not fitting."""
    chips = {group.chip.name: group for group in task.cluster.groups}
    return [
        f"unknown memory of {name}, so all seem to fit ({BUDGET})"
        for name, group in chips.items()
        if group.memory_bytes is None and group.chip.memory_bytes is None
    ]


def _other(task: Task) -> tuple[str, str]:
    """Return what is not known where all rates are: of servers, layers that are not on their devices."""
    if isinstance(task.spec.work, ServeSpec):
        return "how fast the host computes the layers that are not on a device", "trials measure that"
    return "a rate that it needs", MEASURED


def _pairs(task: Task, costs: Costs) -> list[tuple[NodeGroup, Costs]]:
    return list(zip(task.cluster.groups, costs.groups, strict=False))


def _unlisted(group: NodeGroup, costs: Costs, precision: str) -> list[str]:
    """Return what to use on a chip whose rates are known, but in other precisions: calibration measures no others."""
    known = _known(costs)
    if not known or precision in known:
        return []
    *others, last = [each for each in known if each in group.chip.dense_flops_per_second] or known
    usable = f"{', '.join(others)} or {last}" if others else last
    return [f"{group.chip.name} lists no rate in {precision} (use train.precision {usable})"]


def _known(costs: Costs) -> list[str]:
    """Return the precisions in which the rate of matrix products is known."""
    size = np.array([1024.0])
    return [each for each in PRECISIONS if not np.isnan(costs.kernels.gemm_seconds(size, size, size, each)).any()]


def _unknown(task: Task, costs: Costs) -> list[tuple[str, str]]:
    found = [each for group, its in _pairs(task, costs) for each in _unknown_of(group, its, task.spec.work.precision)]
    if costs.between is not None and np.isnan(costs.between.seconds("send", np.array([BYTES]), *_ranks(2, 1))).any():
        found.append(("the network between node groups", "give nic_bytes_per_second in each of cluster.groups"))
    return found


def _unknown_of(group: NodeGroup, costs: Costs, precision: str) -> list[tuple[str, str]]:
    chip, size = group.chip.name, np.array([1024.0])
    found = []
    if not _known(costs):
        found.append((f"the peak rate of {chip} in {precision}", MEASURED))
    if np.isnan(costs.kernels.memory_seconds(size)).any():
        found.append((f"the memory bandwidth of {chip}", MEASURED))
    if _is_unknown(costs, group.devices_per_node, 1):
        found.append((f"the link between the {group.devices_per_node} devices of a node of {chip}", MEASURED))
    if _is_unknown(costs, group.nodes, group.devices_per_node):
        found.append((f"the network between nodes of {chip}", GIVEN))
    return found


def _is_unknown(costs: Costs, ranks: int, stride: int) -> bool:
    """Return whether the time is unknown of a collective of `ranks` devices takes that are `stride` apart."""
    group = _ranks(ranks, stride)
    return ranks > 1 and bool(np.isnan(costs.collectives.seconds("all_reduce", np.array([BYTES]), *group)).any())


def _ranks(ranks: int, stride: int) -> tuple[IntArray, IntArray]:
    return np.array([ranks]), np.array([stride])
