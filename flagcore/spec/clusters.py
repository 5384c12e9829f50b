"""Converts the section `cluster` of a spec with its host file: equal nodes, or groups of nodes with different chips."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flagcore.domain.spec import AUTO, ClusterSpec
from flagcore.errors import join_errors
from flagcore.i18n import N_, _
from flagcore.spec.data_file import read_text
from flagcore.spec.plain_data import KeyPath, spec_error
from flagcore.spec.schema import MAX_DEVICES, MAX_MEMORY, MIN_MEMORY, ClusterSection, GroupSection, NodesSection
from flagcore.spec.validate import parse_bytes

_HOST = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:\[\]\-]{0,252}")
UNEQUAL = "differs in slots from another host of the same type"


@dataclass(frozen=True, kw_only=True)
class HostLine:
    """A host of a host file. `slots` is its number of devices, None if the file does not say it; `kind` its `type`."""

    host: str
    slots: int | None = None
    kind: str = ""


def read_hosts(path: Path, *, file: str) -> tuple[HostLine, ...]:
    """Return the hosts of a host file.

    All lines or no line must have `slots`, and likewise `type`; hosts of one type have equal slots. `file` is the spec
    that names it. Raises SpecError with the line's number.
    """
    lines: list[HostLine] = []
    for number, line in enumerate(read_text(path, file=file, key="cluster.hostfile").splitlines(), start=1):
        host, *pairs = line.partition("#")[0].split() or [""]
        if not host:
            continue
        options = dict(pair.partition("=")[::2] for pair in pairs)
        if problem := _problem(host, pairs, options, lines):
            fix = "write lines such as `node-1 slots=8`, or `node-1 slots=8 type=CHIP`"
            raise spec_error(f"line {number}", problem, value=line.strip(), fix=fix, file=str(path))
        slots = int(options["slots"]) if "slots" in options else None
        lines.append(HostLine(host=host, slots=slots, kind=options.get("type", "")))
    if not lines:
        raise spec_error("cluster.hostfile", "names no host", fix="write one `host slots=8` per line", file=str(path))
    return tuple(lines)


def _problem(host: str, pairs: Sequence[str], options: dict[str, str], before: Sequence[HostLine]) -> str:
    if not _HOST.fullmatch(host):
        return "does not start with the name of a host"
    if any(host == line.host for line in before):
        return "repeats a host"
    if len(options) < len(pairs) or not set(options) <= {"slots", "type"} or not options.get("type", "x"):
        return "has other text than slots=NUMBER and type=LABEL after the host"
    slots = options.get("slots", "1")
    if not re.fullmatch("[0-9]{1,7}", slots) or not 1 <= int(slots) <= MAX_DEVICES:
        return f"must give slots from 1 to {MAX_DEVICES}"
    for key, has in (("slots", [line.slots is not None for line in before]), ("type", [bool(x.kind) for x in before])):
        if has and (key in options) != has[0]:
            return f"must have {key} if other hosts have it, else not"
    same_kind = [line for line in before if line.kind == options.get("type", "")]
    if same_kind and "slots" in options and same_kind[0].slots != int(slots):
        return UNEQUAL
    return ""


def cluster_of(cluster: ClusterSection | Literal["auto"], file: str, base: Path, fewer: bool) -> ClusterSpec:
    """Return the cluster of a section. `fewer`: trials run on fewer nodes, so that it may have more than hosts."""
    if not isinstance(cluster, ClusterSection):
        return ClusterSpec()
    lines = read_hosts(base / cluster.hostfile, file=file) if cluster.hostfile is not None else ()
    host_envs = _of_hosts(cluster, lines, file)
    if cluster.groups is not None or len({line.kind for line in lines}) > 1:
        of_groups = _groups(cluster, lines, file)
        return replace(of_groups, host_envs=host_envs)
    if not lines:
        return replace(_nodes(cluster, ("cluster",), file), spares=cluster.spares, min_nodes=cluster.min_nodes)
    hosts, slots = tuple(line.host for line in lines), lines[0].slots
    usable = without_spares(hosts, cluster.spares, file)
    nodes = min(cluster.nodes, usable) if "nodes" in cluster.model_fields_set else usable
    nodes = max(nodes, cluster.nodes) if fewer else nodes
    numbers = {"nodes": nodes} | ({"devices_per_node": slots} if slots else {})
    for key, number in numbers.items():
        value = getattr(cluster, key)
        if key in cluster.model_fields_set and value not in (number, AUTO):
            problem = _("must be {number}, as in {file}", number=number, file=cluster.hostfile)
            raise spec_error(("cluster", key), problem, value=value, fix=_("leave it out"), file=file)
    whole = _nodes(cluster.model_copy(update=numbers), ("cluster",), file)
    return replace(whole, hosts=hosts, spares=cluster.spares, min_nodes=cluster.min_nodes, host_envs=host_envs)


def _of_hosts(cluster: ClusterSection, lines: Sequence[HostLine], file: str) -> dict[str, dict[str, str]]:
    """Return the environment variables of single hosts. Raises SpecError for hosts that are not in the host file."""
    hosts = [line.host for line in lines]
    if unknown := [host for host in cluster.host_envs if host not in hosts]:
        problem, fix = _("is not a host of cluster.hostfile"), _("use a name of cluster.hostfile, or remove it")
        raise join_errors([spec_error(("cluster", "host_envs", each), problem, fix=fix, file=file) for each in unknown])
    return {
        host: environment_of(envs, ("cluster", "host_envs", host), file) for host, envs in cluster.host_envs.items()
    }


def without_spares(hosts: Sequence[str], spares: int, file: str = "") -> int:
    """Return the number of hosts without spares. Raises SpecError if there are too many spares."""
    if spares >= len(hosts):
        problem, fix = _("must be below the number of hosts"), _("use at most {number}", number=max(0, len(hosts) - 1))
        raise spec_error("cluster.spares", problem, value=spares, fix=fix, file=file)
    return len(hosts) - spares


def _groups(cluster: ClusterSection, lines: Sequence[HostLine], file: str) -> ClusterSpec:
    """Return a cluster of several groups: those of the section, or one for each type in the host file `lines`."""
    others = cluster.model_fields_set - {"groups", "hostfile", "host_envs"}
    if key := next((key for key in ClusterSection.model_fields if key in others), None):
        what = "cluster.groups" if cluster.groups else "several types in cluster.hostfile"
        problem, fix = f"cannot be combined with {what}", "set it for each group, or leave it out"
        raise spec_error(("cluster", key), problem, value=getattr(cluster, key), fix=fix, file=file)
    groups = cluster.groups or [GroupSection(chip=kind) for kind in dict.fromkeys(line.kind for line in lines)]
    for place, group in enumerate(groups):
        if group.chip == AUTO:
            problem = "must name a chip: devices of other machines cannot be detected"
            raise spec_error(("cluster", "groups", place, "chip"), problem, value=AUTO, fix="name the chip", file=file)
    hosts: list[str] = []
    if lines:
        groups, hosts = _assigned(groups, lines, file)
    specs = tuple(_nodes(group, ("cluster", "groups", place), file) for place, group in enumerate(groups))
    devices = sum(spec.nodes * (spec.devices_per_node or 1) for spec in specs)
    if devices > MAX_DEVICES:
        raise spec_error("cluster.groups", f"must have at most {MAX_DEVICES} devices in all", value=devices, file=file)
    if len(specs) == 1:
        return replace(specs[0], hosts=tuple(hosts), name="")
    return ClusterSpec(groups=specs, hosts=tuple(hosts), nodes=len(hosts) or 1)


def _assigned(
    groups: Sequence[GroupSection], lines: Sequence[HostLine], file: str
) -> tuple[list[GroupSection], list[str]]:
    """Return the groups with their nodes and devices from a host file, and its hosts in the order of the groups.

    A group has the hosts of its `name`, by default its chip. Hosts without a type go to the groups in order.
    Raises SpecError.
    """
    left, assigned, hosts = list(lines), list[GroupSection](), list[str]()
    for place, group in enumerate(groups):
        own = [line for line in left if line.kind in ("", group.name or group.chip)]
        if "nodes" in group.model_fields_set:
            own = own[: group.nodes]
        numbers = {"nodes": len(own)} | ({"devices_per_node": own[0].slots} if own and own[0].slots else {})
        for key, number in numbers.items():
            value = getattr(group, key)
            if not number or (key in group.model_fields_set and value not in (number, AUTO)):
                problem = f"must be {number}, as in cluster.hostfile" if number else "has no host in cluster.hostfile"
                fix = f"add `type={group.name or group.chip}` to its hosts, or leave {key} out"
                raise spec_error(("cluster", "groups", place, key), problem, value=value, fix=fix, file=file)
        left = [line for line in left if line not in own]
        assigned.append(group.model_copy(update=numbers))
        hosts += [line.host for line in own]
    if left:
        problem, fix = f"has the host {left[0].host}, which is in no group", "remove it, or add a group for its type"
        raise spec_error("cluster.hostfile", problem, value=left[0].kind or left[0].host, fix=fix, file=file)
    return assigned, hosts


def _nodes(group: NodesSection, at: KeyPath, file: str) -> ClusterSpec:
    devices = group.devices_per_node if isinstance(group.devices_per_node, int) else None
    check_devices(group.nodes, devices or 1, at, file)
    return ClusterSpec(
        chip=group.chip,
        nodes=group.nodes,
        devices_per_node=devices,
        memory_bytes_per_device=size_of(group.memory_per_device, (*at, "memory_per_device"), file),
        cpus_per_node=group.cpus_per_node,
        nic_bytes_per_second=group.nic_bytes_per_second,
        nic_latency_seconds=group.nic_latency_seconds,
        price_per_device_hour=group.price_per_device_hour,
        envs=environment_of(group.envs, (*at, "envs"), file) if isinstance(group, GroupSection) else {},
        name=(group.name or "") if isinstance(group, GroupSection) else "",
        speed=group.speed if isinstance(group, GroupSection) else 1.0,
    )


def check_devices(nodes: int, per_node: int, at: KeyPath, file: str = "") -> None:
    """Raise SpecError if `nodes` x `per_node` exceeds MAX_DEVICES."""
    if nodes * per_node > MAX_DEVICES:
        text = N_("times devices_per_node = {count} must be at most {most} devices")
        problem = _(text, count=per_node, most=MAX_DEVICES)
        raise spec_error(
            (*at, "nodes"), problem, value=nodes, fix=_("use {values}", values=MAX_DEVICES // per_node), file=file
        )


def size_of(amount: int | str | None, key: KeyPath, file: str) -> int | None:
    """Return a size in bytes. Raises SpecError."""
    if not isinstance(amount, str):
        return amount
    size = parse_bytes(amount)
    if not MIN_MEMORY <= size <= MAX_MEMORY:
        problem = "must be from 1MiB to 1024TiB"
        raise spec_error(key, problem, value=amount, fix="write e.g. 4GiB", file=file)
    return size


def environment_of(envs: Mapping[str, str | int], at: KeyPath, file: str) -> dict[str, str]:
    """Return environment variables as text. Raises SpecError for invalid names."""
    problem, fix = _("is not the name of an environment variable"), _("use letters, digits and underscores")
    if invalid := [name for name in envs if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)]:
        raise join_errors([spec_error((*at, name), problem, fix=fix, file=file) for name in invalid])
    return {name: str(value) for name, value in envs.items()}
