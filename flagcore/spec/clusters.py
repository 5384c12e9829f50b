"""Converts the section `cluster` of a spec, and its host file, to a `ClusterSpec`.

The cluster consists of identical nodes, or of groups of nodes with different chips.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from flagcore.domain.spec import AUTO, ClusterSpec
from flagcore.domain.units import MAX_DEVICES, Devices, Latency, Memory, NoDevices, Price, Rate, Speed, Text, Wait, Word
from flagcore.errors import join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import KeyPath, read_text, spec_error
from flagcore.spec.validate import Context, Envs, Name, Section

MAX_PER_NODE = 1_024
NodeDevices = Annotated[int, Field(ge=1, le=MAX_PER_NODE)]


class NodesSection(Section):
    """Identical nodes."""

    chip: Word
    """Name or alias of a chip of any plugin."""
    nodes: Devices = 1
    """Number of hosts."""
    devices_per_node: Literal["auto"] | NodeDevices = "auto"
    """Devices per host; auto: the detected number, the slots of the hostfile, or the usual number for the chip."""
    memory_per_device: Memory = None
    """Memory per device that a trial may use, in bytes or with a unit; null: all of it."""
    cpus_per_node: Devices | None = None
    """CPUs (hardware threads, as `nproc` prints) per host that servers may use, for predictions; null: those of this
    host if it has the devices, otherwise enough."""
    nic_bytes_per_second: Rate | None = None
    """Network bandwidth per device (400 Gbit/s is 5.0e+10 or 400Gbit/s); null: the value of the chip's plugin."""
    nic_latency_seconds: Latency | None = None
    """Seconds until a small message arrives on another host; null: 20 µs, as of InfiniBand."""
    price_per_device_hour: Price | None = None
    """Price of one device for an hour, in any currency, for the cost of tokens and of `planned_steps`."""


class GroupSection(NodesSection):
    """Identical nodes of a heterogeneous cluster."""

    name: Name | None = None
    """Name of the group in meshes and tables, and the `type` of its hosts in the host file; null: `chip`."""
    speed: Speed = 1
    """Speed of the devices relative to the chip, such as 0.5 for processors with half of the clock rate."""
    envs: Envs = Field(default={})
    """Environment variables of trials on the group's hosts, in addition to `envs` of the spec, which they override."""


class ClusterSection(NodesSection):
    """The hardware to tune for."""

    chip: Word = "auto"
    """Name or alias of a chip of any plugin; auto: detected on this machine."""
    hostfile: Text | None = None
    """File with one `host slots=8` per line, relative to the spec's folder; a trial uses all hosts, or `nodes`.
    With different `type=CHIP`, each type is a group."""
    spares: NoDevices = 0
    """Number of spare hosts, which replace hosts that fail."""
    min_nodes: Devices | None = None
    """If hosts fail and no spare is left, trials use fewer data-parallel replicas on at least this number of hosts."""
    wait_for_hosts: Wait = 300.0
    """Seconds that a trial waits for a lost host, if no spare replaces it, before `min_nodes` applies or the search
    ends."""
    host_envs: dict[str, Envs] = Field(default={})
    """Environment variables of trials on single hosts of `hostfile`, by host. They override those of the spec and of
    the host's group."""
    groups: Annotated[list[GroupSection], Field(min_length=1)] | None = None
    """Up to 16 groups of nodes with different chips, in rank order, instead of the other keys except `hostfile`,
    `wait_for_hosts` and `host_envs`; null: those of the types in `hostfile`, or identical nodes."""


MAX_GROUPS = 16
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,252}@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\[\]\-]{0,252}")
UNEQUAL = "differs in slots from another host of the same type"


class HostLine(NamedTuple):
    """A host in a host file.

    `user`: the user who logs in by ssh. Empty if the file does not state it.
    `slots`: the number of its devices. None if the file does not state it.
    `kind`: the value of `type` in the file. Empty if there is none.
    """

    host: str
    user: str = ""
    slots: int | None = None
    kind: str = ""


def read_hosts(path: Path, *, file: str) -> tuple[HostLine, ...]:
    """Return the hosts in a host file.

    Either all lines or no line must have `slots`. The same applies to `type`. Hosts of the same type must have the same
    number of slots.

    `file`: the spec that names the host file.
    Raises SpecError with the number of the invalid line.
    """
    lines, kinds = dict[str, HostLine](), dict[str, HostLine]()  # kinds: the first host of each
    for number, line in enumerate(read_text(path, file=file, key="cluster.hostfile").splitlines(), start=1):
        name, *pairs = line.partition("#")[0].split() or [""]
        if not name:
            continue
        options = dict(pair.partition("=")[::2] for pair in pairs)
        if problem := _problem(name, pairs, options, lines, kinds):
            fix = "write lines such as `node-1 slots=8`, or `node-1 slots=8 type=CHIP`"
            raise spec_error(f"line {number}", problem, value=line.strip(), fix=fix, file=str(path))
        slots = int(options["slots"]) if "slots" in options else None
        user, _at, host = name.rpartition("@")
        lines[host] = HostLine(host=host, user=user, slots=slots, kind=options.get("type", ""))
        kinds.setdefault(lines[host].kind, lines[host])
    if not lines:
        raise spec_error("cluster.hostfile", "names no host", fix="write one `host slots=8` per line", file=str(path))
    return tuple(lines.values())


