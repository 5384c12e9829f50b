"""discover: find the hardware of the task and the cost models that plugins provide for it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from flagcore.contracts import Costs, HostSetup, Platform, Plugins
from flagcore.domain.chip import Chip, Device, Support, unknown_chip_hint, with_network
from flagcore.domain.cluster import Cluster, Level, NodeGroup
from flagcore.domain.engine import EngineSupport, ForcedSetting, PreferredSetting, TaskAdvice, has_common_library
from flagcore.domain.launch import Launch
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import AUTO, ClusterSpec, Spec, Task, TrainSpec
from flagcore.errors import NoDevice
from flagcore.i18n import N_, _
from flagcore.physics.collectives.between import between_groups
from flagcore.physics.collectives.costs import Collectives
from flagcore.physics.collectives.topology import topology_of
from flagcore.physics.cost_stack import ROOFLINE, KernelCostStack, with_slowdown
from flagcore.physics.device_memory import PlainMemory
from flagcore.physics.kernels.roofline import Roofline
from flagcore.vendorkit.cgroup import cores

UNMEASURED_RUN_SLOWDOWN = 1.15
"""The run slowdown of the core's roofline for a chip without measurements: the median over published sources of the
median ratio of measured to predicted times (0.94 to 1.7), without fitted curves."""


def discover(spec: Spec, plugins: Plugins, engine_version: str | None = None) -> Platform:
    """Return the platform of `spec`, with the named chips or the best chip on this machine.

    `engine_version` is the release of the engine, None if unknown. With several chips, only knobs of all of them are
    used. Raises NoDevice if no device is found, if a chip is unknown, or if the engine cannot run on it.
    """
    engine, devices = spec.work.engine, plugins.devices()
    vendor_devices = _of_vendor(devices, spec, plugins)
    groups, supports = [], []
    for index, requested in enumerate(spec.cluster.groups or (spec.cluster,)):
        key = f"cluster.groups[{index}].chip" if spec.cluster.groups else "cluster.chip"
        is_auto = requested.chip == AUTO
        chip = best_chip(vendor_devices, plugins, engine) if is_auto else _find_chip(requested.chip, key, plugins)
        support = _require_support(chip, plugins, engine, engine_version)
        chip = with_network(chip, requested.nic_bytes_per_second, requested.nic_latency_seconds)
        groups.append(_group(requested, chip, devices, support))
        supports.append(support)
    cluster = Cluster(groups=tuple(groups))
    support = _join_supports(supports, [group.chip.name for group in groups])
    if isinstance(spec.work, TrainSpec) and not has_common_library(groups, supports):
        support = replace(support, notes=(*support.notes, _through_hosts(cluster)))
    requested_task = Task(spec=_with_settings(spec, support.forced), cluster=cluster)
    task, support = _advised(requested_task, support, plugins.check_task(requested_task, engine_version))
    chips = [group.chip for group in groups]
    local_devices = [device for device in devices if any(chip.has_name(device.chip) for chip in chips)]
    telemetry = [(device, plugins.telemetry(device)) for device in local_devices]
    readers = [(device, reader) for device, reader in telemetry if reader is not None]
    environments = [plugins.environment(chip, engine, engine_version, task) for chip in chips]
    patterns_of_chips = [plugins.failure_patterns(chip, engine, engine_version) for chip in chips]
    environment = {name: value for given in reversed(environments) for name, value in given.items()}
    setups = [
        HostSetup(
            kind=requested.kind,
            nodes=group.nodes,
            devices=group.devices_per_node,
            support=own,
            environment=_of_shell(variables),
            envs=requested.envs,
            prepare_launch=partial(_prepared, plugins, replace(task, cluster=Cluster(groups=(group,)))),
        )
        for requested, group, own, variables in zip(spec.cluster.groups, groups, supports, environments, strict=False)
    ]
    first, *others = (plugins.knobs(chip, engine, engine_version) for chip in chips)
    return Platform(
        task=task,
        costs=costs(task.cluster, plugins, engine),
        support=support,
        environment=_of_shell(environment),
        pruning_rules=plugins.pruning_rules(task),
        failure_patterns=tuple(pattern for patterns in patterns_of_chips for pattern in patterns),
        telemetry=tuple(reader for _, reader in readers),
        read_devices=tuple(device for device, _ in readers),
        prepare_launch=lambda launch: plugins.prepare_launch(launch, task),
        knobs=tuple(knob for knob in first if all(knob in each for each in others)),
        engine_version=engine_version,
        conflicts=tuple(_conflicts(environment, spec)),
        setups=tuple(setups),
    )


def _of_shell(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables of plugins, with the values of this shell for those that it sets."""
    return {name: os.environ.get(name, value) for name, value in environment.items()}


