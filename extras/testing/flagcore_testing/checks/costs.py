"""Checks of memory models and kernel times, and of the files with measured kernels, row by row."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from flagcore_vendorkit.chip_file import PRECISIONS, cost_file, read_curve, read_provenance, shared_costs
from flagcore_vendorkit.kernel_table import SIZES

from flagcore.contracts import AttentionShape, KernelCosts, MemoryModel, communicator_bytes
from flagcore.domain.chip import Chip
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import Curve
from flagcore.plugins import find_engine
from flagcore_testing import fakes
from flagcore_testing.checks.bounds import CURVE, OF_CURVES, OF_KERNELS, OF_MEMORY_MODEL, outside
from flagcore_testing.checks.packaging import PEAKS
from flagcore_testing.examples import group_of, task_on
from flagcore_testing.kit import Case, Items, Problems, Skip, Subject, check, need, once, repeated, wrong

CONTEXT_BYTES = 2.0**27
"""Minimum memory of a process's context, libraries and collective buffers; known chips take 0.5 to 3 GiB."""
BUDGET = 10**9
"""A user's budget of memory in bytes."""


@once
def _idle_bytes(plugin: Subject) -> dict[str, float]:
    """Return the least memory in use on a device of each chip, in the transcripts of tools."""
    found: dict[str, float] = {}
    with suppress(Skip):
        for each in plugin.listings:
            for device, sample in fakes.samples(plugin, each):
                chip, used = plugin.loaded.find_chip(device.chip), sample.get("memory_used_bytes")
                if chip and used is not None:
                    found[chip.name] = min(found.get(chip.name, used), used)
    return found


@check("return a memory model for each of your chips, or remove the hook", hook="memory_model")
def memory_models_are_given(plugin: Subject) -> Problems:
    for chip in () if plugin.failed("flagcore_memory_model") else plugin.own_chips():  # another check reports a failure
        about = {"group": group_of(chip), "engine": "megatron", "kind": "train"}
        yield plugin.ask("flagcore_memory_model", about) is None, f"flagcore_memory_model returns None for {chip.name}"


def _models(plugin: Subject) -> Items:
    find = plugin.loaded.memory_model
    return plugin.each("flagcore_memory_model", lambda chip: find(group_of(chip), "megatron"))


@check("add to the argument, or multiply by at least 1", each=_models)
def memory_models_are_plausible(plugin: Subject, chip: Chip, model: MemoryModel) -> Problems:
    allocated = np.linspace(0, 2.0**37, 200)
    reserved = model.reserved_bytes(allocated)
    used = model.device_used_bytes(reserved)
    for method, argument, answer in (("reserved_bytes", allocated, reserved), ("device_used_bytes", reserved, used)):
        is_growing = (answer >= argument).all() and (np.diff(answer) >= 0).all()
        yield not is_growing, f"{method} of the memory model returns less than its argument, or falls as that grows"
    context = float(model.device_used_bytes(np.zeros(1))[0])
    memory, capacity = chip.memory_bytes, model.capacity_bytes()
    figures = {
        "device_used_bytes(0) of hooks.py": context,
        "workspace_bytes()": model.workspace_bytes(),
        "communicator_bytes()": communicator_bytes(model),
        "memory_bytes": memory.value if memory else 2.0**35,
        "reserved_bytes of the memory model": float(model.reserved_bytes(np.full(1, 2.0**35))[0]),
        "its argument": 2.0**35,
        **({"capacity_bytes()": capacity} if memory and capacity is not None else {}),
    }
    yield from outside(figures, OF_MEMORY_MODEL)
    hidden = memory.value - chip.usable_bytes.value if memory and chip.usable_bytes else 0.0  # in use, but not usable
    idle = max(_idle_bytes(plugin).get(chip.name, 0.0) - hidden, 0.0)
    least = idle + min(CONTEXT_BYTES, memory.value / 32 if memory else np.inf)
    of_user = plugin.loaded.memory_model(replace(group_of(chip), memory_bytes=BUDGET), "megatron")
    limit = of_user.capacity_bytes() if of_user else None
    yield from (
        (0 < context < least,
         f"device_used_bytes(0) of hooks.py = {context:.3g} is below {least:.3g}: {idle:.3g} of an idle device in "
         "tests/smi and a context",
         "count what an idle device shows in use, and a process's context, libraries and buffers, in bytes"),
        (limit is None or limit > BUDGET, f"capacity_bytes() is {limit} with a user's budget of {BUDGET:g}",
         "use group.memory_bytes if it is set, else the chip's memory_bytes"),
    )  # fmt: skip