def _problem(
    name: str, pairs: Sequence[str], options: dict[str, str], before: Collection[str], kinds: dict[str, HostLine]
) -> str:
    """Return why a line of a host file is invalid, or an empty string. `name`: the host, with its user if there is one.
    `before`: the hosts of the lines above it. `kinds`: the first of each type."""
    if not _HOST.fullmatch(name):
        return "does not start with the name of a host"
    if name.rpartition("@")[2] in before:
        return "repeats a host"
    if len(options) < len(pairs) or not set(options) <= {"slots", "type"} or not options.get("type", "x"):
        return "has other text than slots=NUMBER and type=LABEL after the host"
    slots = options.get("slots", "1")
    if not re.fullmatch("[0-9]{1,7}", slots) or not 1 <= int(slots) <= MAX_PER_NODE:
        return f"must give slots from 1 to {MAX_PER_NODE}"
    for first in islice(kinds.values(), 1):
        for key, has in (("slots", first.slots is not None), ("type", bool(first.kind))):
            if (key in options) != has:
                return f"must have {key} if the other hosts have it, and only then"
    same_kind = kinds.get(options.get("type", ""))
    return UNEQUAL if same_kind and "slots" in options and same_kind.slots != int(options["slots"]) else ""


def cluster_of(cluster: ClusterSection | Literal["auto"], context: Context) -> ClusterSpec:
    """Return the cluster that a section describes.

    It may have more nodes than hosts if `auto_tuner.control.trial_nodes` is given.
    """
    if not isinstance(cluster, ClusterSection):
        return ClusterSpec()
    hostfile = cluster.hostfile
    lines = read_hosts(context.base / hostfile, file=context.file) if hostfile is not None else ()
    host_envs: Any = {host.rpartition("@")[2]: envs for host, envs in cluster.host_envs.items()}
    users = {line.host: line.user for line in lines if line.user}
    if unknown := sorted({*host_envs} - {line.host for line in lines}):
        problem, fix = _("is not a host of cluster.hostfile"), _("use a name of cluster.hostfile, or remove it")
        raise join_errors([spec_error(("host_envs", each), problem, fix=fix) for each in unknown])
    several_kinds = cluster.groups is not None or len({line.kind for line in lines}) > 1
    found = _groups(cluster, lines) if several_kinds else _identical_nodes(cluster, lines, context)
    return replace(found, users=users, wait_for_hosts=cluster.wait_for_hosts, host_envs=host_envs)


def _identical_nodes(cluster: ClusterSection, lines: Sequence[HostLine], context: Context) -> ClusterSpec:
    """Return a cluster of identical nodes: those of the host file `lines`, or as many as the section says."""
    numbers = dict[str, int]()
    if lines:
        usable = without_spares(lines, cluster.spares)
        nodes = min(cluster.nodes, usable) if "nodes" in cluster.model_fields_set else usable
        has_parts = context.given("auto_tuner", "control", "trial_nodes") is not None
        numbers = {"nodes": max(nodes, cluster.nodes) if has_parts else nodes, **_slots(lines)}
    for key, number in numbers.items():
        if key in cluster.model_fields_set and (value := getattr(cluster, key)) not in (number, AUTO):
            problem = _("must be {number}, as in {file}", number=number, file=cluster.hostfile)
            raise spec_error(key, problem, value=value, fix=_("leave it out"))
    spec, hosts = _nodes(cluster.model_copy(update=numbers), ()), tuple(line.host for line in lines)
    return replace(spec, hosts=hosts, spares=cluster.spares, min_nodes=cluster.min_nodes)


def _slots(lines: Sequence[HostLine]) -> dict[str, int]:
    """Return the key `devices_per_node` and its value, or an empty dict if the host file does not state the slots."""
    return {"devices_per_node": lines[0].slots} if lines and lines[0].slots else {}


def without_spares(hosts: Sequence[object], spares: int) -> int:
    """Return the number of hosts that are not spares. Raises SpecError if all hosts are spares."""
    if spares >= len(hosts):
        problem, fix = _("must be below the number of hosts"), _("use at most {number}", number=max(0, len(hosts) - 1))
        raise spec_error("cluster.spares", problem, value=spares, fix=fix)
    return len(hosts) - spares


