"""Host files: one `host slots=8` a line, `#` starts a comment."""

from __future__ import annotations

import re
from pathlib import Path

from flagcore.spec.data_file import read_text
from flagcore.spec.limits import MAX_DEVICES
from flagcore.spec.plain_data import spec_error

_HOST = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:\[\]\-]{0,252}")

UNEQUAL = "differs from the first host in slots or type, but all nodes must be equal"


def read_hosts(path: Path, *, file: str) -> tuple[tuple[str, ...], int | None]:
    """Return the hosts and the number of devices of each (None where no line has `slots`).

    `slots` and the label `type` are the same on all lines or on none, because the nodes of a cluster are equal.
    `file` is the spec that names it. Raises SpecError with the line's number.
    """
    hosts: dict[str, dict[str, str]] = {}
    for number, line in enumerate(read_text(path, file=file, key="cluster.hostfile").splitlines(), start=1):
        host, *pairs = line.partition("#")[0].split() or [""]
        if not host:
            continue
        options = dict(pair.partition("=")[::2] for pair in pairs)
        problem = _problem(host, pairs, options, hosts)
        if problem:
            fix = "write lines such as `node-1 slots=8`"
            raise spec_error(f"line {number}", problem, value=line.strip(), fix=fix, file=str(path))
        hosts[host] = options
    if not hosts:
        raise spec_error("cluster.hostfile", "names no host", fix="write one `host slots=8` a line", file=str(path))
    slots = next(iter(hosts.values())).get("slots")
    return tuple(hosts), int(slots) if slots else None


def _problem(host: str, pairs: list[str], options: dict[str, str], hosts: dict[str, dict[str, str]]) -> str:
    if not _HOST.fullmatch(host):
        return "does not start with the name of a host"
    if host in hosts:
        return "names a host for the second time"
    if len(options) < len(pairs) or not set(options) <= {"slots", "type"}:
        return "has something else than slots=NUMBER and type=LABEL after the host"
    slots = options.get("slots", "1")
    if not re.fullmatch("[0-9]{1,7}", slots) or not 1 <= int(slots) <= MAX_DEVICES:
        return f"must give slots from 1 to {MAX_DEVICES}"
    if hosts and options != next(iter(hosts.values())):
        return UNEQUAL
    return ""
