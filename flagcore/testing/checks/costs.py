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
"""Tolerance of a measured kernel above the peak: clocks and timers vary."""
FILES = {"curve.yaml", "kernels.jsonl", "provenance.yaml", "serving.yaml", "collectives.yaml"}


def kernel_costs_are_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_kernel_costs")
    for chip in plugin.chips:
        for engine in plugin.engines:
            plugin.loaded.kernel_costs(chip, engine)
    yield from plugin.problems_of("flagcore_kernel_costs")


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
                    f"{chip.name}: {method} is not above 0, or falls as the sizes grow",
                    "check sizes and times (us) in costs/*/kernels.jsonl; return NaN for what is unknown",
                )


def launch_time_is_in_seconds(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in plugin.own_costs():
        if not (np.isnan(costs.launch_seconds()) or 1e-7 < costs.launch_seconds() < 1e-3):
            yield Problem(f"{chip.name}: launch_seconds() = {costs.launch_seconds():g}", "give seconds: 8.0e-6")


def run_factor_is_plausible(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in plugin.own_costs():
        if not (np.isnan(costs.run_slowdown()) or 1 <= costs.run_slowdown() < 3):
            yield Problem(f"{chip.name}: run_slowdown() = {costs.run_slowdown():g}", "give 1 to 3, or NaN if unknown")


def kernels_do_not_exceed_peaks(plugin: Subject) -> Iterator[Problem]:
    side, much = np.full(4, 8192.0), _powers_of_two(30, 34)
    for chip, costs in plugin.own_costs():
        for precision, peak in chip.dense_flops_per_second.items():
            rate = np.nanmax([0.0, *(2.0 * side**3 / costs.gemm_seconds(side, side, side, precision))])
            if rate > MEASURED * peak.value:
                yield Problem(
                    f"{chip.name}: a product in {precision} has {rate:g} flops/s, its peak {peak.value:g}",
                    "check the times in kernels.jsonl, the shares in curve.yaml (at most 1) and the peak",
                )
        bandwidth = chip.memory_bandwidth_bytes_per_second
        if bandwidth and np.nanmax([0.0, *(much / costs.memory_seconds(much))]) > MEASURED * bandwidth.value:
            yield Problem(
                f"{chip.name}: memory_seconds is faster than memory_bandwidth_bytes_per_second",
                "count bytes read and written; memory_share in curve.yaml is at most 1",
            )


def shipped_costs_are_used(plugin: Subject) -> Iterator[Problem]:
    folders = _folders(plugin)
    for chip in plugin.own_chips():
        files = folders.get(chip.name.casefold(), set())
        if plugin.failed("flagcore_kernel_costs", "flagcore_collective_costs"):
            continue  # another check reports it
        if files & {"curve.yaml", "kernels.jsonl"} and plugin.loaded.kernel_costs(chip, "megatron") is None:
            yield Problem(
                f"{chip.name}: flagcore_kernel_costs ignores costs/{chip.name.casefold()}",
                "return kernel_costs(package, chip) there, as VendorPlugin does",
            )
        if "collectives.yaml" in files and plugin.loaded.collective_costs(plugin.group(chip), "megatron") is None:
            yield Problem(
                f"{chip.name}: flagcore_collective_costs ignores costs/{chip.name.casefold()}",
                "return collective_table(package, group.chip) there, as VendorPlugin does",
            )


def shipped_costs_belong_to_chips(plugin: Subject) -> Iterator[Problem]:
    known = {chip.name.casefold() for chip in plugin.own_chips()}
    for name, files in _folders(plugin).items():
        if name not in known:
            yield Problem(f"costs/{name}: no chip has this name", "name the folder like a chip, in lower case")
        for file in sorted(files - FILES):
            yield Problem(f"costs/{name}/{file} is not read", f"the files are {', '.join(sorted(FILES))}")


def measured_kernels_have_provenance(plugin: Subject) -> Iterator[Problem]:
    for name, files in _folders(plugin).items():
        if "kernels.jsonl" in files and "provenance.yaml" not in files:
            yield Problem(
                f"costs/{name}/provenance.yaml is missing beside kernels.jsonl",
                "add it with how, software and date of the measurement",
            )


def _powers_of_two(first: int, end: int) -> FloatArray:
    return np.exp2(np.arange(first, end)).astype(np.float64)


def _folders(plugin: Subject) -> dict[str, set[str]]:
    folder = plugin.package_folder / "costs"
    if not folder.is_dir():
        raise Skip("the plugin has no folder costs")
    return {entry.name: {file.name for file in entry.iterdir()} for entry in sorted(folder.iterdir()) if entry.is_dir()}