@check("find the part of the memory model that shrinks as its argument grows")
def larger_micro_batches_need_more_memory(plugin: Subject) -> Problems:
    engine = find_engine("megatron")
    for task in map(task_on, plugin.own_chips()):
        costs = plugin.loaded.costs(task.cluster, "megatron")
        rows = [engine.columns(task, {"micro_batch_size": 2**power}) for power in range(4)]
        columns = {knob: np.concatenate([row[knob] for row in rows]) for knob in rows[0]}
        is_growing = (np.diff(engine.predict(task, columns, costs).device_used_bytes) >= 0).all()
        yield not is_growing, f"{task.cluster.chips}: a larger micro_batch_size is predicted to need less memory"


REACHED, SLOW_COPY = 0.3, 0.2
"""Minimum shares of a dense peak that large products reach, half as much of a sparse one, and of the memory's or the
host interface's rate that large copies reach; known chips reach half."""
ABOVE_PEAK = 1.05
"""Tolerance of a measured kernel above the peak: clocks and timers vary."""
TOO_SLOW = "give shares of 1, and host_bytes_per_second in bytes, in curve.yaml"


@check("check sizes and times (us) in costs/*/kernels.jsonl; return NaN for what is unknown", each=Subject.own_costs)
def kernel_times_are_plausible(plugin: Subject, chip: Chip, costs: KernelCosts) -> Problems:
    sizes = _powers_of_two(8, 14)
    ones = np.ones_like(sizes)
    training_shape = AttentionShape(
        batch=ones, heads=8 * ones, groups=8 * ones, queries=sizes, keys=sizes, head_dim=128 * ones
    )
    decoded = replace(training_shape, batch=16 * ones, groups=ones, queries=ones)
    for method, seconds in (
        ("gemm_seconds", costs.gemm_seconds(sizes, sizes, sizes, "bf16")),
        ("attention_seconds", costs.attention_seconds(training_shape, "bf16")),
        ("attention_seconds of one query", costs.attention_seconds(decoded, "bf16")),
        ("attention_backward_seconds", costs.attention_backward_seconds(training_shape, "bf16")),
        ("memory_seconds", costs.memory_seconds(sizes**2)),
        ("host_copy_seconds", costs.host_copy_seconds(sizes**2)),
    ):
        known_times = np.asarray(seconds)[~np.isnan(seconds)]
        is_growing = (known_times > 0).all() and (np.diff(known_times) >= 0).all()
        yield not is_growing, f"{method} is not above 0, or falls as the sizes grow"
    constants = {"launch_seconds()": costs.launch_seconds(), "run_slowdown()": costs.run_slowdown()}
    yield from outside(constants, OF_KERNELS)
    yield from _product_problems(chip, costs)
    memory, host, large = chip.memory_bandwidth_bytes_per_second, chip.host_bytes_per_second, _powers_of_two(30, 34)
    size, of_memory = np.full(1, 2.0**32), memory.value if memory else 0.0
    copied, to_host = (float(size[0] / each[0]) for each in (costs.memory_seconds(size), costs.host_copy_seconds(size)))
    yield from (
        (memory and np.nanmax([0.0, *(large / costs.memory_seconds(large))]) > ABOVE_PEAK * of_memory,
         "memory_seconds is faster than memory_bandwidth_bytes_per_second",
         "count bytes read and written; memory_share in curve.yaml is at most 1"),
        (copied < SLOW_COPY * of_memory,
         f"memory_seconds reaches {copied:.3g} of {of_memory:g} bytes per second", TOO_SLOW),
        (to_host < (SLOW_COPY * host.value if host else 1e8),
         f"host_copy_seconds reaches {to_host:.3g} bytes per second", TOO_SLOW),
    )  # fmt: skip


