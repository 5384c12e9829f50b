"""Computes the metrics of a load, detects its steady state, and decides when its metrics are precise.

At the start of a load the servers are empty, and at its end fewer and fewer requests run. Metrics of all requests
therefore depend on the number of requests. In a steady state, only the requests between both ends count.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flagcore.domain.metrics import LATENCIES, MIN_REQUESTS, PERCENTILES, STATISTICS
from flagcore.domain.space import FloatArray
from flagcore_serving.job import OPEN_LOOP_FLIGHT, Load
from flagcore_serving.load.result import Answer, LoadResult

MIN_COUNTED = 100
"""Minimum number of requests that must count in a steady state."""
BATCHES = 5
"""Number of consecutive batches of requests whose means give the confidence interval. Each batch has at least as many
requests as are in flight, so that batches are nearly independent."""
T_QUANTILE = 2.776
"""0.975 quantile of Student's t distribution with BATCHES - 1 degrees of freedom."""
PRECISION = 0.05
"""A load ends when the half-width of each 95% interval is at most this share of the mean."""
MAX_RATIO = 3
"""A load ends without the precision `PRECISION` after this multiple of the minimum number of requests."""
MAX_TOKENS = 20_000_000
"""Maximum total prompt tokens of a load, because all prompts are held in memory. A load that needs more tokens for its
minimum number of requests exceeds this limit.
"""
RAMP_BATCH = 5
"""Requests per batch of the method MSER-5 (see `_ramp`)."""
CUT_ERROR = 2 * PRECISION
"""Minimum relative uncertainty of a load that was cut off: its first requests represent later ones less well."""
GROWTH = 1.1
"""The ratio by which the number of answers must grow between two checks of the steady state."""


class Window(NamedTuple):
    """The part of a load that counts: requests sent at `begin_s` or later, and before `end_s`, in seconds.

    Times start at the first send. `error`: the half-width of the widest 95% interval of a mean, relative to the mean.
    """

    begin_s: float
    end_s: float
    error: float

    def counted(self, answers: Sequence[Answer]) -> tuple[Answer, ...]:
        """Return the answers to the requests that were sent in the window."""
        return tuple(answer for answer in answers if self.begin_s <= answer.start_s < self.end_s)


class SteadyState:
    """Decides when a load has enough answers for precise values of the metrics `asked`, such as `ttft_s.p99`.

    `concurrency`: None for an open loop. After `max_s` seconds, any steady state suffices.
    """

    def __init__(self, asked: Collection[str], concurrency: int | None, max_s: float = math.inf) -> None:
        self._asked, self._concurrency, self._max_s = asked, concurrency, max_s
        self._next = float(MIN_COUNTED)

    def most(self, load: Load) -> int:
        """Return the maximum number of requests of `load`. It then ends even if its metrics are not precise."""
        fewest = self.enough
        fitting = MAX_TOKENS // (load.input_len + load.prefix_len)
        return max(fewest, min(MAX_RATIO * fewest, fitting))

    @property
    def enough(self) -> int:
        """The minimum number of requests that a load needs for precise metrics."""
        flight = self._concurrency or OPEN_LOOP_FLIGHT
        return self._fewest(flight) + flight

    def reached(self, answers: Sequence[Answer], end_s: float) -> Window | None:
        """Return the window that counts, or None if the answers to the requests sent before `end_s` are too few.

        All of these requests must be answered. Nothing is computed until the number of answers has grown by GROWTH.
        """
        is_late = end_s > self._max_s
        if len(answers) < self._next and not is_late:
            return None
        self._next = GROWTH * len(answers)
        window = self.window(answers, end_s)
        if is_late:
            return window
        flight = self._concurrency
        if flight is None:  # the mean number of requests in flight
            starts = [answer.start_s for answer in answers]
            flight = math.ceil(sum(answer.e2e_s for answer in answers) / max(max(starts) - min(starts), 1e-9))
        enough = window is not None and len(window.counted(answers)) >= self._fewest(flight)
        return window if window is not None and enough and window.error <= PRECISION else None

    def window(self, answers: Sequence[Answer], end_s: float) -> Window | None:
        """Return the steady state before `end_s` as a window, or None if half of the requests or more ramp up."""
        sent = sorted((answer for answer in answers if answer.start_s < end_s), key=lambda answer: answer.start_s)
        ramps = [_ramp(_known(sent, name)) for name in ("ttft_s", "e2e_s")]
        # The first wave does not count either, because it finds free slots.
        counted = sent[max(self._concurrency or 0, *(ramp or 0 for ramp in ramps)) :]
        if None in ramps or 2 * len(counted) < max(4 * BATCHES, len(sent)):
            return None
        names = {name.partition(".")[0].replace("itl_s", "tpot_s") for name in self._asked if "_s." in name}
        errors = [mean_error(_known(counted, name)) for name in names or {"e2e_s"}]
        return Window(counted[0].start_s, end_s, max(errors))

    def _fewest(self, flight: int) -> int:
        min_requests = [MIN_REQUESTS.get(name.rpartition(".")[2], 0) for name in self._asked]
        return max(MIN_COUNTED, BATCHES * flight, *min_requests)


