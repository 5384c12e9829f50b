"""The cores and the memory of this machine that a process may use, from its control groups of version 1 and 2."""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cores() -> int:
    """Return the number of cores that this process may use, at least one.

    It is the number of cores in the CPU affinity of the process, limited by the container's quota.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores()
    return max(1, min(allowed, int(quota) if quota is not None else allowed))


def quota_cores(root: Path = ROOT) -> float | None:
    """Return the CPU quota of this process's control groups, in cores, or None if there is no limit."""
    limits = []
    for folder in _folders("cpu", root):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit() and float(quota[1]) > 0:
            limits.append(float(quota[0]) / float(quota[1]))
    return min(limits, default=None)


def allowed_memory_bytes(root: Path = ROOT) -> int | None:
    """Return the memory limit of this process's control groups, in bytes, or None if there is no limit."""
    folders = _folders("memory", root)
    limits = (_words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes") for folder in folders)
    return min((int(words[0]) for words in limits if words and words[0].isdigit()), default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, innermost first. Each group may set a limit."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
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
    return text_of(file).split()


def text_of(path: Path) -> str:
    """Return the text of a small file of the kernel. It is empty if the file cannot be read."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