def _product_problems(chip: Chip, costs: KernelCosts) -> Iterator[Case]:
    """Yield the precisions in which large products are faster than the peak, or much slower."""
    side = np.full(4, 8192.0)
    for precision, peak in chip.dense_flops_per_second.items():
        rates = 2.0 * side**3 / costs.gemm_seconds(side, side, side, precision)
        highest, rate = np.nanmax([0.0, *rates]), float(rates[0])
        yield from (
            (highest > ABOVE_PEAK * peak.value, f"a product in {precision} has {highest:g} flops/s, its peak "
             f"{peak.value:g}", "check the times in kernels.jsonl, the shares in curve.yaml (at most 1) and the peak"),
            (precision in ("bf16", "fp16") and rate < REACHED * peak.value,  # false for NaN
             f"a product of 8192 cubed reaches {rate / peak.value:.0%} of the peak in {precision}",
             "look for a peak with sparsity, a time in another unit than us in kernels.jsonl, or a small gemm_share in "
             "curve.yaml"),
        )  # fmt: skip


def _powers_of_two(first: int, end: int) -> FloatArray:
    return np.exp2(np.arange(first, end)).astype(np.float64)


FILES = {"curve.yaml", "kernels.jsonl", "provenance.yaml", "serving.yaml", "collectives.yaml"}


def _files(plugin: Subject) -> dict[str, set[str]]:
    """Return the names of the files in each folder below `costs/`. Raises Skip if there are none."""
    folder = plugin.package_folder / "costs"
    need(folder.is_dir(), "the plugin has no folder costs")
    return {each.name: {file.name for file in each.iterdir()} for each in sorted(folder.iterdir()) if each.is_dir()}


@check()
def shipped_costs_are_used(plugin: Subject) -> Problems:
    folders, shared = _files(plugin), shared_costs(plugin.package)
    for chip in () if plugin.failed("flagcore_kernel_costs", "flagcore_collective_costs") else plugin.own_chips():
        folder = chip.name.casefold()
        files = folders.get(folder, set()) | {file for file in FILES if (folder, file) in shared}
        has_kernels, has_curves = files & {"curve.yaml", "kernels.jsonl"}, "collectives.yaml" in files
        yield (has_kernels and plugin.loaded.kernel_costs(chip, "megatron") is None,
               f"{chip.name}: flagcore_kernel_costs ignores costs/{folder}",
               "return kernel_costs(package, chip) there, as VendorPlugin does")  # fmt: skip
        yield (has_curves and plugin.loaded.collective_costs(group_of(chip), "megatron") is None,
               f"{chip.name}: flagcore_collective_costs ignores costs/{folder}",
               "return collective_table(package, group.chip) there, as VendorPlugin does")  # fmt: skip


@check()
def shipped_costs_belong_to_chips(plugin: Subject) -> Problems:
    names = {chip.name.casefold() for chip in plugin.own_chips()}
    for name, files in _files(plugin).items():
        where = f"costs/{name}"
        yield name not in names, f"{where}: no chip has this name", "name the folder like a chip, in lower case"
        yield ("kernels.jsonl" in files and "provenance.yaml" not in files,
               f"{where}/provenance.yaml is missing next to kernels.jsonl",
               "add it with how, software and date of the measurement")  # fmt: skip
        for file in sorted(files - FILES):
            yield True, f"{where}/{file} is not read", f"the files are {', '.join(sorted(FILES))}"
    for name, file in shared_costs(plugin.package):
        own = plugin.package_folder / "costs" / name / file
        unknown = f"costs/same_as.yaml: {file} names {name}, and no chip has this name"
        yield name not in names, unknown, "correct the name"
        yield own.is_file(), f"costs/{name}/{file} is not read", "remove it, or the chip from costs/same_as.yaml"


FASTER, SLOWER = 1.1, 100.0
"""A measured kernel may be this much faster than the peaks allow, and a large one this much slower; known ones take up
to 30 times as long."""
LARGE_FLOPS, LARGE_BYTES = 1e11, 1e9
HUGE_FLOPS, SPREAD = 1e12, 3.0
"""Products of at least so many operations run at about the same rate: on known chips, the fastest one at twice that of
the slowest one."""
BY_PRECISION = ("gemm", "attention", "attention_backward")
KNOWN = tuple(dict.fromkeys((*PRECISIONS, *PEAKS)))


def folders(plugin: Subject) -> Items:
    """Return each chip that has costs, and its folder below `costs/`. Raises Skip if there is none."""
    shared, costs = {chip for chip, _ in shared_costs(plugin.package)}, plugin.package_folder / "costs"
    named = [(chip.name.casefold(), chip) for chip in plugin.own_chips()]
    found = [(f"costs/{name}/", plugin, chip) for name, chip in named if name in shared or (costs / name).is_dir()]
    return need(found, "the plugin has no costs of its chips")


