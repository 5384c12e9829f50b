"""Checks of files of measurements, row by row: kernels, curves, collectives and their provenance."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from flagcore_vendorkit.chip_file import (
    PRECISIONS,
    collective_table,
    cost_file,
    read_curve,
    read_provenance,
    shared_costs,
)
from flagcore_vendorkit.kernel_table import SIZES

from flagcore.domain.chip import Chip
from flagcore.errors import SpecError
from flagcore.physics.collective_curves import CollectiveTable
from flagcore.physics.roofline import Curve
from flagcore_testing.checks.published import PEAKS
from flagcore_testing.kit import Problem, Problems, Subject, check, need

FASTER, SLOWER = 1.1, 100.0
"""A measured kernel may be this much faster than the peaks allow, and a large one this much slower; known ones take up
to 30 times as long."""
LARGE_FLOPS, LARGE_BYTES = 1e11, 1e9
SCHEMA = 1
"""The form of provenance.yaml."""
BY_PRECISION = ("gemm", "attention", "attention_backward")
Folder = tuple[Subject, Chip, str]


def _folders(plugin: Subject) -> list[Folder]:
    """Return each chip that has costs, and its folder below `costs/`. Raises Skip if there is none."""
    shared = {chip for chip, _ in shared_costs(plugin.package)}
    found = [(plugin, chip, f"costs/{chip.name.casefold()}") for chip in plugin.own_chips()]
    found = [each for each in found if each[1].name.casefold() in shared or (plugin.package_folder / each[2]).is_dir()]
    return need(found, "the plugin has no costs of its chips")


def _rows(plugin: Subject, folder: str) -> list[Mapping[str, Any]]:
    """Return the lines of `kernels.jsonl` whose sizes and times are numbers above 0; another check reports errors."""
    file = plugin.package_folder / folder / "kernels.jsonl"
    rows = list[Mapping[str, Any]]()
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            if row["us"] > 0 and all(row[size] > 0 for size in SIZES[row["kernel"]]):
                rows.append(row)
    return rows


def _least_seconds(chip: Chip, row: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the seconds that the peaks of a chip allow for a kernel, and whether the kernel is large.

    0 if a peak is unknown. Causal attention counts half of the products of queries and keys.
    """
    kernel, peak = row["kernel"], chip.dense_flops_per_second.get(str(row.get("precision")))
    if kernel in ("copy", "elementwise", "host_copy"):
        rate = chip.host_bytes_per_second if kernel == "host_copy" else chip.memory_bandwidth_bytes_per_second
        return (float(row["bytes"]) / rate.value if rate else 0.0), float(row["bytes"]) >= LARGE_BYTES
    if kernel == "launch" or peak is None:
        return 0.0, False
    if kernel == "gemm":
        flops = 2.0 * row["m"] * row["n"] * row["k"]
    else:
        scores = row["batch"] * row["heads"] * row["queries"] * (row["keys"] - 0.5 * row["queries"])
        flops = 4.0 * scores * row["head_dim"] * (2.0 if kernel == "attention_backward" else 1.0)
    return flops / peak.value, flops >= LARGE_FLOPS


@check("give the device's time in microseconds, and all bytes that are read and written", each=_folders)
def measured_kernels_are_possible(plugin: Subject, chip: Chip, folder: str) -> Problems:
    rows = _rows(plugin, folder)
    for row in rows:
        shown = " ".join(f"{key} {value}" for key, value in row.items() if key != "us")
        least, large = _least_seconds(chip, row)
        seconds = row["us"] * 1e-6
        where = f"{folder}/kernels.jsonl: {shown} has us = {row['us']:g}"
        if least > FASTER * seconds:
            yield f"{where}, and the peaks of {chip.name} allow {least * 1e6:.3g}"
        elif large and least and seconds > SLOWER * least:
            yield f"{where}, {seconds / least:.0f} times what {chip.name} needs"
        if row["kernel"].startswith("attention") and (row["heads"] % row["groups"] or row["keys"] < row["queries"]):
            fix = "groups are those of keys and values and divide heads; keys are at least as many as queries"
            yield Problem(f"{where}: heads, groups, keys and queries do not fit", fix)
        if row["kernel"] in BY_PRECISION and row.get("precision") not in KNOWN:
            yield Problem(f"{where}: precision = {row.get('precision')!r}", f"name one of {', '.join(KNOWN)}")
    same = Counter(tuple(value for key, value in row.items() if key != "us") for row in rows)
    for sizes, times in same.items():
        if times > 3:
            fix = "keep the median of repeated measurements"
            yield Problem(f"{folder}/kernels.jsonl: {' '.join(map(str, sizes))} is listed {times} times", fix)


