"""Checks of memory models, kernel times, topologies and collectives, and of their files."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np
from flagcore_vendorkit.chip_file import shared_costs

from flagcore.contracts import AttentionShape, CollectiveCosts, KernelCosts, MemoryModel, communicator_bytes
from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray
from flagcore.physics.collective_costs import topology_of
from flagcore.physics.collective_curves import KINDS, CollectiveTable, Curve
from flagcore.plugins import find_engine
from flagcore_testing import fakes
from flagcore_testing.examples import group_of, task_on
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, need

MIN_BYTES = 2**20
"""Minimum number of bytes. A smaller figure is probably in MiB or GiB."""
IDLE_SHARE, IDLE_BYTES = 0.25, 2**33
"""Maximum share of a device's memory, and maximum bytes, for context, libraries and collective buffers; known chips
take up to 3.9 GiB."""
CONTEXT_BYTES = 2.0**27
"""Minimum memory of a process's context, libraries and collective buffers; known chips take 0.5 to 3 GiB."""
RESERVED = 1.15
"""Maximum memory that an allocator reserves for tensors, relative to them; 1.0005 to 1.03 was measured."""


def idle_bytes(plugin: Subject) -> dict[str, float]:
    """Return the least memory in use on a device of each chip, in the transcripts of tools."""
    found: dict[str, float] = {}
    with suppress(Skip):
        for each in plugin.listings:
            for device, sample in fakes.samples(plugin, each):
                chip, used = plugin.loaded.find_chip(device.chip), sample.get("memory_used_bytes")
                if chip and used is not None:
                    found[chip.name] = min(found.get(chip.name, used), used)
    return found


def _models(plugin: Subject) -> list[tuple[Chip, MemoryModel]]:
    return plugin.each("flagcore_memory_model", lambda chip: plugin.loaded.memory_model(group_of(chip), "megatron"))


@check("count what an idle device shows in use, and a process's context, libraries and buffers, in bytes")
def contexts_are_above_idle_memory(plugin: Subject) -> Problems:
    idle = idle_bytes(plugin)
    for chip, model in _models(plugin):
        used = float(model.device_used_bytes(np.zeros(1))[0])
        memory = chip.memory_bytes.value if chip.memory_bytes else np.inf
        least = idle.get(chip.name, 0.0) + min(CONTEXT_BYTES, memory / 32)
        if 0 < used < least:
            shown = f"{least:.3g}: {idle.get(chip.name, 0.0):.3g} of an idle device in tests/smi and a context"
            yield f"{chip.name}: device_used_bytes(0) of hooks.py = {used:.3g} is below {shown}"


@check("return a memory model for each of your chips, or remove the hook")
def memory_models_are_given(plugin: Subject) -> Problems:
    plugin.implements("flagcore_memory_model")
    if plugin.failed("flagcore_memory_model"):
        return  # another check reports it
    for chip in plugin.own_chips():
        if (
            plugin.ask("flagcore_memory_model", {"group": group_of(chip), "engine": "megatron", "kind": "train"})
            is None
        ):
            yield f"flagcore_memory_model returns None for {chip.name}"


@check("add to the argument, or multiply by at least 1", each=_models)
def memory_use_grows_with_allocation(chip: Chip, model: MemoryModel) -> Problems:
    allocated = np.linspace(0, 2.0**37, 200)
    reserved = model.reserved_bytes(allocated)
    used = model.device_used_bytes(reserved)
    for method, argument, answer in (("reserved_bytes", allocated, reserved), ("device_used_bytes", reserved, used)):
        if not ((answer >= argument).all() and (np.diff(answer) >= 0).all()):
            yield f"{chip.name}: {method} of the memory model returns less than its argument, or falls as that grows"


