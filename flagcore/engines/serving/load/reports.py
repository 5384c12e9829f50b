"""Reports of other clients, read into our figures: `vllm bench serve --save-result`, `sglang.bench_serving`
(`--output-file`), guidellm (`benchmarks.json`) and aiperf (`profile_export_aiperf.json`).

What guidellm and aiperf call inter-token latency is one value a request, our TPOT (guidellm weighs it by tokens);
aiperf's inter-chunk latency is our ITL. Goodput is left out: its limits are not in the report, or not ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore.errors import UsageError

RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class ReportError(UsageError):
    """A report of another client lacks what is needed, holds failed requests, or is none."""


def read_report(path: str | Path) -> dict[str, float]:
    """Return the figures of a report, named as ours: `ttft_s.p99` in seconds, `output_tokens_per_s`.

    A report always has the three rates; latencies are those that the client wrote. Raises ReportError for an unknown or
    unfinished report, one of several benchmarks, with failed requests, or without a rate.
    """
    try:
        figures = _figures(Path(path))
        if lacking := [name for name in RATES if name not in figures]:
            raise ReportError(f"it lacks {', '.join(lacking)}")
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ReportError(f"{path}: is not as its client writes it: {type(error).__name__} {error}") from None
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None
    return figures


def _figures(path: Path) -> dict[str, float]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        data: Any = json.loads(text)
    except ValueError:
        data = _only([_line(line) for line in text.split("\n") if line.strip()])
    if not isinstance(data, dict):
        raise ReportError("is not a report: the JSON is not an object")
    if isinstance(data.get("benchmarks"), list):
        return _guidellm(_only(data["benchmarks"]))
    if isinstance(data.get("output_token_throughput"), dict):
        return _aiperf(data)
    if "median_e2e_latency_ms" in data:
        return _bench(data, e2e="e2e_latency", total="total_throughput")
    if "output_throughput" in data and "duration" in data:
        return _bench(data, e2e="e2el", total="total_token_throughput")
    raise ReportError("is not a report of vllm bench serve, sglang.bench_serving, guidellm or aiperf")


def _line(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise ReportError("is neither JSON nor JSON lines") from None


def _only(several: Sequence[Any]) -> Any:
    if len(several) != 1:
        raise ReportError(f"it has {len(several)} benchmarks instead of one")
    return several[0]


def _bench(data: Mapping[str, Any], *, e2e: str, total: str) -> dict[str, float]:
    """Read what vLLM's and SGLang's clients write: milliseconds, under nearly the same names."""
    failed = data.get("failed") or sum(1 for error in data.get("errors") or () if error)
    _none_failed(failed, data.get("completed"))
    figures = {
        "output_tokens_per_s": data.get("output_throughput"),
        "total_tokens_per_s": data.get(total),
        "requests_per_s": data.get("request_throughput"),
    }
    for ours, theirs in (("ttft_s", "ttft"), ("tpot_s", "tpot"), ("itl_s", "itl"), ("e2e_s", e2e)):
        for statistic in ("mean", "p50", "p90", "p99"):
            names = [f"{statistic}_{theirs}_ms", f"median_{theirs}_ms" if statistic == "p50" else ""]
            figures[f"{ours}.{statistic}"] = next((data[name] * 1e-3 for name in names if name in data), None)
    return _numbers(figures)


def _guidellm(data: Mapping[str, Any]) -> dict[str, float]:
    metrics = data["metrics"]
    totals = metrics["request_totals"]
    _none_failed(totals.get("errored"), totals.get("successful"))
    figures = {
        ours: metrics[theirs]["successful"]["mean"]
        for ours, theirs in zip(
            RATES, ("output_tokens_per_second", "tokens_per_second", "requests_per_second"), strict=True
        )
    }
    latencies = (
        ("ttft_s", "time_to_first_token_ms", 1e-3),
        ("tpot_s", "inter_token_latency_ms", 1e-3),
        ("e2e_s", "request_latency", 1.0),
    )
    for ours, theirs, unit in latencies:
        summary = (metrics.get(theirs) or {}).get("successful")
        if summary and summary.get("count", 1):
            values = {"mean": summary["mean"], **summary["percentiles"]}
            figures |= {f"{ours}.{name}": values[name] * unit for name in ("mean", "p50", "p90", "p99")}
    return _numbers(figures)


def _aiperf(data: Mapping[str, Any]) -> dict[str, float]:
    if data.get("was_cancelled") or data.get("is_complete") is False:
        raise ReportError(f"the run did not end: {data.get('incomplete_reason') or 'it was cancelled'}")
    _none_failed((data.get("error_request_count") or {}).get("avg"), (data.get("request_count") or {}).get("avg"))
    theirs = ("output_token_throughput", "total_token_throughput", "request_throughput")
    figures = {ours: (data.get(name) or {}).get("avg") for ours, name in zip(RATES, theirs, strict=True)}
    latencies = (
        ("ttft_s", "time_to_first_token"),
        ("tpot_s", "inter_token_latency"),
        ("itl_s", "inter_chunk_latency"),
        ("e2e_s", "request_latency"),
    )
    for ours, name in latencies:
        found = data.get(name)
        if not found:
            continue
        if found["unit"] not in _SECONDS:
            raise ReportError(f"{name} is in {found['unit']!r}, which is an unknown unit of time")
        unit = _SECONDS[found["unit"]]
        for statistic, key in (("mean", "avg"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99")):
            value = found.get(key)
            figures[f"{ours}.{statistic}"] = None if value is None else value * unit
    return _numbers(figures)


def _none_failed(failed: Any, completed: Any) -> None:
    if failed:
        raise ReportError(f"{failed:.0f} requests failed, so its figures do not describe the server")
    if not completed:
        raise ReportError("no request was completed")


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that there are. Raises ReportError for one that is not finite, or a rate of 0."""
    found = {name: float(value) for name, value in figures.items() if value is not None}
    for name, value in found.items():
        if not math.isfinite(value) or value < 0 or (name in RATES and value == 0):
            raise ReportError(f"{name} is {value}")
    return found