def cut(answers: Sequence[Answer], end_s: float, fewest: int) -> Window | None:
    """Return the window from the first send to `end_s`, or None if it has fewer than `fewest` answers.

    All requests sent before `end_s` must be answered. The first requests in flight count, too, as in a load with a
    fixed number of requests.
    """
    window = Window(0.0, end_s, math.inf)
    counted = window.counted(answers)
    if len(counted) < fewest or end_s <= 0.0:
        return None
    per_token = mean_error(np.array([answer.e2e_s / answer.output_tokens for answer in counted]))
    return window._replace(error=max(per_token, CUT_ERROR))


def _ramp(values: FloatArray) -> int | None:
    """Return the number of values before the steady state, or None if it is at least half of them.

    The cut minimizes the standard error of the mean of the remaining values (MSER-5: White, Cobb and Spratt, "A
    comparison of five steady-state truncation heuristics for simulation", Winter Simulation Conference 2000).
    """
    count = values.size // RAMP_BATCH
    if count < 4:
        return 0
    means = values[: count * RAMP_BATCH].reshape(count, RAMP_BATCH).mean(axis=1)
    remaining_count = np.arange(count, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = (squares - sums**2 / remaining_count) / remaining_count**2
    cut = int(np.argmin(errors[: count // 2 + 1]))
    return cut * RAMP_BATCH if cut < count // 2 else None


def mean_error(values: FloatArray) -> float:
    """Return the half-width of the 95% confidence interval of the mean, relative to the mean, from batch means."""
    means = np.array([batch.mean() for batch in np.array_split(values, BATCHES)])
    return float(T_QUANTILE * means.std(ddof=1) / math.sqrt(BATCHES) / means.mean()) if means.mean() > 0 else 0.0


def decode_error(answers: Sequence[Answer]) -> float:
    """Return the relative uncertainty of the decode time per token, the noise of a closed loop. 0 if unknown."""
    values = _values(answers, "tpot_s")
    return mean_error(values) if values.size >= 2 * BATCHES else 0.0


def _known(answers: Sequence[Answer], name: str) -> FloatArray:
    values = _values(answers, name)
    return values if values.size else np.zeros(1)


_REQUEST_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


def duration_s(answers: Sequence[Answer]) -> float:
    """Return the seconds from the first send to the end of the last answer."""
    return max(answer.end_s for answer in answers) - min(answer.start_s for answer in answers)


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return rates over `duration_s` and statistics of latencies by name, as `vllm bench serve` defines them.

    TPOT has one value per request. ITL has all gaps of all requests. A latency without values is omitted.
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
    """Return the metrics of a steady state by name: latencies of the requests that count, and rates in the window.

    In rates, a request counts by the share of its pieces of text that arrived in the window.
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
    return figures | _of_tasks([answer for answer in answers if answer.task is not None])


MAX_TURNS = 10
"""The maximum number of turns whose TTFT is reported."""
TURN_TTFT, TASK_S = "ttft_s.turn_{number}", "task_s.mean"
"""The mean TTFT of a turn, from 1, and the mean seconds of a conversation from its first request to its last answer."""


def _of_tasks(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the metrics of conversations. A conversation counts from its first turn to the last one that counts."""
    spans, turns = dict[int, tuple[float, float]](), dict[int, list[float]]()
    for answer in answers:
        start, end = spans.get(answer.task or 0, (math.inf, 0.0))
        spans[answer.task or 0] = min(start, answer.start_s), max(end, answer.end_s)
        turns.setdefault(answer.turn, []).append(answer.ttft_s)
    means = {TURN_TTFT.format(number=turn + 1): float(np.mean(turns[turn])) for turn in sorted(turns)[:MAX_TURNS]}
    return means | ({TASK_S: float(np.mean([end - start for start, end in spans.values()]))} if spans else {})


def _share(answer: Answer, window: Window) -> float:
    """Return the share of an answer's pieces of text that arrived in the window."""
    times = answer.start_s + answer.ttft_s + np.concatenate([[0.0], np.cumsum(answer.gaps_s)])
    return float(np.mean((times > window.begin_s) & (times <= window.end_s)))


def keeps_up(load: Load, figures: Mapping[str, float], limits: Iterable[str]) -> bool:
    """Return whether requests are answered as fast as they arrive, but for the time in which the last answer is written
    and two standard deviations of Poisson arrivals. Limits from the arrival on bound a queue, others do not."""
    if load.request_rate is None or any(name.startswith(("ttft_s", "e2e_s")) for name in limits):
        return True
    requests, written_s = load.num_prompts or 0, figures["e2e_s.mean"] - figures["ttft_s.mean"]
    excess_s = requests / figures["requests_per_s"] - requests / load.request_rate - written_s
    return excess_s <= 2.0 * math.sqrt(requests) / load.request_rate


def goodput(result: LoadResult, slo: Mapping[str, float]) -> float:
    """Return the requests per second that meet all limits of `slo`.

    `slo`: seconds by metric (`ttft_s.p99` or `ttft_s`). A request has one value per latency, so the widest of several
    limits on the statistics of a latency applies. For ITL, the statistic is computed over the request's own gaps. A
    request of one token meets every limit on TPOT and ITL. Limits on rates are ignored.
    """
    widest = {name: limit for name, limit in widest_limits(slo).items() if name in _REQUEST_LATENCIES}
    gaps = {figure: limit for figure, limit in slo.items() if figure.partition(".")[0] == "itl_s"}
    if not result.requests:
        return 0.0
    share = sum(_is_good(answer, widest, gaps) for answer in result.requests) / len(result.requests)
    return share * result.figures["requests_per_s"]


def widest_limits(slo: Mapping[str, float]) -> dict[str, float]:
    """Return the widest limit on each latency, over all its statistics."""
    widest: dict[str, float] = {}
    for figure, limit in slo.items():
        name = figure.partition(".")[0]
        widest[name] = max(limit, widest.get(name, limit))
    return widest


def statistics_of(values: FloatArray) -> dict[str, float]:
    """Return the mean and the percentiles of a latency by name."""
    ordered, found = np.sort(values), [float(values.mean())]
    for each in PERCENTILES:  # as `np.percentile`, which takes longer, and imports numpy.ma
        place = (values.size - 1) * (each / 100)
        low, high = ordered[[int(place), min(int(place) + 1, values.size - 1)]].tolist()
        share = place - int(place)
        found.append(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))
    return dict(zip(STATISTICS, found, strict=True))


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