@check("give bytes; context, libraries and collective buffers take hundreds of MiB to a few GiB", each=_models)
def memory_model_is_in_bytes(chip: Chip, model: MemoryModel) -> Problems:
    memory = chip.memory_bytes.value if chip.memory_bytes else None
    used, capacity = float(model.device_used_bytes(np.zeros(1))[0]), model.capacity_bytes()
    if memory and capacity is not None and capacity > memory:
        yield f"{chip.name}: capacity_bytes() is {capacity:g}, memory_bytes {memory:g}"
    most = min(IDLE_SHARE * (memory or 2**35), IDLE_BYTES)
    if used != 0 and not MIN_BYTES <= used <= most:
        yield f"{chip.name}: device_used_bytes(0) of hooks.py = {used:g}, which is not within {MIN_BYTES:g} to {most:g}"
    if not 0 <= model.workspace_bytes() <= 2**32:
        yield f"{chip.name}: workspace_bytes() = {model.workspace_bytes():g}"
    buffers = communicator_bytes(model)
    if buffers != 0 and not MIN_BYTES <= buffers <= 2**32:
        yield f"{chip.name}: communicator_bytes() = {buffers:g}"
    reserved = float(model.reserved_bytes(np.full(1, 2.0**35))[0]) / 2**35
    if reserved > RESERVED:
        text = f"{chip.name}: reserved_bytes of the memory model returns {reserved:g} times its argument"
        yield Problem(text, "give fragmentation as a share of the tensors, such as 0.02")


@check("use group.memory_bytes if it is set, else the chip's memory_bytes")
def memory_budget_is_respected(plugin: Subject) -> Problems:
    for chip, _ in _models(plugin):
        model = plugin.loaded.memory_model(replace(group_of(chip), memory_bytes=10**9), "megatron")
        capacity = model.capacity_bytes() if model else None
        if capacity is None or capacity > 10**9:
            yield f"{chip.name}: capacity_bytes() is {capacity} with a user's budget of 1e9"


@check("find the part of the memory model that shrinks as its argument grows")
def larger_micro_batches_need_more_memory(plugin: Subject) -> Problems:
    engine = find_engine("megatron")
    for task in map(task_on, plugin.own_chips()):
        costs = plugin.loaded.costs(task.cluster, "megatron")
        rows = [engine.columns(task, {"micro_batch_size": 2**power}) for power in range(4)]
        columns = {knob: np.concatenate([row[knob] for row in rows]) for knob in rows[0]}
        if not (np.diff(engine.predict(task, columns, costs).device_used_bytes) >= 0).all():
            yield f"{task.cluster.chips}: a larger micro_batch_size is predicted to need less memory"


SLOW_COPY = 0.2
"""Minimum share of the memory's or the host interface's rate that large copies reach; known chips reach half."""
ABOVE_PEAK = 1.05
"""Tolerance of a measured kernel above the peak: clocks and timers vary."""
FILES = {"curve.yaml", "kernels.jsonl", "provenance.yaml", "serving.yaml", "collectives.yaml"}


@check("check sizes and times (us) in costs/*/kernels.jsonl; return NaN for what is unknown", each=Subject.own_costs)
def kernel_times_grow_with_size(chip: Chip, costs: KernelCosts) -> Problems:
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
        if not ((known_times > 0).all() and (np.diff(known_times) >= 0).all()):
            yield f"{chip.name}: {method} is not above 0, or falls as the sizes grow"


@check("give seconds for launches (8.0e-6) and a factor for runs (1 to 3), or NaN if unknown", each=Subject.own_costs)
def kernel_constants_are_plausible(chip: Chip, costs: KernelCosts) -> Problems:
    for method, value, low, high in (
        ("launch_seconds", costs.launch_seconds(), 1e-7, 1e-3),
        ("run_slowdown", costs.run_slowdown(), 1.0, 3.0),
    ):
        if not (np.isnan(value) or low <= value <= high):
            yield f"{chip.name}: {method}() = {value:g}"


@check(each=Subject.own_costs)
def kernels_do_not_exceed_peaks(chip: Chip, costs: KernelCosts) -> Problems:
    side, large = np.full(4, 8192.0), _powers_of_two(30, 34)
    for precision, peak in chip.dense_flops_per_second.items():
        rate = np.nanmax([0.0, *(2.0 * side**3 / costs.gemm_seconds(side, side, side, precision))])
        if rate > ABOVE_PEAK * peak.value:
            yield Problem(
                f"{chip.name}: a product in {precision} has {rate:g} flops/s, its peak {peak.value:g}",
                "check the times in kernels.jsonl, the shares in curve.yaml (at most 1) and the peak",
            )
    bandwidth = chip.memory_bandwidth_bytes_per_second
    if bandwidth and np.nanmax([0.0, *(large / costs.memory_seconds(large))]) > ABOVE_PEAK * bandwidth.value:
        yield Problem(
            f"{chip.name}: memory_seconds is faster than memory_bandwidth_bytes_per_second",
            "count bytes read and written; memory_share in curve.yaml is at most 1",
        )


