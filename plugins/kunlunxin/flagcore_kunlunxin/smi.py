"""Reads xpu-smi's table, which has three lines per device. Intel's tool of the same name is ignored."""

import re
from functools import partial

from flagcore_vendorkit.rows import (
    BUS,
    Listing,
    Row,
    parse_memory,
    parse_power,
    read_processes,
    read_table,
    reading,
    search,
    strip_controls,
    with_driver,
)

from flagcore.domain.chip import Device

_TITLE = re.compile(r"\| XPU-SMI +Driver Version: (\S+)")
_NAME = re.compile(r"(\d+) +([A-Z]\d{3}\S*( \S+)*?) +\S+")
_PROCESS = re.compile(r"(?m)^ *\| +(\d+) +\S+ +\S+ +(\d+) +\S+ +(\S.*?) +(\d+)MiB *\| *$")
"""A line of the list of processes: device, two instance numbers, process, type, name and MiB."""

processes = partial(read_processes, pattern=_PROCESS)


def is_xpu(name: str) -> bool:
    """Return whether `name` is the name of a Kunlunxin card, such as `P800 OAM`."""
    return re.match(r"(Kunlunxin )?[PR]\d{3}", name) is not None


def read(text: str) -> Listing:
    """Return the devices in the table, without virtual devices."""
    text = strip_controls(text)
    title = _TITLE.search(text)
    if title is None:
        return Listing()
    return with_driver(read_table(text, _head, _body, lines_per_device=3), title[1])


def _head(parts: list[str]) -> tuple[int, str] | None:
    name = _NAME.fullmatch(parts[0]) if len(parts) == 3 else None
    return (int(name[1]), name[2]) if name and BUS.fullmatch(parts[1].split(" ")[0]) else None


def _body(head: tuple[int, str], parts: list[str], after: list[str]) -> Row | str | None:
    index, name = head
    memory = parse_memory(parts[1]) if len(parts) == 3 else None
    if memory is None or memory[1] == 0:
        return None
    if name.endswith(" VF"):
        return f"XPU {index} ({name}) is a part of another"
    watts, limit = parse_power(parts[0])
    return Row(
        device=Device(index=index, chip=name, memory_bytes=int(memory[1])),
        reading=reading(
            used_bytes=memory[0],
            watts=watts,
            limit_watts=limit,
            celsius=search(r"\b(\d+)C\b", parts[0])[0],
            percent=search(r"(\d+)%", parts[2])[0],
        ),
    )
