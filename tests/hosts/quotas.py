"""Hosts of different speed: the processes of a host have a share of a core."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.bed import Bed

CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
SHARES = 1 << 18
"""The weight of a host's processes, so that others on this machine do not slow them down; 1024 is that of others."""


@contextmanager
def quotas(bed: Bed, shares: Mapping[str, float]) -> Iterator[None]:
    """Limit the processes of each host to a share of a core. Skips the test where quotas cannot be set."""
    joined: dict[str, Path] = {}
    try:
        for host, share in shares.items():
            group = joined[host] = CGROUP / f"flagcore-{os.getpid()}-{host}"
            group.mkdir()
            (group / "cpu.shares").write_text(str(SHARES))
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
            bed.join(host, group)
        yield
    except OSError as error:
        pytest.skip(f"no cgroup with a quota: {error}")
    finally:
        for host, group in joined.items():
            bed.join(host, CGROUP)
            if group.exists():
                group.rmdir()