@check("give shares of 1, and host_bytes_per_second in bytes, in curve.yaml", each=Subject.own_costs)
def copies_are_not_too_slow(chip: Chip, costs: KernelCosts) -> Problems:
    size, memory, host = np.full(1, 2.0**32), chip.memory_bandwidth_bytes_per_second, chip.host_bytes_per_second
    copied, to_host = (float(size[0] / each[0]) for each in (costs.memory_seconds(size), costs.host_copy_seconds(size)))
    if memory and copied < SLOW_COPY * memory.value:
        yield f"{chip.name}: memory_seconds reaches {copied:.3g} of {memory.value:g} bytes per second"
    if to_host < (SLOW_COPY * host.value if host else 1e8):
        yield f"{chip.name}: host_copy_seconds reaches {to_host:.3g} bytes per second"


@check()
def shipped_costs_are_used(plugin: Subject) -> Problems:
    folders, shared = dict(_folders(plugin)), shared_costs(plugin.package)
    if plugin.failed("flagcore_kernel_costs", "flagcore_collective_costs"):
        return  # another check reports it
    for chip in plugin.own_chips():
        folder = chip.name.casefold()
        files = folders.get(folder, set()) | {file for file in FILES if (folder, file) in shared}
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
    for name, file in shared_costs(plugin.package):
        if name not in names:
            yield Problem(f"costs/same_as.yaml: {file} names {name}, and no chip has this name", "correct the name")
        if (plugin.package_folder / "costs" / name / file).is_file():
            yield Problem(f"costs/{name}/{file} is not read", "remove it, or the chip from costs/same_as.yaml")


def _folders(plugin: Subject) -> Iterable[tuple[str, set[str]]]:
    """Return the folders below `costs/` with the names of their files. Raises Skip if there are none."""
    folder = plugin.package_folder / "costs"
    need(folder.is_dir(), "the plugin has no folder costs")
    return [(each.name, {file.name for file in each.iterdir()}) for each in sorted(folder.iterdir()) if each.is_dir()]


@check("add it with how, software and date of the measurement", each=_folders)
def measured_kernels_have_provenance(name: str, files: set[str]) -> Problems:
    if "kernels.jsonl" in files and "provenance.yaml" not in files:
        yield f"costs/{name}/provenance.yaml is missing next to kernels.jsonl"


def _powers_of_two(first: int, end: int) -> FloatArray:
    return np.exp2(np.arange(first, end)).astype(np.float64)


PAYLOADS = np.exp2(np.arange(10, 30)).astype(np.float64)
ONES = np.ones(20, dtype=np.int64)
MEASURED = 1.1
"""Tolerance of a message above the memory bandwidth."""
MINIMUM_SHARE = 0.5
"""Minimum share of the best bandwidth for the largest message; 0.58 was measured with copies through the host."""
OVER_LINK = 1.25
"""Tolerance of a measured collective above the rate of its link."""


@check("give what one device sends over each level; nic_bytes_per_second is its share in bytes")
def outer_levels_are_not_faster(plugin: Subject) -> Problems:
    for group in plugin.groups():
        topology = plugin.loaded.topology(group)
        if group.chip.link is None and topology is None:
            continue
        inner, *others = (topology or topology_of(group)).levels
        for outer in others:  # a level between may be slower: traffic to another node need not cross a host's bridge
            if outer.bytes_per_second > 1.001 * inner.bytes_per_second:
                yield (
                    f"{group.chip.name}, {group.nodes} x {group.devices_per_node}: level {outer.name} has "
                    f"{outer.bytes_per_second:g} B/s, {inner.name} inside it {inner.bytes_per_second:g}"
                )
            elif outer.devices <= group.devices_per_node and outer.bytes_per_second > 0.999 * inner.bytes_per_second:
                text = f"{group.chip.name}: level {outer.name} has the rate of {inner.name} inside it"
                yield Problem(text, "give one device's share of what connects the groups, or leave out the level")


@check("devices_per_node counts devices, not cards; or let flagcore_topology answer for whole nodes")
def topologies_are_of_whole_nodes(plugin: Subject) -> Problems:
    plugin.implements("flagcore_topology")
    for chip in plugin.own_chips():
        once, twice = (NodeGroup(chip=chip, nodes=1, devices_per_node=by * chip.devices_per_node) for by in (1, 2))
        if not plugin.loaded.topology(once) and plugin.loaded.topology(twice):
            shown = f"devices_per_node = {chip.devices_per_node}, and it answers for twice as many"
            yield f"flagcore_topology has no levels of {chip.name} with its own {shown}"