def _groups(cluster: ClusterSection, lines: Sequence[HostLine]) -> ClusterSpec:
    """Return a cluster of several node groups: the groups in the section, or one per type in the host file `lines`."""
    other_keys = cluster.model_fields_set - {"groups", "hostfile", "wait_for_hosts", "host_envs"}
    if key := next((key for key in ClusterSection.model_fields if key in other_keys), None):
        group_source = "cluster.groups" if cluster.groups else "several types in cluster.hostfile"
        problem, fix = f"cannot be combined with {group_source}", "set it for each group, or leave it out"
        raise spec_error(key, problem, value=getattr(cluster, key), fix=fix)
    groups = cluster.groups or [GroupSection(chip=kind) for kind in dict.fromkeys(line.kind for line in lines)]
    if len(groups) > MAX_GROUPS:
        problem, fix = f"must be at most {MAX_GROUPS} groups, or types in hostfile", "merge those with the same chip"
        raise spec_error("groups", problem, value=len(groups), fix=fix)
    for place, group in enumerate(groups):
        if group.chip == AUTO:
            problem = "must name a chip: devices of other machines cannot be detected"
            raise spec_error(("groups", place, "chip"), problem, value=AUTO, fix="name the chip")
    hosts: list[str] = []
    if lines:
        groups, hosts = _assigned(groups, lines)
    specs = tuple(_nodes(group, ("groups", place)) for place, group in enumerate(groups))
    devices = sum(spec.nodes * (spec.devices_per_node or 1) for spec in specs)
    if devices > MAX_DEVICES:
        raise spec_error("groups", f"must have at most {MAX_DEVICES} devices in all", value=devices)
    if len(specs) == 1:
        return replace(specs[0], hosts=tuple(hosts), name="")
    return ClusterSpec(groups=specs, hosts=tuple(hosts), nodes=len(hosts) or 1)


def _assigned(groups: Sequence[GroupSection], lines: Sequence[HostLine]) -> tuple[list[GroupSection], list[str]]:
    """Assign the hosts of a host file to groups.

    Returns the groups with their numbers of nodes and devices, and all hosts in the order of the groups. A host belongs
    to the group whose `name` (by default its chip) is the type of the host. Hosts without a type fill the groups in
    order. Raises SpecError if the numbers do not match, or if a host belongs to no group.
    """
    unassigned, assigned, hosts = list(lines), list[GroupSection](), list[str]()
    for place, group in enumerate(groups):
        group_lines = [line for line in unassigned if line.kind in ("", group.name or group.chip)]
        if "nodes" in group.model_fields_set:
            group_lines = group_lines[: group.nodes]
        numbers = {"nodes": len(group_lines), **_slots(group_lines)}
        for key, number in numbers.items():
            value = getattr(group, key)
            if not number or (key in group.model_fields_set and value not in (number, AUTO)):
                problem = f"must be {number}, as in cluster.hostfile" if number else "has no host in cluster.hostfile"
                fix = f"add `type={group.name or group.chip}` to its hosts, or leave {key} out"
                raise spec_error(("groups", place, key), problem, value=value, fix=fix)
        unassigned = [line for line in unassigned if line not in group_lines]
        assigned.append(group.model_copy(update=numbers))
        hosts += [line.host for line in group_lines]
    if unassigned:
        problem = f"has the host {unassigned[0].host}, which is in no group"
        fix = "remove it, or add a group for its type"
        raise spec_error("hostfile", problem, value=unassigned[0].kind or unassigned[0].host, fix=fix)
    return assigned, hosts


def _nodes(group: NodesSection, at: KeyPath) -> ClusterSpec:
    """Return a cluster of identical nodes. `at` is the key path of the section below `cluster`, for errors."""
    fields = {key: getattr(group, key) for key in GroupSection.model_fields if key in type(group).model_fields}
    if fields["devices_per_node"] == AUTO:
        fields["devices_per_node"] = None
    check_devices(group.nodes, fields["devices_per_node"] or 1, at)
    memory, name = fields.pop("memory_per_device"), fields.pop("name", None)
    return ClusterSpec(**fields, memory_bytes_per_device=memory, name=name or "")


def check_devices(nodes: int, per_node: int, at: KeyPath) -> None:
    """Raise SpecError if `nodes` x `per_node` exceeds MAX_DEVICES. `at` is the key path of the section."""
    if nodes * per_node > MAX_DEVICES:
        text = _("times devices_per_node = {count} must be at most {most} devices", count=per_node, most=MAX_DEVICES)
        raise spec_error((*at, "nodes"), text, value=nodes, fix=_("use {values}", values=MAX_DEVICES // per_node))