HUGE_FLOPS, SPREAD = 1e12, 3.0
"""Products of at least so many operations run at about the same rate: on known chips, the fastest one at twice that of
the slowest one."""


@check("correct its size or its time: large products of one precision run at about one rate", each=_folders)
def large_products_have_one_rate(plugin: Subject, chip: Chip, folder: str) -> Problems:
    rates: dict[str, dict[str, float]] = {}
    for row in (each for each in _rows(plugin, folder) if each["kernel"] == "gemm"):
        flops, size = 2.0 * row["m"] * row["n"] * row["k"], f"{row['m']} x {row['n']} x {row['k']}"
        if flops >= HUGE_FLOPS:
            rates.setdefault(str(row.get("precision")), {})[size] = flops / (row["us"] * 1e-6)
    for precision, by_size in rates.items():
        slowest, fastest = min(by_size, key=by_size.__getitem__), max(by_size, key=by_size.__getitem__)
        if by_size[fastest] > SPREAD * by_size[slowest]:
            shown = " and ".join(f"{by_size[size] / 1e12:.3g} TFLOP/s for {size}" for size in (fastest, slowest))
            yield f"{folder}/kernels.jsonl: gemm in {precision} has {shown}"


@check("name kernels of kernels.jsonl, and give the overheads in microseconds", each=_folders)
def corrections_are_of_measured_kernels(plugin: Subject, chip: Chip, folder: str) -> Problems:
    file, where = plugin.package_folder / folder / "provenance.yaml", f"{folder}/provenance.yaml"
    if not file.is_file() or not (rows := _rows(plugin, folder)):
        return
    found = read_provenance(file.read_text("utf-8"), where)
    kinds = {row["kernel"] for row in rows}
    if found.schema != SCHEMA:
        yield Problem(f"{where}: schema = {found.schema}", f"write schema: {SCHEMA}, the only one")
    for key in ("host_us", "slowed", "in_training"):
        for name in sorted({*getattr(found, key)} - kinds):
            yield f"{where}: {key} has {name}, and kernels.jsonl has {', '.join(sorted(kinds))}"
    shortest = min((row["us"] for row in rows if row["kernel"] != "launch"), default=float("inf"))
    if found.event_us >= shortest:
        yield f"{where}: event_us = {found.event_us:g}, but the shortest kernel took {shortest:g} us"
    for name, factor in found.in_training.items():
        if not 0.5 <= factor <= 2.0:
            yield f"{where}: in_training has {name}: {factor:g}, which is a factor of the time"


KNOWN = tuple(dict.fromkeys((*PRECISIONS, *PEAKS)))
SHARES = ("gemm_share", "memory_share", "elementwise_share", "attention_share", "attention_backward_share")
TINY_SHARE, ABOVE_PEAK = 0.1, 1.05
"""Range of a share of a peak in a curve; 0.18 is the smallest of a known chip, and clocks and timers vary."""
PER_UNIT = (4e11, 4e13)
"""Range of the dense 16-bit peak of one compute unit: the clock, of about 1 to 2.5 GHz, times operations in a clock."""
PLAUSIBLE = {
    "units": (1, 2000),
    "tile": (1, 1024),
    "kernel_seconds": (0.0, 1e-4),
    "launch_seconds": (0.0, 1e-3),
    "half_head": (0, 512),
    "attention_tail": (0, 2),
}


@check("give shares of 1, seconds, and bytes per second", each=_folders)
def curves_are_plausible(plugin: Subject, chip: Chip, folder: str) -> Problems:
    for name in ("curve.yaml", "serving.yaml"):
        if found := cost_file(plugin.package, chip, name):
            problems = _curve_problems(read_curve(*found), found[0], chip)
            yield from (f"{folder}/{name}: {problem}" for problem in problems)


OF_UNITS = re.compile(r"\b(\d+) (?:compute units|multiprocessors)\b")
OF_PEAK = re.compile(r"\b(\d+)(?: to (\d+))? of (\d+)( TFLOP/s)")
OF_MEMORY = re.compile(r"\b(\d+)(?: to (\d+))? GB/s of ([\d.]+) (TB/s)")
"""Rates that kernels reached, of a peak, in the words of a source."""