SLOWER_THAN_LINK = 0.45
"""Minimum rate of the innermost level, relative to the link of the chip."""


@check("give the innermost level the rate of link.bytes_per_second, or restrict the topology to the chips it is of")
def inner_levels_have_the_rate_of_the_link(plugin: Subject) -> Problems:
    plugin.implements("flagcore_topology")
    for chip in plugin.own_chips():
        topology = plugin.loaded.topology(NodeGroup(chip=chip, nodes=1, devices_per_node=chip.devices_per_node))
        rate = topology.levels[0].bytes_per_second if topology else 0.0
        if topology and chip.link and rate < SLOWER_THAN_LINK * chip.link.bytes_per_second.value:
            link = chip.link.bytes_per_second.value
            yield f"flagcore_topology: the innermost level of {chip.name} has {rate:g} B/s, and its link {link:g}"
        size = min(chip.link.domain_size or chip.devices_per_node, chip.devices_per_node) if chip.link else 0
        if topology and size and size not in [level.devices for level in topology.levels]:
            text = f"the innermost level of {chip.name} has {topology.levels[0].devices} devices"
            yield Problem(f"flagcore_topology: {text}, and its link joins {size}", "correct it, or link.domain_size")


@check("give seconds, and shares of 1; `efficiency` is the share of the rate that large messages reach")
def levels_are_plausible(plugin: Subject) -> Problems:
    for group in plugin.groups():
        topology = plugin.loaded.topology(group)
        for level in topology.levels if topology else ():
            for name, low, high in (("latency_seconds", 1e-8, 1e-2), ("efficiency", 0.05, 1.0)):
                if not low <= (value := getattr(level, name)) <= high:
                    yield f"flagcore_topology: {name} = {value:g} of the level {level.name} of {group.chip.name}"


@check("give each level its own name; measured curves refer to it")
def level_names_are_unique(plugin: Subject) -> Problems:
    for group in plugin.groups():
        topology = plugin.loaded.topology(group)
        names = [level.name for level in topology.levels] if topology else []
        if len(set(names)) != len(names) or not all(names):
            yield f"flagcore_topology: the levels of {group.chip.name} are named {', '.join(names)}"


USER_RATE = 1.25e9
"""The rate of a network in bytes per second, as a user sets it. It is far below any default."""


@check("take the rate of the network from group.chip.nic_bytes_per_second, which has the user's value")
def topology_uses_the_users_network(plugin: Subject) -> Problems:
    plugin.implements("flagcore_topology")
    for chip in plugin.own_chips():
        with_rate = with_network(chip, USER_RATE)
        found = plugin.loaded.topology(NodeGroup(chip=with_rate, nodes=2, devices_per_node=chip.devices_per_node))
        if found and found.levels[-1].bytes_per_second > 1.01 * USER_RATE:
            rate = found.levels[-1].bytes_per_second
            yield f"flagcore_topology: {chip.name} has {rate:g} B/s between nodes, the user stated {USER_RATE:g}"


LARGE = 2.0**16
"""Minimum size in bytes of the largest payload of a curve. Smaller ones are probably in KiB or MiB."""
SLOW_SHARE = 0.03
"""Minimum share of the rate of its link that a curve reaches; 0.038 is the smallest of a known curve."""


def _costs(plugin: Subject) -> list[tuple[Chip, CollectiveCosts]]:
    return plugin.each(
        "flagcore_collective_costs", lambda chip: plugin.loaded.collective_costs(group_of(chip), "megatron")
    )


def _curves(plugin: Subject) -> list[tuple[Chip, CollectiveTable, Curve, float]]:
    """Return each measured curve with its highest rate in bytes per second. Raises Skip if there are no usable
    curves."""
    _costs(plugin)

    def table(chip: Chip) -> CollectiveTable | None:
        answer = plugin.ask("flagcore_collective_costs", {"group": group_of(chip), "engine": "megatron"})
        return answer if isinstance(answer, CollectiveTable) else None

    return [
        (chip, table, curve, max(_rates(curve)))
        for chip, table in plugin.each("flagcore_collective_costs", table)
        for curve in table.curves
    ]