def _prepared(plugins: Plugins, task: Task, launch: Launch) -> Launch:
    return plugins.prepare_launch(launch, task)


def costs(cluster: Cluster, plugins: Plugins, engine: str) -> Costs:
    """Return the cost models for `cluster`, from plugins or else from the core."""
    supports = [plugins.engine_support(group.chip, engine) for group in cluster.groups]
    costs_of_groups = [_costs_of(*each, plugins, engine) for each in zip(cluster.groups, supports, strict=True)]
    first, *others = costs_of_groups
    if not others:
        return first
    starts = accumulate(group.devices for group in cluster.groups)
    networks = [_network(group, plugins) for group in cluster.groups]
    is_direct = has_common_library(cluster.groups, supports)
    between = between_groups(networks, () if is_direct else [each.kernels for each in costs_of_groups])
    return replace(first, further=dict(zip(starts, others, strict=False)), between=between)


def _network(group: NodeGroup, plugins: Plugins) -> Level:
    """Return the network level of a node group. A group within one link domain is extended beyond it."""
    linked = (group.chip.link and group.chip.link.domain_size) or group.devices_per_node
    extended = replace(group, nodes=max(group.nodes, linked // group.devices_per_node + 1))
    return (plugins.topology(extended) or topology_of(extended)).levels[-1]


def _costs_of(group: NodeGroup, support: EngineSupport, plugins: Plugins, engine: str) -> Costs:
    kernels = plugins.kernel_costs(group.chip, engine)
    synchronous = support.shared_devices
    run_slowdown = UNMEASURED_RUN_SLOWDOWN if kernels is None else kernels.run_slowdown()
    used, times = kernels or KernelCostStack(((ROOFLINE, Roofline(chip=group.chip)),)), 1.0 / group.speed
    return Costs(
        memory=plugins.memory_model(group, engine) or PlainMemory.of(group),
        kernels=used if group.speed == 1.0 else with_slowdown(used, times, launches=times if synchronous else 1.0),
        collectives=plugins.collective_costs(group, engine)
        or Collectives(topology=plugins.topology(group) or topology_of(group)),
        guessed=kernels is None,
        synchronous=synchronous,
        run_slowdown=1.0 if synchronous else run_slowdown,
    )


def parallel_probe_ranks(platform: Platform, devices: tuple[Device, ...]) -> int:
    """Return the number of ranks that can be probed in parallel on a host, one per device.

    It is 1 if devices share memory, as on a CPU, or if an environment variable selects the visible devices.
    """
    first = [each for each in devices if each.host == devices[0].host]
    usable = [each for each in first if platform.task.cluster.groups[0].chip.has_name(each.chip)]
    is_selected = any(name.endswith("_VISIBLE_DEVICES") for name in (*platform.environment, *platform.task.spec.envs))
    return 1 if platform.support.shared_devices or is_selected else max(1, len(usable))


def require_devices(platform: Platform, devices: tuple[Device, ...], *, needed: int | None = None) -> None:
    """Raise NoDevice unless this machine has the devices that trials need.

    `needed` is the number of devices, by default those of a node.
    """
    cluster, support, work = platform.task.cluster, platform.support, platform.task.spec.work
    section = "serve" if isinstance(work, ServeSpec) else "train"
    if work.command is None and (support.device_type is None or support.distributed_backend is None):
        text = N_("no installed plugin defines how {engine} runs on {chip}; give a {where}.command")
        raise NoDevice(_(text, engine=work.engine, chip=cluster.chips, where=section))
    if platform.task.spec.on_each_host and not devices:
        return  # the devices of the hosts are unknown
    if platform.setups and platform.task.spec.on_each_host:
        for group, host in zip(cluster.groups, _first_hosts(platform), strict=True):
            of_host = [device for device in devices if device.host == host]
            usable = [device for device in of_host if group.chip.has_name(device.chip)]
            if of_host and len(usable) < group.devices_per_node:
                names = {"host": host, "wanted": group.devices_per_node, "count": len(usable), "chip": group.chip.name}
                text = N_("cluster.groups needs {wanted} {chip} on {host}, but it has {count}")
                raise NoDevice(_(text, **names))
        return
    of_first_host = [each for each in devices if each.host == devices[0].host]
    found = ((group, [each for each in of_first_host if group.chip.has_name(each.chip)]) for group in cluster.groups)
    group, usable = max(found, key=lambda pair: bool(pair[1]))
    if not usable:
        text = N_(
            "no {chip} on this machine, so nothing can be run; `flag estimate` and `flag tune --fidelity estimate` "
            "plan without it"
        )
        raise NoDevice(_(text, chip=cluster.chips))
    if len(usable) < (needed or group.devices_per_node) and not support.shared_devices:
        text = N_("cluster.devices_per_node = {wanted}, but this machine has {count} {chip}")
        raise NoDevice(_(text, wanted=group.devices_per_node, count=len(usable), chip=group.chip.name))


def _first_hosts(platform: Platform) -> list[str]:
    """Return the first host of each node group."""
    groups = platform.task.cluster.groups
    starts = accumulate((group.nodes for group in groups[:-1]), initial=0)
    return [platform.task.spec.cluster.hosts[start] for start in starts]


def _require_support(chip: Chip, plugins: Plugins, engine: str, engine_version: str | None) -> EngineSupport:
    support = plugins.engine_support(chip, engine, engine_version)
    if support.support in (Support.IMPOSSIBLE, Support.NOT_YET):
        reason = f"{support.support.value}; {support.reason}".rstrip("; ")
        raise NoDevice(_("{engine} does not run on {chip}: {why}", engine=engine, chip=chip.name, why=reason))
    return support


def _conflicts(environment: Mapping[str, str], spec: Spec) -> Iterator[str]:
    for name, value in environment.items():
        for user_value, source in ((spec.envs.get(name), "envs of the spec"), (os.environ.get(name), "this shell")):
            if user_value is not None:
                if user_value != value:
                    yield f"{name}: {user_value} from {source} overrides {value} from a plugin"
                break


def _advised(task: Task, support: EngineSupport, advice: Sequence[TaskAdvice]) -> tuple[Task, EngineSupport]:
    """Return both with what plugins say about the task. Raises NoDevice if one says that it cannot run."""
    for each in advice:
        if each.impossible:
            arguments = {"engine": task.spec.work.engine, "chip": task.cluster.chips, "why": each.impossible}
            raise NoDevice(_("{engine} does not run on {chip}: {why}", **arguments))
    spec = task.spec
    for each in advice:
        spec = _with_settings(spec, each.forced)
    notes = []
    for preferred in (preferred for each in advice for preferred in each.preferred):
        if (more := _with_preferred(spec, preferred)) != spec:
            spec = more
            notes.append(f"{preferred.setting} = {preferred.value}: {preferred.reason}")
    spec = _with_warmup(spec, max((each.warmup for each in advice), default=0))
    support = replace(
        support,
        refused=(*support.refused, *(refused for each in advice for refused in each.refused)),
        forced=(*support.forced, *(forced for each in advice for forced in each.forced)),
        notes=(*support.notes, *notes, *(note for each in advice for note in each.notes)),
    )
    return replace(task, spec=spec), support


def _with_preferred(spec: Spec, preferred: PreferredSetting) -> Spec:
    """Return `spec` with a setting that the user does not set. In a space, it replaces `auto`."""
    knob = preferred.setting.partition(".")[2].replace("-", "_")
    if knob not in spec.space:
        return _with_settings(spec, [preferred])
    if spec.space[knob] != AUTO:
        return spec
    return replace(spec, space={**spec.space, knob: (preferred.value,)})


def _with_warmup(spec: Spec, warmup: int) -> Spec:
    """Return `spec` with at least `warmup` training steps, or requests of each load, that do not count."""
    if isinstance(spec.work, ServeSpec):
        loads = tuple(replace(load, warmup=max(load.warmup, warmup)) for load in spec.work.loads)
        return replace(spec, work=replace(spec.work, loads=loads))
    more = max(warmup - spec.control.warmup_iters, 0)
    control = replace(
        spec.control, warmup_iters=spec.control.warmup_iters + more, train_iters=spec.control.train_iters + more
    )
    return replace(spec, control=control)


def _with_settings(spec: Spec, values: Iterable[ForcedSetting | PreferredSetting]) -> Spec:
    """Return `spec` with settings of plugins, unless the spec sets them.

    They apply to servers and to the user's command, but not to flagcore's trial program.
    """
    for given in values:
        section, _, name = given.setting.partition(".")
        work = spec.work
        if section == "settings" and isinstance(work, TrainSpec) and work.command and given.value is not None:
            spec = replace(spec, work=replace(work, settings={name: given.value, **work.settings}))
        elif section == "engine_args" and isinstance(work, ServeSpec) and given.value is not None:
            arguments = {each.lstrip("-").replace("_", "-") for each in work.engine_args}
            if name.replace("_", "-") not in arguments:
                spec = replace(spec, work=replace(work, engine_args={**work.engine_args, name: given.value}))
    return spec


def _join_supports(supports: Sequence[EngineSupport], chips: Sequence[str]) -> EngineSupport:
    """Return the support for an engine on all node groups. On several chips, it has no device type, so that trials need
    the user's command.
    """
    if len(set(chips)) == 1:
        return supports[0]
    implementations = {support.implementation for support in supports}
    unknown = dict.fromkeys(support.reason for support in supports if support.support is Support.UNKNOWN)
    return EngineSupport(
        support=Support.UNKNOWN if unknown else Support.YES,
        reason="; ".join(unknown),
        implementation=implementations.pop() if len(implementations) == 1 else "",
        refused=tuple(dict.fromkeys(refused for support in supports for refused in support.refused)),
        forced=tuple(dict.fromkeys(forced for support in supports for forced in support.forced)),
        notes=tuple(dict.fromkeys(note for support in supports for note in support.notes)),
        shared_devices=all(support.shared_devices for support in supports),
    )


def _through_hosts(cluster: Cluster) -> str:
    text = N_(
        "messages between {chips} are copied through the memory of the hosts: no collective library connects all of "
        "them, according to the installed plugins"
    )
    return _(text, chips=" and ".join(dict.fromkeys(group.chip.name for group in cluster.groups)))


def _of_vendor(devices: tuple[Device, ...], spec: Spec, plugins: Plugins) -> tuple[Device, ...]:
    """Return the devices of the vendor that `envs` select; all devices if they select none, or if chips are named.

    Raises NoDevice if no plugin has chips of the vendor, or if this machine has none of them.
    """
    is_named = all(requested.chip != AUTO for requested in spec.cluster.groups or (spec.cluster,))
    vendor = None if is_named else plugins.vendor({name: str(value) for name, value in spec.envs.items()})
    if vendor is None:
        return devices
    chips = [chip for chip in plugins.chips() if chip.vendor.casefold() == vendor.casefold()]
    if not chips:
        vendors = ", ".join(dict.fromkeys(chip.vendor for chip in plugins.chips()))
        text = N_(
            "envs select chips of {vendor}, for which no plugin is installed; installed: {vendors}; name a chip as "
            "cluster.chip to plan for another one"
        )
        raise NoDevice(_(text, vendor=vendor, vendors=vendors))
    found = tuple(device for device in devices if any(chip.has_name(device.chip) for chip in chips))
    if not found:
        text = N_("envs select chips of {vendor}, but this machine has none; name one to plan for it: {chips}")
        raise NoDevice(_(text, vendor=vendor, chips=", ".join(chip.name for chip in chips)))
    return found


def _find_chip(name: str, key: str, plugins: Plugins) -> Chip:
    chips = plugins.chips()
    for chip in chips:
        if chip.matches_name(name):
            return chip
    hint = unknown_chip_hint(name, chips)
    raise NoDevice(
        _("{key} = {chip!r} is not supported by any installed plugin; {hint}", key=key, chip=name, hint=hint)
    )


def best_chip(devices: tuple[Device, ...], plugins: Plugins, engine: str) -> Chip:
    """Return the most common chip of this machine, and a CPU only if there is no accelerator.

    Raises NoDevice without a known chip, or if there is only a CPU and the detection of an accelerator failed.
    """
    counts = Counter(device.chip for device in devices)
    chip_counts = [(chip, count) for name, count in counts.items() for chip in plugins.chips() if chip.has_name(name)]
    if not chip_counts:
        text = N_(
            "no usable device: found {devices}; install the vendor's plugin (`flag plugins list` shows what is "
            "installed), measure it with `flag calibrate`, or name a chip to plan for"
        )
        raise NoDevice(_(text, devices=", ".join(counts) or _("no device at all")))
    is_accelerator, _count, chip = max(
        ((not plugins.engine_support(chip, engine).shared_devices, count, chip) for chip, count in chip_counts),
        key=lambda found: found[:2],
    )
    if not is_accelerator and plugins.detection_failures():
        failures = "; ".join(f"plugin {name}: {reason}" for name, reason in plugins.detection_failures().items())
        text = N_(
            "no usable device: only {chip} is left, as devices could not be detected ({why}); fix that, or give "
            "cluster.chip: {chip} to use it"
        )
        raise NoDevice(_(text, chip=chip.name, why=failures))
    return chip


def _group(requested: ClusterSpec, chip: Chip, devices: tuple[Device, ...], support: EngineSupport) -> NodeGroup:
    found = [device for device in devices if chip.has_name(device.chip)]
    local_devices = [device for device in found if device.host == found[0].host]
    count = requested.devices_per_node or len(local_devices) or chip.devices_per_node
    reported = [device.memory_bytes for device in local_devices if device.memory_bytes]
    memory = min(reported) if reported else None
    if memory and support.shared_devices:
        memory = sum(reported) // max(len(reported), count)
    return NodeGroup(
        chip=chip,
        nodes=requested.nodes,
        devices_per_node=count,
        memory_bytes=requested.memory_bytes_per_device or memory,
        name=requested.name,
        speed=requested.speed,
        cpus_per_node=requested.cpus_per_node or (cores() if local_devices and not local_devices[0].host else None),
    )
