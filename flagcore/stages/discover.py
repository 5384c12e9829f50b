"""discover: what hardware the task runs on, and all that plugins know about it."""

from __future__ import annotations

from collections import Counter

from flagcore.contracts import Costs, Platform, Plugins
from flagcore.domain.chip import Chip, Device, Support, unknown_chip, with_network
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.errors import NoDevice
from flagcore.physics.collectives.costs import Collectives
from flagcore.physics.collectives.topology import topology_of
from flagcore.physics.kernels.roofline import Roofline
from flagcore.physics.memory.device import PlainMemory


def discover(spec: Spec, plugins: Plugins) -> Platform:
    """Return the platform of `spec`: the named chip, or the best one that is found on this machine.

    Every hook about chip, costs and engine is asked here, once. Raises NoDevice when nothing is found,
    when no plugin knows the chip, or when the engine cannot run on it.
    """
    engine, devices = spec.train.engine, plugins.devices()
    chip = _named(spec.cluster.chip, plugins) if spec.cluster.chip != AUTO else best_chip(devices, plugins, engine)
    chip = with_network(chip, spec.cluster.nic_bytes_per_second)
    here = tuple(device for device in devices if chip.answers_to(device.chip))
    support = plugins.engine_support(chip, engine)
    if support.support in (Support.IMPOSSIBLE, Support.NOT_YET):
        raise NoDevice(f"{engine} does not run on {chip.name}: {support.support.value}; {support.reason}".rstrip("; "))
    cluster = _cluster(spec, chip, here, support)
    task = Task(spec=spec, cluster=cluster)
    return Platform(
        task=task,
        costs=costs(cluster, plugins, engine),
        support=support,
        environment=plugins.environment(chip, engine),
        pruning_rules=plugins.pruning_rules(task),
        failure_patterns=plugins.failure_patterns(chip, engine),
        telemetry=tuple(reader for device in here if (reader := plugins.telemetry(device)) is not None),
        prepare_launch=lambda launch: plugins.prepare_launch(launch, task),
    )


def costs(cluster: Cluster, plugins: Plugins, engine: str) -> Costs:
    """Return the plugins' cost models for `cluster`, and the core's own where they have none."""
    group = cluster.groups[0]
    known = plugins.kernel_costs(group.chip, engine)
    return Costs(
        memory=plugins.memory_model(group, engine) or PlainMemory.of(group),
        kernels=known or Roofline(chip=group.chip),
        collectives=plugins.collective_costs(group, engine)
        or Collectives(topology=plugins.topology(group) or topology_of(group)),
        guessed=known is None,
        synchronous=plugins.engine_support(group.chip, engine).shared_devices,
    )


def present(platform: Platform, devices: tuple[Device, ...]) -> None:
    """Raise NoDevice unless the platform's devices are on this machine, so that trials can run here."""
    group, support, train = platform.task.cluster.groups[0], platform.support, platform.task.spec.train
    if train.command is None and (support.device_type is None or support.distributed_backend is None):
        raise NoDevice(f"no installed plugin says how {train.engine} runs on {group.chip.name}; give a train.command")
    here = [device for device in devices if group.chip.answers_to(device.chip)]
    if not here:
        raise NoDevice(f"no {group.chip.name} on this machine, so nothing can be run; `flag estimate` plans without it")
    if len(here) < group.devices_per_node and not support.shared_devices:
        raise NoDevice(
            f"cluster.devices_per_node = {group.devices_per_node}, but this machine has {len(here)} {group.chip.name}"
        )


def _named(name: str, plugins: Plugins) -> Chip:
    known = plugins.chips()
    for chip in known:
        if chip.answers_to(name):
            return chip
    raise NoDevice(f"cluster.chip = {name!r} is not known to any installed plugin; {unknown_chip(name, known)}")


def best_chip(devices: tuple[Device, ...], plugins: Plugins, engine: str) -> Chip:
    """Return the chip that most devices here have; chips that are no plain CPU go first. Raises NoDevice."""
    counts = Counter(device.chip for device in devices)
    known = [(chip, count) for name, count in counts.items() for chip in plugins.chips() if chip.answers_to(name)]
    if not known:
        strange = ", ".join(counts) or "no device at all"
        raise NoDevice(
            f"no usable device: found {strange}; install the vendor's plugin (`flag plugins list` shows what is "
            "installed), or name a chip to plan for"
        )
    return max(known, key=lambda pair: (not plugins.engine_support(pair[0], engine).shared_devices, pair[1]))[0]


def _cluster(spec: Spec, chip: Chip, here: tuple[Device, ...], support: EngineSupport) -> Cluster:
    wanted = spec.cluster
    devices = wanted.devices_per_node or len(here) or chip.devices_per_node
    reported = [device.memory_bytes for device in here if device.memory_bytes]
    memory = min(reported) if reported else None
    if memory and support.shared_devices:
        memory = sum(reported) // max(len(reported), devices)
    group = NodeGroup(
        chip=chip,
        nodes=wanted.nodes,
        devices_per_node=devices,
        memory_bytes=wanted.memory_bytes_per_device or memory,
        hosts=wanted.hosts,
    )
    return Cluster(groups=(group,))
