"""Kernel times, and the files that they are from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.space import FloatArray
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject

MEASURED = 1.05
"""How much faster than a peak a measured kernel may look: clocks vary, and so do timers."""
FILES = {"curve.yaml", "kernels.jsonl", "provenance.yaml", "serving.yaml", "collectives.yaml"}


def kernel_costs_are_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_kernel_costs")
    for chip in plugin.chips:
        for engine in plugin.engines:
            plugin.loaded.kernel_costs(chip, engine)
    yield from plugin.told("flagcore_kernel_costs")


def kernel_times_grow_with_size(plugin: Subject) -> Iterator[Problem]:
    sizes = _powers_of_two(8, 14)
    ones = np.ones_like(sizes)
    trained = AttentionShape(
        batch=ones, heads=8 * ones, groups=8 * ones, queries=sizes, keys=sizes, head_dim=128 * ones
    )
    decoded = replace(trained, batch=16 * ones, groups=ones, queries=ones)
    for chip, costs in plugin.own_costs():
        for method, seconds in (
            ("gemm_seconds", costs.gemm_seconds(sizes, sizes, sizes, "bf16")),
            ("attention_seconds", costs.attention_seconds(trained, "bf16")),
            ("attention_seconds of one query", costs.attention_seconds(decoded, "bf16")),
            ("attention_backward_seconds", costs.attention_backward_seconds(trained, "bf16")),
            ("memory_seconds", costs.memory_seconds(sizes**2)),
            ("host_copy_seconds", costs.host_copy_seconds(sizes**2)),
        ):
            known = np.asarray(seconds)[~np.isnan(seconds)]
            if not ((known > 0).all() and (np.diff(known) >= 0).all()):
                yield Problem(
                    message=f"{chip.name}: {method} is not above 0, or falls as the sizes grow",
                    fix="look for a wrong size or time (us) in costs/*/kernels.jsonl; answer NaN for what is unknown",
                )


def launch_time_is_in_seconds(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in plugin.own_costs():
        if not (np.isnan(costs.launch_seconds()) or 1e-7 < costs.launch_seconds() < 1e-3):
            yield Problem(
                message=f"{chip.name}: launch_seconds() = {costs.launch_seconds():g}", fix="give seconds: 8.0e-6"
            )


def run_factor_is_plausible(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in plugin.own_costs():
        if not (np.isnan(costs.run_slowdown()) or 1 <= costs.run_slowdown() < 3):
            yield Problem(
                message=f"{chip.name}: run_slowdown() = {costs.run_slowdown():g}", fix="give 1 to 3, or NaN if unknown"
            )


def kernels_do_not_exceed_peaks(plugin: Subject) -> Iterator[Problem]:
    side, much = np.full(4, 8192.0), _powers_of_two(30, 34)
    for chip, costs in plugin.own_costs():
        for precision, peak in chip.dense_flops_per_second.items():
            rate = np.nanmax([0.0, *(2.0 * side**3 / costs.gemm_seconds(side, side, side, precision))])
            if rate > MEASURED * peak.value:
                yield Problem(
                    message=f"{chip.name}: a product in {precision} has {rate:g} flops/s, its peak {peak.value:g}",
                    fix="look for a wrong time in kernels.jsonl, a share above 1 in curve.yaml, or a wrong peak",
                )
        bandwidth = chip.memory_bandwidth_bytes_per_second
        if bandwidth and np.nanmax([0.0, *(much / costs.memory_seconds(much))]) > MEASURED * bandwidth.value:
            yield Problem(
                message=f"{chip.name}: memory_seconds is faster than memory_bandwidth_bytes_per_second",
                fix="count what is read and what is written; memory_share in curve.yaml is at most 1",
            )


def shipped_costs_are_used(plugin: Subject) -> Iterator[Problem]:
    folders = _folders(plugin)
    for chip in plugin.own_chips():
        files = folders.get(chip.name.casefold(), set())
        if plugin.failed("flagcore_kernel_costs", "flagcore_collective_costs"):
            continue  # another check tells why there is no answer
        if files & {"curve.yaml", "kernels.jsonl"} and plugin.loaded.kernel_costs(chip, "megatron") is None:
            yield Problem(
                message=f"{chip.name}: flagcore_kernel_costs does not tell what costs/{chip.name.casefold()} holds",
                fix="answer kernel_costs(PACKAGE, chip) there",
            )
        if "collectives.yaml" in files and plugin.loaded.collective_costs(plugin.group(chip), "megatron") is None:
            yield Problem(
                message=f"{chip.name}: flagcore_collective_costs does not tell costs/{chip.name.casefold()}",
                fix="answer collective_table(PACKAGE, group.chip) there",
            )


def shipped_costs_belong_to_chips(plugin: Subject) -> Iterator[Problem]:
    known = {chip.name.casefold() for chip in plugin.own_chips()}
    for name, files in _folders(plugin).items():
        if name not in known:
            yield Problem(
                message=f"costs/{name}: no chip is called so", fix="name the folder like a chip, in small letters"
            )
        for file in sorted(files - FILES):
            yield Problem(message=f"costs/{name}/{file} is read by nobody", fix=f"it holds {', '.join(sorted(FILES))}")


def measured_kernels_have_provenance(plugin: Subject) -> Iterator[Problem]:
    for name, files in _folders(plugin).items():
        if "kernels.jsonl" in files and "provenance.yaml" not in files:
            yield Problem(
                message=f"costs/{name}/provenance.yaml is missing beside kernels.jsonl",
                fix="say there how, with which software and when the kernels were measured",
            )


def _powers_of_two(first: int, end: int) -> FloatArray:
    return np.exp2(np.arange(first, end)).astype(np.float64)


def _folders(plugin: Subject) -> dict[str, set[str]]:
    folder = plugin.package_folder / "costs"
    if not folder.is_dir():
        raise Skip("the plugin ships no folder of costs")
    return {entry.name: {file.name for file in entry.iterdir()} for entry in sorted(folder.iterdir()) if entry.is_dir()}
