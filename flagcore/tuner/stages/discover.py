"""discover: find the hardware of a spec, and the cost models for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flagcore.domain.chip import ASSUMED_NETWORK, Chip, Device, Support, unknown_chip_hint, with_network
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.engine import EngineSupport, has_common_library
from flagcore.domain.host import cores
from flagcore.domain.spec import AUTO, ClusterSpec, Spec
from flagcore.errors import NoDevice
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins, best_chip


class Hardware(NamedTuple):
    """The hardware of a spec.

    - `cluster`: the node groups in the order of the spec.
    - `supports`: the engine support of each group's chip.
    - `support`: the engine support of all groups together.
    - `devices`: all devices that were detected on this machine and on the hosts of the spec.
    """

    cluster: Cluster
    supports: tuple[EngineSupport, ...]
    support: EngineSupport
    devices: tuple[Device, ...]


def discover(spec: Spec, plugins: LoadedPlugins, engine_version: str | None = None) -> Hardware:
    """Return the hardware of `spec`: the named chips, or the best chip of this machine.

    `engine_version` is the release of the engine, None if unknown. Raises NoDevice if no device is found, if a chip is
    unknown, or if the engine cannot run on it.
    """
    engine, requests = spec.work.engine, spec.cluster.groups or (spec.cluster,)
    keys = [f"cluster.groups[{index}].chip" for index in range(len(spec.cluster.groups))] or ["cluster.chip"]
    chips = ((key, each.chip) for key, each in zip(keys, requests, strict=True) if each.chip != AUTO)
    named = {key: _find_chip(name, key, plugins) for key, name in chips}
    devices = plugins.devices(spec.envs, [*named.values()] if len(named) == len(requests) else ())
    vendor_devices = _of_vendor(devices, spec, plugins)
    groups, supports = [], []
    for key, requested in zip(keys, requests, strict=True):
        chip = named.get(key) or best_chip(vendor_devices, plugins, engine)
        support = plugins.engine_support(chip, engine, engine_version)
        if support.support in (Support.IMPOSSIBLE, Support.NOT_YET):
            reason = f"{support.support.value}; {support.reason}".rstrip("; ")
            raise NoDevice(_("{engine} does not run on {chip}: {why}", engine=engine, chip=chip.name, why=reason))
        chip = with_network(plugins.measured_chip(chip), requested.nic_bytes_per_second, requested.nic_latency_seconds)
        several_hosts = bool(spec.cluster.groups) or requested.nodes > 1
        if several_hosts and chip.nic_bytes_per_second is None and not support.shared_devices:
            chip = replace(chip, nic_bytes_per_second=ASSUMED_NETWORK)
        groups.append(_group(requested, chip, devices, support))
        supports.append(support)
    joint_support = _join_supports(supports, [group.chip.name for group in groups])
    if spec.work.has_steps and not has_common_library(groups, supports):
        text = N_(
            "messages between {chips} are copied through the memory of the hosts: no collective library connects all "
            "of them, according to the installed plugins"
        )
        note = _(text, chips=" and ".join(dict.fromkeys(group.chip.name for group in groups)))
        joint_support = replace(joint_support, notes=(*joint_support.notes, note))
    cluster = Cluster(groups=tuple(groups))
    return Hardware(cluster=cluster, supports=tuple(supports), support=joint_support, devices=devices)


def _join_supports(supports: Sequence[EngineSupport], chips: Sequence[str]) -> EngineSupport:
    """Return the engine support of all node groups together.

    If there are several kinds of chips, it has no device type, so that trials need the user's command. It has a stack,
    with the settings of all stacks, if their implementations are equal.
    """
    if len(set(chips)) == 1:
        return supports[0]
    stacks = [support.stack for support in supports if support.stack]
    is_one = len(stacks) == len(supports) and len({stack.implementation for stack in stacks}) == 1
    settings = {key: value for stack in stacks for key, value in stack.settings.items()}
    unknown = dict.fromkeys(support.reason for support in supports if support.support is Support.UNKNOWN)
    return EngineSupport(
        support=Support.UNKNOWN if unknown else Support.YES,
        reason="; ".join(unknown),
        stack=replace(stacks[0], settings=settings) if is_one else None,
        notes=tuple(dict.fromkeys(note for support in supports for note in support.notes)),
        shared_devices=all(support.shared_devices for support in supports),
    )


def _of_vendor(devices: tuple[Device, ...], spec: Spec, plugins: LoadedPlugins) -> tuple[Device, ...]:
    """Return the devices of the vendor that the spec's `envs` select.

    Returns all devices if `envs` select no vendor, or if the spec names chips. Raises NoDevice if no plugin has chips
    of the vendor, or if this machine has none of them.
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


def _find_chip(name: str, key: str, plugins: LoadedPlugins) -> Chip:
    if found := next((chip for chip in plugins.chips(name) if chip.matches_name(name)), None):
        return found
    names = {"key": key, "chip": name, "hint": unknown_chip_hint(name, plugins.chips())}
    raise NoDevice(_("{key} = {chip!r} is not supported by any installed plugin; {hint}", **names))


def _group(requested: ClusterSpec, chip: Chip, devices: tuple[Device, ...], support: EngineSupport) -> NodeGroup:
    """Return the node group that a cluster or group of the spec requests, completed from the detected devices."""
    chip_devices = [device for device in devices if chip.has_name(device.chip)]
    local_devices = [device for device in chip_devices if device.host == chip_devices[0].host]
    count = requested.devices_per_node or len(local_devices) or chip.devices_per_node
    reported = [device.memory_bytes for device in local_devices if device.memory_bytes]
    if chip.usable_bytes:
        reported = [min(each, int(chip.usable_bytes.value)) for each in reported]
    memory = min(reported, default=None)
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
