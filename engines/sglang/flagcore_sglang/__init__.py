"""The SGLang server. Reads what it reports about itself."""

import json
import re
from collections.abc import Mapping
from typing import Any

from flagcore_serving.launch.reports import ServerReports, settings_in
from flagcore_serving.launch.server import Fetch

from flagcore.domain.space import KnobValue

SDK = ("engine",)

_SAME_NAMES = (
    *("page_size", "chunked_prefill_size", "max_prefill_tokens", "schedule_policy", "enable_mixed_chunk"),
    *("attention_backend", "enable_eplb", "hicache_size", "enable_torch_compile", "quantization"),
)
_KNOBS_BY_ARGUMENT = {
    **{name: name for name in _SAME_NAMES},
    "pp_size": "pipeline_model_parallel_size",
    "ep_size": "expert_model_parallel_size",
    "kv_cache_dtype": "kv_cache_type",
    "moe_runner_backend": "moe_backend",
    "ep_num_redundant_experts": "redundant_experts",
    "speculative_algorithm": "speculation",
}


def effective(fetch: Fetch, log: str) -> dict[str, KnobValue]:
    """Return the knob values in the server's arguments and the log. Raises OSError or ValueError on a failed request.

    Arguments whose values SGLang chose are null; the log line of the memory pool contains the values. With attention
    DP, SGLang reports chunk size and running requests per rank, but the flags set them for all ranks together.
    """
    info = _server_info(fetch)
    values: dict[str, KnobValue] = {
        knob: info[name] for name, knob in _KNOBS_BY_ARGUMENT.items() if isinstance(info.get(name), (int, str))
    }
    values |= settings_in(log, REPORTS.settings)
    data = _data(info)
    if isinstance(info.get("tp_size"), int):
        values |= {"tensor_model_parallel_size": info["tp_size"] // data, "data_parallel_size": data}
    for knob in ("chunked_prefill_size", "max_running_requests"):
        value = values.get(knob)
        if isinstance(value, int) and value > 0:
            values[knob] = value * data
    for name, knob, value_if_true in (
        ("disable_radix_cache", "enable_prefix_caching", False),
        ("disable_cuda_graph", "enforce_eager", True),
        ("disable_overlap_schedule", "async_scheduling", False),
    ):
        if isinstance(info.get(name), bool):
            values[knob] = info[name] is value_if_true
    if isinstance(is_whole := info.get("mm_enable_dp_encoder"), bool):
        values["mm_encoder_tp_mode"] = "data" if is_whole else "weights"
    if values.get("speculation") == "EAGLE":  # ambiguous: SGLang also reports it for NEXTN
        del values["speculation"]
    is_ngram = info.get("speculative_algorithm") == "NGRAM"
    drafted = info.get("speculative_num_draft_tokens" if is_ngram else "speculative_num_steps")
    if isinstance(drafted, int):
        values["speculative_tokens"] = drafted
    if isinstance(info.get("mem_fraction_static"), float):
        values["mem_fraction_static"] = f"{info['mem_fraction_static']:g}"
    return values


_CACHE_LINE = re.compile(r"KV Cache is allocated\..*?(?:K size: ([\d.]+) GB, V size: ([\d.]+) GB|KV size: ([\d.]+) GB)")


def _pools(log: str) -> dict[str, float]:
    """Return the KV cache size on the fullest rank in GiB, as a metric. SGLang's log prints GiB as GB."""
    pools = [sum(float(part) for part in line if part) for line in _CACHE_LINE.findall(log)]
    return {"kv_cache_gib": max(pools)} if pools else {}


def _server_info(fetch: Fetch) -> dict[str, Any]:
    try:
        return dict(json.loads(fetch("/server_info")))
    except OSError:
        return dict(json.loads(fetch("/get_server_info")))  # the path of earlier releases


def _data(info: Mapping[str, Any]) -> int:
    """Return the attention DP size in a server's `info`. Older releases report it as `dp_size`."""
    size = info.get("attn_dp_size")
    if isinstance(size, int) and size > 1:
        return size
    return int(info.get("dp_size") or 1) if info.get("enable_dp_attention") else 1


REPORTS = ServerReports.read(__name__, effective=effective, own_memory=_pools)
