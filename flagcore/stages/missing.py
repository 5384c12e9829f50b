"""missing: which rates nobody knows, where a time cannot be told, and how they can be had."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import IntArray
from flagcore.domain.spec import Task

MEASURED = "`flag calibrate` on such a device measures that"
GIVEN = "give cluster.nic_bytes_per_second"
BYTES = 2.0**20


def no_time(task: Task, costs: Costs) -> str:
    """Return why no time can be told for a candidate of `task`: each rate that nobody knows, and how it can be had."""
    unknown: dict[str, list[str]] = {}
    for what, how in _unknown(task, costs) or [("a rate that it needs", MEASURED)]:
        unknown.setdefault(how, []).append(what)
    return "nobody knows " + ", ".join(f"{' and '.join(rates)} ({how})" for how, rates in unknown.items())


def _unknown(task: Task, costs: Costs) -> list[tuple[str, str]]:
    pairs = zip(task.cluster.groups, costs.groups, strict=False)
    found = [each for group, its in pairs for each in _unknown_of(group, its, task.spec.train.precision)]
    if costs.between is not None and np.isnan(costs.between.seconds("send", np.array([BYTES]), *_ranks(2, 1))).any():
        found.append(("the network between node groups", "give nic_bytes_per_second in each of cluster.groups"))
    return found


def _unknown_of(group: NodeGroup, costs: Costs, precision: str) -> list[tuple[str, str]]:
    chip, size = group.chip.name, np.array([1024.0])
    found = []
    if np.isnan(costs.kernels.gemm_seconds(size, size, size, precision)).any():
        known = ", ".join(group.chip.dense_flops_per_second)
        fix = f"use one of {known}; {MEASURED}" if known else MEASURED
        found.append((f"the peak rate of {chip} in {precision}", fix))
    if np.isnan(costs.kernels.memory_seconds(size)).any():
        found.append((f"the memory bandwidth of {chip}", MEASURED))
    if _silent(costs, group.devices_per_node, 1):
        found.append((f"the link between the {group.devices_per_node} devices of a node of {chip}", MEASURED))
    if _silent(costs, group.nodes, group.devices_per_node):
        found.append((f"the network between nodes of {chip}", GIVEN))
    return found


def _silent(costs: Costs, ranks: int, stride: int) -> bool:
    """Return whether nobody knows what a collective of `ranks` devices takes that are `stride` apart."""
    group = _ranks(ranks, stride)
    return ranks > 1 and bool(np.isnan(costs.collectives.seconds("all_reduce", np.array([BYTES]), *group)).any())


def _ranks(ranks: int, stride: int) -> tuple[IntArray, IntArray]:
    return np.array([ranks]), np.array([stride])
