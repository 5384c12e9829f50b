"""Reads the matrix that `topo -m` prints: the links between devices, and between devices and network adapters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flagcore.domain.chip import Fact, Source
from flagcore.domain.cluster import NodeGroup
from flagcore.vendorkit.rows import strip_controls

NEAR = ("PIX", "PXB")
"""Names of links to an adapter that do not cross the CPU."""

_DEVICE = re.compile(r"(?!NIC)[A-Z]{3}(\d+)")
"""Matches the name of a device: three letters and a number. Adapters are named NIC0 or have their own names."""

_AFFINITY = re.compile(r"(?:CPU|NUMA|Node) Affinity|GPU NUMA ID")
"""Matches the columns after the devices and adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The links of a node.

    `links`: the kind of link between each pair of devices.
    `adapters`: the kind of link between each device and each network adapter.
    """

    devices: tuple[int, ...]
    links: Mapping[tuple[int, int], str]
    adapters: Mapping[tuple[int, str], str]


def read_matrix(text: str) -> Matrix | None:
    """Return the matrix in `text`. Returns None if a row is incomplete, or if both directions of a pair differ."""
    lines = strip_controls(text).splitlines()
    words = [line.split() or [""] for line in lines]
    start = next((at for at, row in enumerate(words) if _DEVICE.fullmatch(row[0]) and "X" not in row), None)
    if start is None:
        return None
    columns = [*_AFFINITY.split(lines[start])[0].split(), *_AFFINITY.findall(lines[start])]
    width = sum(not _AFFINITY.fullmatch(column) for column in columns)
    devices = tuple(int(match[1]) for column in columns if (match := _DEVICE.fullmatch(column)))
    prefixes = {column.rstrip("0123456789") for column in columns if _DEVICE.fullmatch(column)}
    if len(prefixes) != 1 or len(set(devices)) != len(devices):
        return None
    (prefix,) = prefixes
    links_by_device: dict[int, dict[str, str]] = {}
    for label, *cells in words[start + 1 :]:
        device = _DEVICE.fullmatch(label)
        if device and len(cells) >= width and int(device[1]) not in links_by_device:
            links_by_device[int(device[1])] = dict(zip(columns, cells, strict=False))
    if set(links_by_device) != set(devices):
        return None
    links = {(a, b): links_by_device[a][f"{prefix}{b}"] for a in devices for b in devices if a != b}
    is_symmetric = all(links[a, b] == links[b, a] for a, b in links)
    if not is_symmetric or any(links_by_device[a][f"{prefix}{a}"] != "X" for a in devices):
        return None
    names = [column for column in columns[:width] if not _DEVICE.fullmatch(column)]
    adapters = {(device, name): links_by_device[device][name] for device in devices for name in names}
    return Matrix(devices=devices, links=links, adapters=adapters)


def islands(matrix: Matrix, link: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices in which every pair has a link that matches `link`, sorted by their first device.

    A device without such a link is a group of its own. The result is empty if the links do not form groups, such as in
    a ring or a line.
    """
    of = matrix.devices
    joined = {a: tuple(b for b in of if b == a or re.fullmatch(link, matrix.links[a, b])) for a in of}
    if any(joined[other] != group for group in joined.values() for other in group):
        return ()
    return tuple(dict.fromkeys(joined.values()))


def near_adapters(matrix: Matrix) -> dict[int, tuple[str, ...]]:
    """Return the network adapters that each device reaches without crossing the CPU. Collective libraries use them."""
    return {
        device: tuple(name for (of, name), cell in matrix.adapters.items() if of == device and cell in NEAR)
        for device in matrix.devices
    }


def devices_per_adapter(matrix: Matrix) -> dict[str, int]:
    """Return the number of devices near each adapter.

    Adapters without near devices are omitted, because they carry no compute traffic.
    """
    near = near_adapters(matrix)
    counts = {name: sum(name in names for names in near.values()) for _, name in matrix.adapters}
    return {name: count for name, count in counts.items() if count}


def adapter_share(matrix: Matrix, text: str, root: Path = Path("/")) -> float | None:
    """Return a device's share of the rate of its near adapters, in bytes per second one way, or None if it is unknown.

    `text`: the tool's output, which contains the matrix and a legend with the names of adapters.
    `root`: the folder below which the kernel reports the rates of adapters.

    Devices near the same adapter share its rate. The result is the smallest share of any device.
    """
    names = dict(re.findall(r"^\s*(NIC\d+): (\w+)\s*$", text, re.MULTILINE))
    shared, near = devices_per_adapter(matrix), near_adapters(matrix)
    rates = {name: _rate(root / "sys/class/infiniband" / names.get(name, name) / "ports/1/rate") for name in shared}
    if not near or not all(near.values()) or not all(rates.values()):
        return None
    return min(sum((rates[name] or 0.0) / shared[name] for name in adapters) for adapters in near.values())


def with_own_adapters(group: NodeGroup, text: str | None, root: Path = Path("/")) -> NodeGroup | None:
    """Return `group` with each device's share of this machine's adapters, from `text` (`topo -m`) and the kernel.

    Returns None if the network rate of the chip applies: if there is one node, if the user set the rate, if this
    machine is not a node of the group, or if the share is unknown.
    """
    rate = group.chip.nic_bytes_per_second
    matrix = read_matrix(text or "")
    if group.nodes == 1 or (rate is not None and rate.source.kind == "user") or matrix is None:
        return None
    share = adapter_share(matrix, text or "", root) if len(matrix.devices) == group.devices_per_node else None
    if share is None:
        return None
    source = Source(kind="measured", detail="rates of this machine's adapters, shared as its matrix shows")
    return replace(group, chip=replace(group.chip, nic_bytes_per_second=Fact(value=share, source=source)))


def group_size(group: NodeGroup, text: str | None, link: str, usual: int) -> int:
    """Return the number of a node's devices that links of the kind `link` connect, or `usual` if it is unknown.

    `text` is the output of `topo -m` on such a node. The groups must have equal sizes and consecutive devices, and the
    node must have as many devices as in `group`.
    """
    matrix = read_matrix(text or "")
    if matrix is None or len(matrix.devices) != group.devices_per_node:
        return usual
    joined = islands(matrix, link)
    sizes = {len(island) for island in joined}
    consecutive = all(island == tuple(range(island[0], island[0] + len(island))) for island in joined)
    return sizes.pop() if len(sizes) == 1 and consecutive and sizes != {1} else usual


def _rate(path: Path) -> float | None:
    try:
        found = re.match(r"(\d+(?:\.\d+)?) Gb/sec", path.read_text("ascii", "replace"))
    except OSError:
        return None
    return float(found[1]) * 1e9 / 8 if found else None
