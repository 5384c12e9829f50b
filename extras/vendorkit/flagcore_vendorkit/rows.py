"""Reads the tables that management tools print: devices, and their links (`topo -m`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from flagcore.domain.chip import Device, DeviceUse, Fact, Source
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.host import text_of

BUS = re.compile(r"\b[0-9A-Fa-f]{1,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b")
_PLACE = re.compile(rf"{BUS.pattern}(?: +(?:On|Off|N/A))?")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\r\x00\ufeff]")
_AMOUNT = r"(\d+(?:\.\d+)?)\s*(B|[KMGT]iB)?"
_PAIR = re.compile(rf"{_AMOUNT}\s*/\s*{_AMOUNT}")
_WATTS, _MISSING = r"(\d+(?:\.\d+)?)", r"(?:N/?A|ERR!)"
_POWER = re.compile(rf"(?:(?<![\w.-]){_WATTS} ?W?|{_MISSING}) */ *(?:{_WATTS} ?W|{_MISSING})")

_PROCESS = re.compile(r"(?m)^ *\| +(\d+)(?: +/)? +(\d+) +(\S.*?) +(\d+)(?: MiB)? *\| *$")
"""Matches a line of the table of processes: device, possibly a virtual function, process, name and MiB."""

Head = TypeVar("Head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One device of a table, and its telemetry. The keys of `reading` end in the unit."""

    device: Device
    reading: Mapping[str, float] = field(default_factory=dict)
    mode: str = ""
    """The compute mode, as the tool prints it."""
    use: DeviceUse = field(default_factory=DeviceUse)
    """The users of the device, as far as the tool prints them."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The usable devices in a tool's output, and sentences about the devices that were left out."""

    rows: tuple[Row, ...] = ()
    left_out: tuple[str, ...] = ()

    def or_else(self, other: Callable[[], Listing]) -> Listing:
        """Return this listing, or `other` if this one is empty."""
        return self if self.rows or self.left_out else other()


def strip_controls(text: str) -> str:
    """Return `text` without colours, carriage returns and byte-order marks, and with plain spaces."""
    return _CONTROL.sub("", text).replace("\xa0", " ")


def parse_json(text: str) -> object:
    """Return the JSON object or list in `text`, or None. The text may begin with titles and warnings."""
    text = strip_controls(text)
    start = re.search(r"(?m)^\s*[\[{]", text)
    try:
        return json.JSONDecoder().raw_decode(text[start.end() - 1 :])[0] if start else None
    except ValueError:
        return None


def cells(line: str) -> list[str]:
    """Return the cells of a table line, which bars separate. Other lines and truncated lines have no cells."""
    line = line.strip()
    return [cell.strip() for cell in line[1:-1].split("|")] if line[:1] == line[-1:] == "|" and len(line) > 1 else []


def read_table(
    text: str,
    head: Callable[[list[str]], Head | None],
    body: Callable[[Head, list[str], list[str]], Row | str | None],
    *,
    split: Callable[[str], list[str]] = cells,
    lines_per_device: int = 2,
) -> Listing:
    """Return the devices of a table with two or more lines per device, each split by `split`.

    `head` parses the cells of a device's first line and returns None for any other line. `body` receives the result,
    the cells of the second line and those of the line after it. It returns a row, a reason if the device cannot be
    used, or None for an unknown format. Devices without a row are reported in `left_out`.
    """
    found = list[Row | str]()
    lines = [line.strip() for line in text.splitlines()]
    cells_by_line = [split(line) for line in lines]
    end = 0
    for at, parts in enumerate(cells_by_line):
        if at < end:  # a body line cannot be a head
            continue
        start = head(parts) if len(parts) > 1 else None
        if start is not None:
            below, after = (cells_by_line[at + n] if at + n < len(cells_by_line) else [] for n in (1, 2))
            row = body(start, below, after)
            end = at + lines_per_device if isinstance(row, Row) else at + 1
            found.append(f"unknown format (please report it): {' '.join(lines[at : at + 2])}" if row is None else row)
        elif len(parts) > 2 and re.match(r"\d+\s+\S", parts[0]) and any(BUS.search(part) for part in parts):
            found.append(f"unknown format (please report it): {lines[at]}")
    return listing_of(found)


Named = tuple[int, str, list[str]]
"""The index and the name of a device, and all cells of its first line."""


def table_reader(
    title: str,
    name: re.Pattern[str],
    body: Callable[[Named, list[str], list[str]], Row | str | None],
    *,
    split: Callable[[str], list[str]] = cells,
    lines_per_device: int = 2,
) -> Callable[[str], Listing]:
    """Return a reader of tables with a title and the version of the driver, and none of other texts.

    A device's first line has three cells: the second one has its PCI address, and maybe a switch. The groups of `name`
    are its index and its name in the first one. The other arguments are those of `read_table`.
    """

    def head(parts: list[str]) -> Named | None:
        found = name.fullmatch(parts[0]) if len(parts) == 3 and _PLACE.fullmatch(parts[1]) else None
        return (int(found[1]), found[2], parts) if found else None

    def read(text: str) -> Listing:
        text = strip_controls(text)
        if not re.search(title, text):
            return Listing()
        found = read_table(text, head, body, split=split, lines_per_device=lines_per_device)
        return with_driver(found, search(r"Driver Version: *([\w.-]+)", text)[0])

    return read


def read_processes(text: str, pattern: re.Pattern[str] = _PROCESS) -> dict[int, tuple[str, ...]]:
    """Return the processes of each device from the table of processes, such as `4711 python (20.5 GiB)`.

    The groups of `pattern` are the index of the device, the process, its name and its MiB.
    """
    found: dict[int, tuple[str, ...]] = {}
    for table in re.split(r"(?im)^.*\bprocess(?:es)?:", strip_controls(text), maxsplit=1)[1:]:
        for index, pid, name, used in pattern.findall(table):
            found[int(index)] = (*found.get(int(index), ()), f"{pid} {name} ({int(used) / 1024:.1f} GiB)")
    return found


def blocked_reason(mode: str, processes: Sequence[str]) -> str:
    """Return why no process can start on a device in compute mode `mode`, or an empty string if one can start."""
    if mode == "Prohibited":
        return "is in compute mode Prohibited"
    exclusive = mode.startswith(("Exclusive", "E. "))
    return f"is in compute mode {mode}, and {processes[0]} uses it" if exclusive and processes else ""


def listing_of(found: Iterable[Row | str]) -> Listing:
    """Return the rows whose index occurs once, sorted by index, and sentences about the devices that were left out.

    The strings in `found` are such sentences.
    """
    mixed = tuple(found)
    rows = sorted((each for each in mixed if isinstance(each, Row)), key=lambda row: row.device.index)
    count = Counter(row.device.index for row in rows)
    duplicates = (f"several devices have the index {index}" for index, many in count.items() if many > 1)
    left_out = (*(each for each in mixed if isinstance(each, str)), *duplicates)
    return Listing(tuple(row for row in rows if count[row.device.index] == 1), left_out)


def with_driver(listing: Listing, driver: str | None) -> Listing:
    """Return `listing` with the version of the driver in each device that lacks one."""
    rows = (replace(row, device=replace(row.device, driver=row.device.driver or driver or "")) for row in listing.rows)
    return replace(listing, rows=tuple(rows))


def parse_memory(cell: str) -> tuple[float, float] | None:
    """Return the used and total bytes in a cell such as `826/65536 MiB` or `0MiB / 81559MiB`, or else None."""
    match = _PAIR.fullmatch(cell)
    if match is None or match[4] is None:
        return None
    return float(match[1]) * UNITS[match[2] or match[4]], float(match[3]) * UNITS[match[4]]


def parse_power(cell: str) -> tuple[str | None, str | None]:
    """Return the used power and its limit in a cell such as `P0 70W / 700W` or `61 / 450 W`. Missing ones are None."""
    pair = _POWER.search(cell)
    return (pair[1], pair[2]) if pair else (search(r"(\d+(?:\.\d+)?) ?W\b", cell)[0], None)


