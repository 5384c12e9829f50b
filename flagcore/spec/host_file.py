"""Reads host files: one `host slots=8 type=LABEL` per line, as in MPI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagcore.spec.data_file import read_text
from flagcore.spec.plain_data import spec_error
from flagcore.spec.schema import MAX_DEVICES

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
