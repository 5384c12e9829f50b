"""What is looked at before a trial: things that make it slow without telling."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from flagcore_metax.discover import DEVICE_FILE

LOG = logging.getLogger(__name__)
PEER_MEMORY = "sys/kernel/mm/memory_peers/mxcd/version"
"""Missing where the kernel exports no mm_kobj (RHEL 9.6 for one); then an all-reduce of two C500 nodes fell from 73 to
8 GB/s: wangzheng422/docker_env redhat/notes/2025/2025.12.metax.mccl.perf.debug.md."""


@cache
def peer_memory(root: Path = Path("/")) -> bool:
    """Return whether adapters can reach the devices' memory here, and warn once if not; True without any device."""
    reaches = (root / PEER_MEMORY).exists() or not (root / DEVICE_FILE).exists()
    if not reaches:
        LOG.warning("/%s is missing: GPUDirect RDMA of MetaX is off, so nodes exchange slowly", PEER_MEMORY)
    return reaches