def _rows(plugin: Subject, chip: Chip) -> list[Mapping[str, Any]]:
    """Return the lines of `kernels.jsonl` whose sizes and times are numbers above 0; another check reports errors."""
    file = plugin.package_folder / "costs" / chip.name.casefold() / "kernels.jsonl"
    rows = list[Mapping[str, Any]]()
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            if row["us"] > 0 and all(row[size] > 0 for size in SIZES[row["kernel"]]):
                rows.append(row)
    return rows


def _flops(row: Mapping[str, Any]) -> float:
    """Return the operations of a product or of attention. Causal attention counts half of the products."""
    if row["kernel"] == "gemm":
        return 2.0 * float(row["m"]) * float(row["n"]) * float(row["k"])
    scores: float = row["batch"] * row["heads"] * row["queries"] * (row["keys"] - 0.5 * row["queries"])
    return 4.0 * scores * float(row["head_dim"]) * (2.0 if row["kernel"] == "attention_backward" else 1.0)


def _least_seconds(chip: Chip, row: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the seconds that the peaks of a chip allow for a kernel (0 if unknown), and whether it is large."""
    kernel, peak = row["kernel"], chip.dense_flops_per_second.get(str(row.get("precision")))
    if kernel in ("copy", "elementwise", "host_copy"):
        rate = chip.host_bytes_per_second if kernel == "host_copy" else chip.memory_bandwidth_bytes_per_second
        return (float(row["bytes"]) / rate.value if rate else 0.0), float(row["bytes"]) >= LARGE_BYTES
    if kernel == "launch" or peak is None:
        return 0.0, False
    return _flops(row) / peak.value, _flops(row) >= LARGE_FLOPS


@check("give the device's time in microseconds, and all bytes that are read and written", each=folders)
def measured_kernels_are_possible(plugin: Subject, chip: Chip) -> Problems:
    rows = _rows(plugin, chip)
    for row in rows:
        shown = " ".join(f"{key} {value}" for key, value in row.items() if key != "us")
        yield from _row_problems(chip, row, f"kernels.jsonl: {shown}")
    for sizes, times in repeated(tuple(value for key, value in row.items() if key != "us") for row in rows):
        yield (times > 3, f"kernels.jsonl: {' '.join(map(str, sizes))} is listed {times} times",
               "keep the median of repeated measurements")  # fmt: skip
    large: dict[str, list[tuple[float, str]]] = {}
    for row in (row for row in rows if row["kernel"] == "gemm" and _flops(row) >= HUGE_FLOPS):
        rate = (_flops(row) / (row["us"] * 1e-6), f"{row['m']} x {row['n']} x {row['k']}")
        large.setdefault(str(row.get("precision")), []).append(rate)
    for precision, rates in large.items():
        shown = " and ".join(f"{rate / 1e12:.3g} TFLOP/s for {size}" for rate, size in (max(rates), min(rates)))
        yield (max(rates)[0] > SPREAD * min(rates)[0], f"kernels.jsonl: gemm in {precision} has {shown}",
               "correct its size or its time: large products of one precision run at about one rate")  # fmt: skip


def _row_problems(chip: Chip, row: Mapping[str, Any], where: str) -> Iterator[Case]:
    kernel, precision, seconds = row["kernel"], row.get("precision"), row["us"] * 1e-6
    us, groups = f"{where} has us = {row['us']:g}", f"{where}: heads, groups, keys and queries do not fit"
    least, large = _least_seconds(chip, row)
    is_fast, is_slow = least > FASTER * seconds, large and least and seconds > SLOWER * least
    yield is_fast, f"{us}, and the peaks of {chip.name} allow {least * 1e6:.3g}"
    yield is_slow and not is_fast, f"{us}, {seconds / (least or seconds):.0f} times what {chip.name} needs"
    if kernel.startswith("attention"):
        fix = "groups are those of keys and values and divide heads; keys are at least as many as queries"
        yield row["heads"] % row["groups"] or row["keys"] < row["queries"], groups, fix
    is_known = kernel not in BY_PRECISION or precision in KNOWN
    yield not is_known, f"{where}: precision = {precision!r}", f"name one of {', '.join(KNOWN)}"


@check("name kernels of kernels.jsonl, and give the overheads in microseconds", each=folders)
def corrections_are_of_measured_kernels(plugin: Subject, chip: Chip) -> Problems:
    file = plugin.package_folder / "costs" / chip.name.casefold() / "provenance.yaml"
    if not file.is_file() or not (rows := _rows(plugin, chip)):
        return
    found = read_provenance(file.read_text("utf-8"), f"costs/{file.parent.name}/{file.name}")
    kinds = {row["kernel"] for row in rows}
    yield found.schema != 1, f"{file.name}: schema = {found.schema}", "write schema: 1, the only one"
    for key in ("host_us", "slowed", "in_training"):
        for name in sorted({*getattr(found, key)} - kinds):
            yield f"{file.name}: {key} has {name}, and kernels.jsonl has {', '.join(sorted(kinds))}"
    shortest = min((row["us"] for row in rows if row["kernel"] != "launch"), default=float("inf"))
    text = f"{file.name}: event_us = {found.event_us:g}, but the shortest kernel took {shortest:g} us"
    yield found.event_us >= shortest, text
    for name, factor in found.in_training.items():
        text = f"{file.name}: in_training has {name}: {factor:g}, which is a factor of the time"
        yield not 0.5 <= factor <= 2.0, text


OF_UNITS = re.compile(r"\b(\d+) (?:compute units|multiprocessors)\b")
OF_PEAK = re.compile(r"\b(\d+)(?: to (\d+))? of (\d+)( TFLOP/s)")
OF_MEMORY = re.compile(r"\b(\d+)(?: to (\d+))? GB/s of ([\d.]+) (TB/s)")
"""Rates that kernels reached, of a peak, in the words of a source."""


@check("give shares of 1, seconds, and bytes per second", each=folders)
def curves_are_plausible(plugin: Subject, chip: Chip) -> Problems:
    for name in ("curve.yaml", "serving.yaml"):
        if found := cost_file(plugin.package, chip, name):
            curve, source = read_curve(*found), found[0]
            problems = (*outside(_figures_of(curve, chip), OF_CURVES), *_curve_problems(curve, source, chip))
            yield from wrong(problems, f"costs/{chip.name.casefold()}/{name}: ", CURVE)


def _figures_of(curve: Curve, chip: Chip) -> dict[str, float]:
    names = {bound.quantity for bound in OF_CURVES if not bound.per and not bound.quantity.endswith("shares")}
    figures = {name: float(getattr(curve, name)) for name in names}
    for part in ("gemm_shares", "attention_shares"):
        figures.update({f"{part}.{name}": share for name, share in getattr(curve, part).items()})
    for name in ("bf16", "fp16"):
        if curve.units > 1 and (peak := chip.dense_flops_per_second.get(name)):
            figures[f"dense_flops_per_second.{name}"] = peak.value
    if chip.host_bytes_per_second and curve.host_bytes_per_second != Curve().host_bytes_per_second:
        figures["host_bytes_per_second"] = curve.host_bytes_per_second
        figures["that of the chip"] = chip.host_bytes_per_second.value
    return figures


def _curve_problems(curve: Curve, source: str, chip: Chip) -> Iterator[str]:
    """Yield what a curve has and the words of its source, or of the chip's file, have otherwise."""
    words = " ".join([source, chip.notes, *(fact.source.detail for fact in chip.figures.values())])
    said = {int(number) for number in OF_UNITS.findall(words)}
    if said and not any(curve.units == n or ("dies" in words and curve.units % n == 0) for n in said):
        yield f"units = {curve.units:g}, and the chip's file or the source has {min(said)} of them"
    for key in curve.gemm_shares:
        if key not in KNOWN:
            yield f"gemm_shares has {key!r}, and the names are {', '.join(KNOWN)}"
        elif PEAKS.get(key, key) not in chip.dense_flops_per_second:
            yield f"gemm_shares has {key}, of which {chip.name} has no peak"
    for key, pattern in (("gemm_share", OF_PEAK), ("memory_share", OF_MEMORY)):
        for low, high, whole, unit in pattern.findall(source):
            peak, share = float(whole) * (1000.0 if unit == "TB/s" else 1.0), getattr(curve, key)
            if not 0.9 * float(low) / peak <= share <= 1.1 * float(high or low) / peak:
                yield f"{key} = {share:g}, but its source has {low} of {whole}"