def _rates(curve: Curve) -> list[float]:
    return [size / time for size, time in zip(curve.payload_bytes, curve.seconds, strict=True)]


@check("check the times (in seconds) in costs/*/collectives.yaml", each=_costs)
def collective_times_grow_with_payload(chip: Chip, costs: CollectiveCosts) -> Problems:
    for kind in KINDS:
        if not (np.diff(costs.seconds(kind, PAYLOADS, 2 * ONES, ONES)) >= 0).all():
            yield f"{chip.name}: a larger {kind} of two devices is predicted to take less time"


@check(
    "give seconds, the payload of the whole tensor in bytes, and the name of a level of flagcore_topology", each=_curves
)
def measured_curves_are_in_base_units(chip: Chip, table: CollectiveTable, curve: Curve, best: float) -> Problems:
    where, largest = f"{chip.name}: the curve of {curve.kind} of {curve.ranks}", curve.payload_bytes[-1]
    link = chip.link.bytes_per_second.value if chip.link else 0.0
    if largest < LARGE:
        yield f"{where} ends at payload_bytes = {largest:g}"
    elif best < SLOW_SHARE * link and not table.level:
        yield f"{where} reaches {best:.3g} bytes per second, and link.bytes_per_second = {link:.3g}"


@check("name a level of flagcore_topology, or leave `level` out for the innermost one")
def measured_levels_exist(plugin: Subject) -> Problems:
    for chip, table in {chip.name: (chip, table) for chip, table, _, _ in _curves(plugin)}.values():
        groups = [replace(group_of(chip), nodes=nodes) for nodes in (1, 2)]
        names = {level.name for each in groups for level in (plugin.loaded.topology(each) or topology_of(each)).levels}
        if table.level and table.level not in names:
            yield f"costs/{chip.name.casefold()}/collectives.yaml: level = {table.level!r} is none of {sorted(names)}"


@check("check its last seconds and payload_bytes; leave out a disturbed point", each=_curves)
def measured_bandwidth_does_not_fall(chip: Chip, table: CollectiveTable, curve: Curve, best: float) -> Problems:
    last_rate = _rates(curve)[-1]
    if last_rate < MINIMUM_SHARE * best:
        yield (
            f"{chip.name}: the curve of {curve.kind} of {curve.ranks} falls from {best:.3g} to {last_rate:.3g} bytes a "
            "second at its last point, from which larger payloads are extrapolated"
        )


@check("give seconds and the payload of the whole tensor in bytes, or correct the rate of the link", each=_curves)
def measured_curves_do_not_exceed_the_link(chip: Chip, table: CollectiveTable, curve: Curve, best: float) -> Problems:
    rate = best * ((curve.ranks - 1) / curve.ranks if curve.kind != "send" else 1.0)
    rate *= 2.0 if curve.kind == "all_reduce" and chip.link and not chip.link.switch_reduces else 1.0
    if chip.link and not table.level and rate > OVER_LINK * chip.link.bytes_per_second.value:
        yield (
            f"{chip.name}: in the curve of {curve.kind} of {curve.ranks} a device sends {rate:.3g} bytes per second, "
            f"above link.bytes_per_second = {chip.link.bytes_per_second.value:.3g}"
        )


@check(each=_costs)
def collective_costs_are_plausible(chip: Chip, costs: CollectiveCosts) -> Problems:
    share, memory = costs.compute_share(2 * ONES, ONES), chip.memory_bandwidth_bytes_per_second
    if (costs.seconds("all_reduce", PAYLOADS, ONES, ONES) != 0).any() or (costs.compute_share(ONES, ONES) != 0).any():
        yield Problem(f"{chip.name}: a collective of one device takes time, or compute", "return 0 where ranks is 1")
    if not ((share >= 0) & (share < 1)).all():
        yield Problem(f"{chip.name}: compute_share is not 0 to 1", "give a share of the device's compute")
    seconds = costs.seconds("send", PAYLOADS[-1:], 2 * ONES[:1], ONES[:1])
    if memory is not None and PAYLOADS[-1] / seconds[0] > MEASURED * memory.value:
        yield Problem(
            f"{chip.name}: a message of {PAYLOADS[-1]:g} bytes takes {seconds[0]:g} s",
            "give seconds and the payload of the whole tensor in bytes in costs/*/collectives.yaml",
        )
