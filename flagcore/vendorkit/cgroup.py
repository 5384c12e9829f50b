"""The processor time and memory that a container allows this process, from control groups of version 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by a container's quota, at least
    one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores()
    return max(1, min(allowed, int(quota) if quota is not None else allowed))


def quota_cores(root: Path = ROOT) -> float | None:
    """Return the number of cores whose time this process may use, None without a limit."""
    limits = []
    for folder in _folders("cpu", root):
        quota = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit() and float(quota[1]) > 0:
            limits.append(float(quota[0]) / float(quota[1]))
    return min(limits, default=None)


def memory_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that this process and its siblings may use, None without a limit."""
    limits = []
    for folder in _folders("memory", root):
        words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        if words and words[0].isdigit():
            limits.append(int(words[0]))
    return min(limits, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the groups of this process, innermost first; each may have a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = top / path.lstrip("/")
        yield inner
        while inner != top and top in inner.parents:
            inner = inner.parent
            yield inner


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
