"""Reports of other clients: their figures under our names, and what is no report or lacks something.

The reports here have the keys, units and nesting that vllm 0.32, sglang 0.5.23, guidellm 0.8.1 and aiperf 0.13 write.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from flagcore.engines.serving.load.reports import ReportError, read_report


def of_bench(e2e: str, total: str) -> dict[str, Any]:
    report: dict[str, Any] = {
        "duration": 10.0,
        "completed": 20,
        "request_throughput": 2.0,
        "output_throughput": 128.0,
        total: 384.0,
    }
    for place, name in enumerate(("ttft", "tpot", "itl", e2e), 1):
        report |= {f"mean_{name}_ms": place * 100, f"median_{name}_ms": place * 110, f"std_{name}_ms": 1}
        report |= {f"p90_{name}_ms": place * 120, f"p99_{name}_ms": place * 130}
    return report


def vllm(**changes: Any) -> dict[str, Any]:
    return of_bench("e2el", "total_token_throughput") | {"failed": 0, "request_goodput": None} | changes


def sglang(**changes: Any) -> dict[str, Any]:
    return of_bench("e2e_latency", "total_throughput") | {"backend": "vllm", "input_throughput": 256.0} | changes


def guidellm(**changes: Any) -> dict[str, Any]:
    def summary(mean: float) -> dict[str, Any]:
        percentiles = {"p50": mean * 1.1, "p90": mean * 1.2, "p99": mean * 1.3}
        one = {"mean": mean, "count": 20, "percentiles": percentiles}
        return {"successful": one, "errored": {**one, "mean": 1e9}, "total": {**one, "mean": 1e9}}

    metrics = {
        "request_totals": {"successful": 20, "errored": 0, "incomplete": 3, "total": 23},
        "requests_per_second": summary(2.0),
        "output_tokens_per_second": summary(128.0),
        "tokens_per_second": summary(384.0),
        "time_to_first_token_ms": summary(100.0),
        "inter_token_latency_ms": summary(200.0),
        "time_per_output_token_ms": summary(1e6),
        "request_latency": summary(0.4),
    }
    return {"metadata": {"version": 2}, "benchmarks": [{"duration": 10.0, "metrics": metrics | changes}]}


def aiperf(**changes: Any) -> dict[str, Any]:
    def milliseconds(mean: float) -> dict[str, Any]:
        return {"unit": "ms", "avg": mean, "p50": mean * 1.1, "p90": mean * 1.2, "p99": mean * 1.3, "std": 1}

    return {
        "schema_version": "1.4",
        "request_count": {"unit": "requests", "avg": 20.0},
        "request_throughput": {"unit": "requests/sec", "avg": 2.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 128.0},
        "total_token_throughput": {"unit": "tokens/sec", "avg": 384.0},
        "time_to_first_token": milliseconds(100),
        "inter_token_latency": milliseconds(200),
        "inter_chunk_latency": milliseconds(300),
        "request_latency": milliseconds(400),
        "error_request_count": None,
        "was_cancelled": False,
    } | changes


def read(folder: Path, report: Any) -> dict[str, float]:
    file = folder / "report.json"
    file.write_text(report if isinstance(report, str) else json.dumps(report))
    return read_report(file)


@pytest.mark.parametrize("client", [vllm, sglang, guidellm, aiperf])
def test_report_gives_rates_and_latencies_in_seconds(client: Any, tmp_path: Path) -> None:
    figures = read(tmp_path, client())
    assert figures["output_tokens_per_s"] == 128
    assert figures["total_tokens_per_s"] == 384
    assert figures["requests_per_s"] == 2
    latencies = {"ttft_s": 0.1, "tpot_s": 0.2, "itl_s": 0.3, "e2e_s": 0.4}
    if client is guidellm:
        latencies["e2e_s"] = 0.4
        del latencies["itl_s"]
    for name, mean in latencies.items():
        for statistic, share in (("mean", 1.0), ("p50", 1.1), ("p90", 1.2), ("p99", 1.3)):
            assert figures[f"{name}.{statistic}"] == pytest.approx(mean * share)
    assert len(figures) == 3 + 4 * len(latencies)


def test_file_of_several_benchmarks_is_rejected(tmp_path: Path) -> None:
    both = guidellm()
    both["benchmarks"] *= 2
    for several in (both, json.dumps(sglang()) + "\n" + json.dumps(sglang()) + "\n"):
        with pytest.raises(ReportError, match="2 benchmarks"):
            read(tmp_path, several)


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (vllm(failed=3), "3 requests failed"),
        (sglang(errors=["", "refused", ""]), "1 requests failed"),
        (guidellm(request_totals={"successful": 20, "errored": 2}), "2 requests failed"),
        (aiperf(error_request_count={"unit": "requests", "avg": 4.0}), "4 requests failed"),
        (vllm(completed=0), "no request was completed"),
        (aiperf(is_complete=False, incomplete_reason="the watchdog fired"), "did not end: the watchdog fired"),
        (aiperf(total_token_throughput=None), "lacks total_tokens_per_s"),
        (aiperf(request_latency={"unit": "fortnights", "avg": 1}), "fortnights"),
        (vllm(output_throughput=0.0), "output_tokens_per_s is 0"),
        (vllm(mean_ttft_ms=float("nan")), "ttft_s.mean is nan"),
        (vllm(output_throughput=True), "output_tokens_per_s is True"),
        (vllm(failed="none"), "the number of failed requests is 'none'"),
        ("[" * 100_000, "has an unknown format"),
        (guidellm(request_totals=None), "has an unknown format"),
        ({"benchmarks": []}, "0 benchmarks"),
        ({"hello": 1}, "report of vllm bench serve"),
        ("", "0 benchmarks"),
        ("{half", "neither JSON nor JSON lines"),
    ],
)
def test_report_that_cannot_be_trusted_gives_the_reason(report: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError) as error:
        read(tmp_path, report)
    assert problem in str(error.value)
    assert str(error.value).count("report.json") == 1
