"""Checks of the machine before trials."""

from pathlib import Path

from flagcore_metax.discover import DEVICE_FILE

PEER_MEMORY = "sys/kernel/mm/memory_peers/mxcd/version"
"""A file that exists if GPUDirect RDMA works. It is missing if the kernel does not export mm_kobj (RHEL 9.6, for
example). An all-reduce over two C500 nodes then fell from 73 to 8 GB/s: wangzheng422/docker_env
redhat/notes/2025/2025.12.metax.mccl.perf.debug.md."""


def peer_memory_problem(root: Path = Path("/")) -> str:
    """Return why network adapters cannot access the devices' memory. It is empty if they can, or if there are no
    devices.
    """
    if (root / PEER_MEMORY).exists() or not (root / DEVICE_FILE).exists():
        return ""
    return f"/{PEER_MEMORY} is missing: GPUDirect RDMA of MetaX is off, so nodes exchange data slowly"
