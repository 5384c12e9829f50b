"""Reads what llama-server reports about itself."""

import json
import re

from flagcore_serving.launch.reports import ServerReports, settings_in
from flagcore_serving.launch.server import Fetch

from flagcore.domain.space import KnobValue

_CACHE_LINE = re.compile(r"llama_kv_cache: size = .* K \((\w+)\):.* V \((\w+)\):")
_OFFLOADED_LINE = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")


def effective(fetch: Fetch, log: str) -> dict[str, KnobValue]:
    """Return the knob values in /props and the log, without the values of a draft model."""
    props = json.loads(fetch("/props"))
    values = {"parallel": int(props["total_slots"])} | settings_in(log, REPORTS.settings)
    words = {"enabled": "on", "disabled": "off", "true": "on", "false": "off"}
    for knob in ("flash_attention", "kv_unified"):
        if knob in values:
            values[knob] = words.get(str(values[knob]), values[knob])
    if values.get("kv_unified") != "on":
        values["context_len"] = int(props["default_generation_settings"]["n_ctx"])
    if cache := _CACHE_LINE.search(log):
        values["kv_cache_type"] = cache[1] if cache[1] == cache[2] else f"{cache[1]}/{cache[2]}"
    layers = _OFFLOADED_LINE.search(log)
    if layers and layers[1] != layers[2]:  # if all layers are offloaded, the flag may be any larger number
        values["n_gpu_layers"] = int(layers[1])
    return values


_BUFFER_LINE = re.compile(r"\b(\w+)\s+(model|KV|compute) buffer size\s*=\s*([\d.]+) MiB")
_KINDS = {"model": "weights_gib", "KV": "kv_cache_gib", "compute": "compute_gib"}
_CELLS_LINE = re.compile(r"llama_kv_cache: size = .*\(\s*(\d+) cells,.*?(\d+)/\d+ seqs\)")


def _memory(log: str) -> dict[str, float]:
    """Return the memory that a log reports, by metric: buffers in GiB on the fullest device, and cached tokens."""
    buffers: dict[tuple[str, str], float] = {}
    for device, kind, size in dict.fromkeys(_BUFFER_LINE.findall(log)):
        buffers[kind, device] = buffers.get((kind, device), 0.0) + float(size) / 1024
    figures: dict[str, float] = {}
    for (kind, _), gib in buffers.items():
        figures[_KINDS[kind]] = max(gib, figures.get(_KINDS[kind], 0.0))
    if cells := [float(size) * float(streams) for size, streams in _CELLS_LINE.findall(log)]:
        figures["kv_cache_tokens"] = max(cells)
    return figures


REPORTS = ServerReports.read("flagcore_llamacpp", effective=effective, own_memory=_memory)
