"""The vLLM server. Reads what it reports about itself. Source: vllm 0.32 `v1/engine/core.py`."""

from flagcore_serving.launch.reports import ServerReports, labels, settings_in
from flagcore_serving.launch.server import Fetch

from flagcore.domain.space import KnobValue

SDK = ("cache", "engine")


def effective(fetch: Fetch, log: str) -> dict[str, KnobValue]:
    """Return the knob values in /metrics and the log. Raises OSError if /metrics does not respond.

    vLLM reports `max_num_seqs` only if it was set. Block size and memory share are in /metrics.
    """
    values = settings_in(log, REPORTS.settings)
    if "async_scheduling" in values:
        values["async_scheduling"] = "on" if values["async_scheduling"] in (True, "enabled") else "off"
    for name in ("compilation_mode", "optimization_level"):
        if name in values:
            values[name] = str(values[name])
    cache = labels(fetch("/metrics"), "vllm:cache_config_info")
    if cache.get("block_size", "").isdigit():
        values["block_size"] = int(cache["block_size"])
    if cache.get("enable_prefix_caching") in ("True", "False"):
        values["enable_prefix_caching"] = cache["enable_prefix_caching"] == "True"
    if share := cache.get("gpu_memory_utilization"):
        values["gpu_memory_utilization"] = f"{float(share):g}"
    return values


REPORTS = ServerReports.read(__name__, effective=effective)