def reading(
    *,
    used_bytes: float | None = None,
    watts: str | None = None,
    limit_watts: str | None = None,
    celsius: str | None = None,
    percent: str | None = None,
    megahertz: str | None = None,
) -> dict[str, float]:
    """Return the telemetry of a device in bytes, watts, degrees Celsius, fractions and hertz.

    Values that are not numbers are omitted. Drivers report 65535, all bits of a 16-bit field, for a sensor that they
    cannot read.
    """
    words = {
        "power_watts": (watts, 1),
        "power_limit_watts": (limit_watts, 1),
        "temperature_celsius": (celsius, 1),
        "utilization_share": (percent, 0.01),
        "clock_hertz": (megahertz, 1e6),
    }
    figures = {name: float(word) * unit for name, (word, unit) in words.items() if word and _number(word)}
    return figures if used_bytes is None else {"memory_used_bytes": used_bytes, **figures}


def usual_row(
    index: int, name: str, parts: Sequence[str], *, driver: str = "", shares_host: bool = False, **more: str | None
) -> Row | None:
    """Return a device from a line with three cells: temperature and power, memory, and load. None for another form.

    `shares_host`: whether the cell of the memory may have no figures. `more`: the row's `mode`, and arguments of
    `reading` that are not in these cells, or not in this form.
    """
    memory = parse_memory(parts[1]) if len(parts) == 3 else None
    if len(parts) != 3 or (memory is None and not shares_host):
        return None
    used, total = memory or (None, None)
    watts, limit = parse_power(parts[0])
    mode = more.pop("mode", None)
    figures = {"celsius": search(r"(\d+)C\b", parts[0])[0], "percent": search(r"(\d+)%", parts[2])[0], **more}
    return Row(
        device=Device(index=index, chip=name, memory_bytes=None if total is None else int(total), driver=driver),
        reading=reading(used_bytes=used, watts=watts, limit_watts=limit, **figures),
        mode=mode or "",
    )


def search(pattern: str, text: str) -> tuple[str | None, ...]:
    """Return the groups of the first match of `pattern`. Without a match, all groups are None."""
    compiled = re.compile(pattern)
    match = compiled.search(text)
    return match.groups() if match else (None,) * compiled.groups


def _number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word.strip()) is not None and float(word) != 0xFFFF


NEAR = ("PIX", "PXB")
"""Names of links to an adapter that do not cross the CPU."""

_DEVICE = re.compile(r"(?!NIC)[A-Z]{3}(\d+)")
"""Matches the name of a device: three letters and a number. Adapters are named NIC0 or have their own names."""

_AFFINITY = re.compile(r"(?:CPU|NUMA|Node) Affinity|GPU NUMA ID")
"""Matches the columns after the devices and adapters."""


class Matrix(NamedTuple):
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
    names, affinities = _AFFINITY.split(lines[start])[0].split(), _AFFINITY.findall(lines[start])
    devices = {name: int(match[1]) for name in names if (match := _DEVICE.fullmatch(name))}
    cells = _cells_by_device(words[start + 1 :], [*names, *affinities], len(names))
    is_one_kind = len({name.rstrip("0123456789") for name in devices}) == 1
    if not is_one_kind or len(devices) != len({*devices.values()}) or {*cells} != {*devices.values()}:
        return None
    return _matrix(names, devices, cells)


def _matrix(names: Sequence[str], devices: Mapping[str, int], cells: Mapping[int, Mapping[str, str]]) -> Matrix | None:
    """Return the matrix with these columns and cells, or None if both directions of a pair differ."""
    pairs = {(a, b): cells[a][name] for a in devices.values() for name, b in devices.items()}
    if any(cell != (pairs[b, a] if a != b else "X") for (a, b), cell in pairs.items()):
        return None
    others = [name for name in names if name not in devices]
    return Matrix(
        devices=tuple(devices.values()),
        links={(a, b): cell for (a, b), cell in pairs.items() if a != b},
        adapters={(device, name): cells[device][name] for device in devices.values() for name in others},
    )


def _cells_by_device(rows: Sequence[Sequence[str]], columns: Sequence[str], width: int) -> dict[int, dict[str, str]]:
    """Return the cells of the first complete row of each device by their columns."""
    found = dict[int, dict[str, str]]()
    for label, *cells in rows:
        if (device := _DEVICE.fullmatch(label)) and len(cells) >= width:
            found.setdefault(int(device[1]), dict(zip(columns, cells, strict=False)))
    return found


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
    found = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text_of(path))
    return float(found[1]) * 1e9 / 8 if found else None
