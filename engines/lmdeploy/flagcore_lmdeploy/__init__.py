"""The LMDeploy server. Reads what it reports about itself."""

import re

from flagcore_serving.launch.reports import ServerReports, largest_matches, settings_in
from flagcore_serving.launch.server import Fetch
from flagcore_serving.load.result import GENERATE

from flagcore.domain.space import KnobValue


def effective(fetch: Fetch, log: str) -> dict[str, KnobValue]:
    """Return the knob values that the selected backend logs."""
    for backend, line in (("pytorch", "Building CacheEngine with config"), ("turbomind", "turbomind engine config")):
        if line in log:
            return {"backend": backend, **settings_in(log, REPORTS.settings)}
    return {}


def _memory(log: str) -> dict[str, float]:
    """Return the size of the cache by metric: TurboMind logs MB, the PyTorch engine logs blocks."""
    if blocks := re.search(r"CacheConfig\(.*\bblock_size=(\d+).*\bnum_gpu_blocks=(\d+)", log):
        return {"kv_cache_tokens": float(blocks[1]) * float(blocks[2])}
    return largest_matches(log, {"kv_cache_gib": r"Object cache budget: ([\d.]+) MB"}, 1 / 1024)


REPORTS = ServerReports.read(
    __name__,
    effective=effective,
    own_memory=_memory,
    api=GENERATE,  # its completions accept only text
)