def _curve_problems(curve: Curve, source: str, chip: Chip) -> Iterator[str]:
    shares: dict[str, float] = {name: getattr(curve, name) for name in SHARES}
    for part in ("gemm_shares", "attention_shares"):
        shares.update({f"{part}.{name}": share for name, share in getattr(curve, part).items()})
    for key, value in shares.items():
        if not TINY_SHARE <= value <= ABOVE_PEAK:
            yield f"{key} = {value:g}"
    words = " ".join([source, chip.notes, *(fact.source.detail for fact in chip.figures.values())])
    said = {int(number) for number in OF_UNITS.findall(words)}
    if said and not any(curve.units == n or ("dies" in words and curve.units % n == 0) for n in said):
        yield f"units = {curve.units:g}, and the chip's file or the source has {min(said)} of them"
    for key in curve.gemm_shares:
        if key not in KNOWN:
            yield f"gemm_shares has {key!r}, and the names are {', '.join(KNOWN)}"
        elif PEAKS.get(key, key) not in chip.dense_flops_per_second:
            yield f"gemm_shares has {key}, of which {chip.name} has no peak"
    for key, (lowest, highest) in PLAUSIBLE.items():
        if not lowest <= getattr(curve, key) <= highest:
            yield f"{key} = {getattr(curve, key):g} is not in {lowest:g} to {highest:g}"
    for name in ("bf16", "fp16"):
        dense = chip.dense_flops_per_second.get(name)
        if dense and curve.units > 1 and not PER_UNIT[0] <= dense.value / curve.units <= PER_UNIT[1]:
            each = f"{dense.value / curve.units / 1e12:.3g} TFLOP/s in {name} for each"
            yield f"units = {curve.units:g} have {each}; units of known chips have 0.4 to 40"
    for key, pattern in (("gemm_share", OF_PEAK), ("memory_share", OF_MEMORY)):
        for low, high, whole, unit in pattern.findall(source):
            peak = float(whole) * (1000.0 if unit == "TB/s" else 1.0)
            least, most = float(low) / peak, float(high or low) / peak
            if not 0.9 * least <= getattr(curve, key) <= 1.1 * most:
                yield f"{key} = {getattr(curve, key):g}, but its source has {low} of {whole}"
    rate, host = curve.host_bytes_per_second, chip.host_bytes_per_second
    if rate != Curve().host_bytes_per_second and host and rate > ABOVE_PEAK * host.value:
        yield f"host_bytes_per_second = {rate:g} is above that of {chip.name}, {host.value:g}"


SHORTEST = 1e-6
"""Seconds that a collective takes at least."""


PARTS, PART_OF = ("all_gather", "reduce_scatter"), (0.2, 1.5)
"""Halves of an all-reduce, and the range of their time relative to it: 0.45 to 0.55 is known."""


@check("correct the slower or the faster of them: an all-reduce is a reduce-scatter and an all-gather", each=_folders)
def collectives_of_one_group_agree(plugin: Subject, chip: Chip, folder: str) -> Problems:
    table = _table(plugin, chip)
    times = {
        (curve.kind, curve.ranks, payload): seconds
        for curve in (table.curves if table else ())
        for payload, seconds in zip(curve.payload_bytes, curve.seconds, strict=False)
    }
    for (kind, ranks, payload), seconds in times.items():
        whole = times.get(("all_reduce", ranks, payload))
        if kind in PARTS and whole and not PART_OF[0] <= seconds / whole <= PART_OF[1]:
            text = f"{folder}/collectives.yaml: {kind} of {payload:g} bytes with ranks = {ranks} takes {seconds:g} s"
            yield f"{text}, and the all_reduce {whole:g}"


def _table(plugin: Subject, chip: Chip) -> CollectiveTable | None:
    """Return the measured collectives of a chip, or None if there are none, or if another check reports an error."""
    with suppress(SpecError):
        return collective_table(plugin.package, chip)
    return None


@check("give the number of devices that take part, and seconds", each=_folders)
def measured_groups_exist(plugin: Subject, chip: Chip, folder: str) -> Problems:
    table = _table(plugin, chip)
    if table is None or (chip.name.casefold(), "collectives.yaml") in shared_costs(plugin.package):
        return
    where, size = f"{folder}/collectives.yaml", chip.link.domain_size if chip.link else None
    most = max(chip.devices_per_node, size or 0)
    for curve in table.curves:
        if curve.ranks > most and not table.level:
            yield f"{where}: {curve.kind} with ranks = {curve.ranks}, but {chip.name} has devices_per_node = {most}"
        if size and size < curve.ranks <= most and not table.level:
            text = f"{where}: {curve.kind} with ranks = {curve.ranks} spans links of {size} devices, and has no level"
            yield Problem(text, "write level: the name of the level of flagcore_topology on which it was measured")
        if min(curve.seconds) < SHORTEST:
            yield f"{where}: {curve.kind} with ranks = {curve.ranks} has seconds = {min(curve.seconds):g}"
