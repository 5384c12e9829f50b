"""Computes the metrics of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flagcore.domain.serving import LATENCIES
from flagcore.domain.space import FloatArray
from flagcore.engines.serving.load.result import Answer, LoadResult
from flagcore.engines.serving.load.steady import Window

_REQUEST_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


def duration_s(answers: Sequence[Answer]) -> float:
    """Return the seconds from the first send to the last finish."""
    return max(answer.end_s for answer in answers) - min(answer.start_s for answer in answers)


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return latencies by statistic, and rates over `duration_s`, as `vllm bench serve` defines them.

    TPOT has one value per request, ITL all gaps of all requests; a latency without values is omitted.
    """
    wall = duration_s(answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    input_tokens = sum(answer.input_tokens for answer in answers)
    return {
        "output_tokens_per_s": output_tokens / wall,
        "total_tokens_per_s": (output_tokens + input_tokens) / wall,
        "requests_per_s": len(answers) / wall,
        **_latencies(answers),
    }


def steady_figures(answers: Sequence[Answer], window: Window) -> dict[str, float]:
    """Return the figures of a steady state: latencies of the requests that count, and rates in the window.

    A request counts for rates by the share of its pieces that arrived in the window.
    """
    shares = np.array([_share(answer, window) for answer in answers]) / (window.end_s - window.begin_s)
    outputs = np.array([answer.output_tokens for answer in answers])
    inputs = np.array([answer.input_tokens for answer in answers])
    return {
        "output_tokens_per_s": float(shares @ outputs),
        "total_tokens_per_s": float(shares @ (outputs + inputs)),
        "requests_per_s": float(shares.sum()),
        **_latencies(window.counted(answers)),
    }


def _latencies(answers: Sequence[Answer]) -> dict[str, float]:
    figures = dict[str, float]()
    for name in LATENCIES:
        values = _values(answers, name)
        if values.size:
            figures |= {f"{name}.{statistic}": value for statistic, value in statistics_of(values).items()}
    return figures


def _share(answer: Answer, window: Window) -> float:
    """Return the share of an answer's pieces that arrived in the window."""
    times = answer.start_s + answer.ttft_s + np.concatenate([[0.0], np.cumsum(answer.gaps_s)])
    return float(np.mean((times > window.begin_s) & (times <= window.end_s)))


def goodput(result: LoadResult, slo: Mapping[str, float]) -> float:
    """Return the requests per second that meet all limits of `slo`: seconds by metric (`ttft_s.p99` or `ttft_s`).

    A request has one value per latency, so the widest of several limits on its statistics counts; its ITL is the
    statistic of its own gaps. A request of one token meets every limit on TPOT and ITL. Limits on rates are ignored.
    """
    widest = {name: limit for name, limit in widest_limits(slo).items() if name in _REQUEST_LATENCIES}
    gaps = {figure: limit for figure, limit in slo.items() if figure.partition(".")[0] == "itl_s"}
    if not result.requests:
        return 0.0
    share = sum(_is_good(answer, widest, gaps) for answer in result.requests) / len(result.requests)
    return share * result.figures["requests_per_s"]


def widest_limits(slo: Mapping[str, float]) -> dict[str, float]:
    """Return the widest limit on the statistics of each latency."""
    widest: dict[str, float] = {}
    for figure, limit in slo.items():
        name = figure.partition(".")[0]
        widest[name] = max(limit, widest.get(name, limit))
    return widest


def statistics_of(values: FloatArray) -> dict[str, float]:
    """Return the mean and percentiles of a latency."""
    p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99}


def _values(answers: Sequence[Answer], latency: str) -> FloatArray:
    if latency == "itl_s":
        return np.array([gap for answer in answers for gap in answer.gaps_s])
    values = [getattr(answer, latency) for answer in answers]
    return np.array([value for value in values if value is not None])


def _is_good(answer: Answer, limits: Mapping[str, float], gaps: Mapping[str, float]) -> bool:
    for name, limit in limits.items():
        value = getattr(answer, name)
        if value is not None and value > limit:
            return False
    return not answer.gaps_s or all(_gap_statistic(answer, figure) <= limit for figure, limit in gaps.items())


def _gap_statistic(answer: Answer, figure: str) -> float:
    statistic = figure.partition(".")[2] or "mean"
    if statistic == "mean":
        return float(np.mean(answer.gaps_s))
    return float(np.percentile(answer.gaps_s, float(statistic.removeprefix("p"))))
