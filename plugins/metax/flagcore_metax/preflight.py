"""Checks of the machine before trials."""

from pathlib import Path

from flagcore_metax.discover import DEVICE_FILE

PEER_MEMORY = "sys/kernel/mm/memory_peers/mxcd/version"
"""Missing if the kernel exports no mm_kobj (RHEL 9.6, for example). Then an all-reduce of two C500 nodes fell from 73
to 8 GB/s: wangzheng422/docker_env redhat/notes/2025/2025.12.metax.mccl.perf.debug.md."""


def peer_memory_problem(root: Path = Path("/")) -> str:
    """Return why adapters cannot access the devices' memory on this machine; empty if they can, or without devices."""
    if (root / PEER_MEMORY).exists() or not (root / DEVICE_FILE).exists():
        return ""
    return f"/{PEER_MEMORY} is missing: GPUDirect RDMA of MetaX is off, so nodes exchange data slowly"
