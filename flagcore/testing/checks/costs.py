"""Kernel times, and the files that they are from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from flagcore.contracts import AttentionShape, KernelCosts
from flagcore.domain.chip import Chip
from flagcore.domain.space import FloatArray
from flagcore.testing.examples import group_of
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Problem, Skip, Subject

MEASURED = 1.05
"""Tolerance of a measured kernel above the peak: clocks and timers vary."""
FILES = {"curve.yaml", "kernels.jsonl", "provenance.yaml", "serving.yaml", "collectives.yaml"}


@check("check sizes and times (us) in costs/*/kernels.jsonl; return NaN for what is unknown", each=Subject.own_costs)
def kernel_times_grow_with_size(chip: Chip, costs: KernelCosts) -> Problems:
    sizes = _powers_of_two(8, 14)
    ones = np.ones_like(sizes)
    trained = AttentionShape(
        batch=ones, heads=8 * ones, groups=8 * ones, queries=sizes, keys=sizes, head_dim=128 * ones
    )
    decoded = replace(trained, batch=16 * ones, groups=ones, queries=ones)
    for method, seconds in (
        ("gemm_seconds", costs.gemm_seconds(sizes, sizes, sizes, "bf16")),
        ("attention_seconds", costs.attention_seconds(trained, "bf16")),
        ("attention_seconds of one query", costs.attention_seconds(decoded, "bf16")),
        ("attention_backward_seconds", costs.attention_backward_seconds(trained, "bf16")),
        ("memory_seconds", costs.memory_seconds(sizes**2)),
        ("host_copy_seconds", costs.host_copy_seconds(sizes**2)),
    ):
        measured = np.asarray(seconds)[~np.isnan(seconds)]
        if not ((measured > 0).all() and (np.diff(measured) >= 0).all()):
            yield f"{chip.name}: {method} is not above 0, or falls as the sizes grow"


@check("give seconds: 8.0e-6", each=Subject.own_costs)
def launch_time_is_in_seconds(chip: Chip, costs: KernelCosts) -> Problems:
    if not (np.isnan(costs.launch_seconds()) or 1e-7 < costs.launch_seconds() < 1e-3):
        yield f"{chip.name}: launch_seconds() = {costs.launch_seconds():g}"


@check("give 1 to 3, or NaN if unknown", each=Subject.own_costs)
def run_factor_is_plausible(chip: Chip, costs: KernelCosts) -> Problems:
    if not (np.isnan(costs.run_slowdown()) or 1 <= costs.run_slowdown() < 3):
        yield f"{chip.name}: run_slowdown() = {costs.run_slowdown():g}"


@check(each=Subject.own_costs)
def kernels_do_not_exceed_peaks(chip: Chip, costs: KernelCosts) -> Problems:
    side, much = np.full(4, 8192.0), _powers_of_two(30, 34)
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


@check()
def shipped_costs_are_used(plugin: Subject) -> Problems:
    folders = dict(_folders(plugin))
    if plugin.failed("flagcore_kernel_costs", "flagcore_collective_costs"):
        return  # another check reports it
    for chip in plugin.own_chips():
        folder = chip.name.casefold()
        files = folders.get(folder, set())
        if files & {"curve.yaml", "kernels.jsonl"} and plugin.loaded.kernel_costs(chip, "megatron") is None:
            fix = "return kernel_costs(package, chip) there, as VendorPlugin does"
            yield Problem(f"{chip.name}: flagcore_kernel_costs ignores costs/{folder}", fix)
        if "collectives.yaml" in files and plugin.loaded.collective_costs(group_of(chip), "megatron") is None:
            fix = "return collective_table(package, group.chip) there, as VendorPlugin does"
            yield Problem(f"{chip.name}: flagcore_collective_costs ignores costs/{folder}", fix)


@check()
def shipped_costs_belong_to_chips(plugin: Subject) -> Problems:
    names = {chip.name.casefold() for chip in plugin.own_chips()}
    for name, files in _folders(plugin):
        if name not in names:
            yield Problem(f"costs/{name}: no chip has this name", "name the folder like a chip, in lower case")
        for file in sorted(files - FILES):
            yield Problem(f"costs/{name}/{file} is not read", f"the files are {', '.join(sorted(FILES))}")


def _folders(plugin: Subject) -> Iterable[tuple[str, set[str]]]:
    """Return the folders of costs with the names of their files. Raises Skip without any."""
    folder = plugin.package_folder / "costs"
    if not folder.is_dir():
        raise Skip("the plugin has no folder costs")
    return [(each.name, {file.name for file in each.iterdir()}) for each in sorted(folder.iterdir()) if each.is_dir()]


@check("add it with how, software and date of the measurement", each=_folders)
def measured_kernels_have_provenance(name: str, files: set[str]) -> Problems:
    if "kernels.jsonl" in files and "provenance.yaml" not in files:
        yield f"costs/{name}/provenance.yaml is missing beside kernels.jsonl"


def _powers_of_two(first: int, end: int) -> FloatArray:
    return np.exp2(np.arange(first, end)).astype(np.float64)
