"""Reads reports of other clients: `vllm bench serve --save-result`, `sglang.bench_serving` (`--output-file`), guidellm
(`benchmarks.json`) and aiperf (`profile_export_aiperf.json`).

The inter-token latency of guidellm and aiperf has one value per request, so it is read as flagcore's TPOT (guidellm
weights it by tokens). aiperf's inter-chunk latency is read as flagcore's ITL. Goodput is omitted, because reports do
not contain the SLO.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore.domain.files import read_regular
from flagcore.domain.metrics import LATENCIES, STATISTICS
from flagcore.errors import UsageError

RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
MAX_NUMBER = 1e300
_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class ReportError(UsageError):
    """A report of another client is invalid, incomplete, or has failed requests."""


def read_report(path: str | Path) -> dict[str, float]:
    """Return the metrics of a report by flagcore's names, such as `ttft_s.p99` in seconds and `output_tokens_per_s`.

    The three rates are required; latencies are optional. Raises ReportError for an unknown, incomplete or ambiguous
    report, for failed requests, and for a missing rate.
    """
    try:
        figures = _figures(Path(path))
        if missing := [name for name in RATES if name not in figures]:
            raise ReportError(f"it lacks {', '.join(missing)}")
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ReportError(f"{path}: has an unknown format: {type(error).__name__} {error}") from None
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None
    return figures


def _figures(path: Path) -> dict[str, float]:
    text = read_regular(path, max_bytes=1 << 30).decode("utf-8-sig", errors="replace")
    try:
        data: Any = json.loads(text)
    except ValueError:
        data = _single_benchmark([_line(line) for line in text.split("\n") if line.strip()])
    if not isinstance(data, dict):
        raise ReportError("is not a report: the JSON is not an object")
    if isinstance(data.get("benchmarks"), list):
        return _guidellm(_single_benchmark(data["benchmarks"]))
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


def _single_benchmark(benchmarks: Sequence[Any]) -> Any:
    if len(benchmarks) != 1:
        raise ReportError(f"it has {len(benchmarks)} benchmarks instead of one")
    return benchmarks[0]


def _bench(data: Mapping[str, Any], *, e2e: str, total: str) -> dict[str, float]:
    """Read a report of vLLM's or SGLang's client. Both use milliseconds and almost the same names."""
    failed = data.get("failed") or sum(1 for error in data.get("errors") or () if error)
    _require_no_failures(failed, data.get("completed"))
    latencies = {}
    for name, report_name in zip(LATENCIES, ("ttft", "tpot", "itl", e2e), strict=True):
        summary = {statistic: data.get(f"{statistic}_{report_name}_ms") for statistic in STATISTICS}
        latencies[name] = {"p50": data.get(f"median_{report_name}_ms"), **_without_none(summary)}, 1e-3
    return _report_figures([data.get("output_throughput"), data.get(total), data.get("request_throughput")], latencies)


def _guidellm(data: Mapping[str, Any]) -> dict[str, float]:
    metrics = data["metrics"]
    totals = metrics["request_totals"]
    _require_no_failures(totals.get("errored"), totals.get("successful"))
    rates = ("output_tokens_per_second", "tokens_per_second", "requests_per_second")
    latencies = {}
    for name, report_name, unit in (
        ("ttft_s", "time_to_first_token_ms", 1e-3),
        ("tpot_s", "inter_token_latency_ms", 1e-3),
        ("e2e_s", "request_latency", 1.0),
    ):
        summary = (metrics.get(report_name) or {}).get("successful")
        if summary and summary.get("count", 1):
            latencies[name] = {"mean": summary["mean"], **summary["percentiles"]}, unit
    return _report_figures([metrics[name]["successful"]["mean"] for name in rates], latencies)


def _aiperf(data: Mapping[str, Any]) -> dict[str, float]:
    if data.get("was_cancelled") or data.get("is_complete") is False:
        raise ReportError(f"the run did not end: {data.get('incomplete_reason') or 'it was cancelled'}")
    _require_no_failures(
        (data.get("error_request_count") or {}).get("avg"), (data.get("request_count") or {}).get("avg")
    )
    rates = ("output_token_throughput", "total_token_throughput", "request_throughput")
    report_names = ("time_to_first_token", "inter_token_latency", "inter_chunk_latency", "request_latency")
    latencies = {}
    for latency, name in zip(LATENCIES, report_names, strict=True):
        if summary := data.get(name):
            if summary["unit"] not in _SECONDS:
                raise ReportError(f"{name} is in {summary['unit']!r}, which is an unknown unit of time")
            latencies[latency] = {**summary, "mean": summary.get("avg")}, _SECONDS[summary["unit"]]
    return _report_figures([(data.get(name) or {}).get("avg") for name in rates], latencies)


def _require_no_failures(failed: Any, completed: Any) -> None:
    for name, count in (("failed", failed), ("completed", completed)):
        if count and not _is_number(count):
            raise ReportError(f"the number of {name} requests is {count!r:.60}")
    if failed:
        raise ReportError(f"{failed:.0f} requests failed, so its figures do not describe the server")
    if not completed:
        raise ReportError("no request was completed")


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _report_figures(rates: Sequence[Any], latencies: Mapping[str, tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """Return the rates and the statistics of latencies in seconds, without those that are None.

    `latencies`: the statistics of each latency and the length of their unit in seconds. Raises ReportError for a value
    that is not a finite number of at least 0, and for a rate of 0.
    """
    values = {name: (rate, 1.0) for name, rate in zip(RATES, rates, strict=True)}
    for name, (summary, unit) in latencies.items():
        values |= {f"{name}.{statistic}": (summary.get(statistic), unit) for statistic in STATISTICS}
    figures = dict[str, float]()
    for name, (value, unit) in values.items():
        if value is None:
            continue
        if not _is_number(value) or (name in RATES and value == 0):
            raise ReportError(f"{name} is {value!r:.60}")
        figures[name] = value * unit
    return figures


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER
