"""Serving jobs: loads, figures and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

EngineArg: TypeAlias = bool | int | float | str | None

STATISTICS = ("mean", "p50", "p90", "p99")
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
"""Seconds to the first token, per further token, between two chunks of a response, and of the whole request."""
PER_DEVICE, PER_USER = "output_tokens_per_s_per_device", "output_tokens_per_s_per_user"
RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_requests_per_s", PER_DEVICE)
"""Rates of the whole cluster; the last is per device. Goodput counts the requests that meet the SLO."""

MIN_REQUESTS = {"p99": 400, "p90": 40}
"""Requests that a percentile needs. Chosen: four of them are above it."""
DEFAULT_CONCURRENCY = 64
"""Default number of requests in flight."""
HIGHEST_LOAD = "highest_load"
"""The figure with the highest rate or concurrency within the SLO, of a load with `auto`."""
CLIENT_LOG = "client.log"
"""The output of another client, in its folder."""
OPEN_LOOP_FLIGHT = 64
"""Assumed number of requests in flight of an open loop without a number of requests."""


def nest_statistics(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with the statistics of each latency nested: `ttft_s.p50` becomes `p50` in `ttft_s`."""
    data: dict[str, Any] = {}
    for name, figure in figures.items():
        latency, _, statistic = name.partition(".")
        if statistic:
            data.setdefault(latency, {})[statistic] = figure
        else:
            data[name] = figure
    return data


MAX_LENGTH_RATIO = 5
"""Maximum of log-normal lengths relative to their mean, as in benchmarks with filtered ShareGPT prompts (1,024 tokens
and a mean of 217)."""


IMAGE_SIZE = r"^([1-9][0-9]{0,3})x([1-9][0-9]{0,3})$"
"""The pattern of the size of an image: WIDTHxHEIGHT in pixels, up to 9999."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Random images of the requests of a load.

    A request has from floor((1 - `num_mm_items_range_ratio`) x `base_items_per_request`) to ceil((1 + ratio) x base)
    images, uniformly distributed. Each has the width, height and probability of a bucket; probabilities add up to 1.
    """

    buckets: tuple[tuple[int, int, float], ...]
    base_items_per_request: int = 1
    num_mm_items_range_ratio: float = 0.0
    format: str = "png"

    @property
    def counts(self) -> tuple[int, int]:
        """The fewest and the most images of a request."""
        base, ratio = self.base_items_per_request, self.num_mm_items_range_ratio
        return math.floor(base * (1 - ratio)), math.ceil(base * (1 + ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load point. Lengths are numbers of tokens.

    Either `concurrency` requests are always in flight (closed loop), or `request_rate` requests arrive per second (open
    loop; infinity: all at once). The gaps between arrivals are gamma-distributed with the shape `burstiness`; 1 means
    Poisson arrivals.

    Lengths are uniformly distributed from `range_ratio` x length to length or, with `range_spread`, from (1 - spread) x
    length to (1 + spread) x length. With the `distribution` lognormal, `input_len` and `output_len` are the means of
    clipped log-normal distributions, as in conversations. All requests start with the same `prefix_len` tokens. A
    `trace` has the lengths and optionally arrival times and texts. Conversations have up to `turns` requests, each sent
    `think_time_s` after the answer to the one before; its prompt continues that
    request and its answer, so `input_len` is the length of the new part. `images` are in addition to the text.
    `acceptance` is the share of drafted tokens that the model accepts, None if unknown. With `num_prompts` None, the
    load goes on; if it `is_steady`, only requests between its first and its last ones count, else all of them.
    """

    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 0
    range_ratio: float = 1.0
    range_spread: float | None = None
    distribution: str = "uniform"
    num_prompts: int | None = 128
    is_steady: bool = False
    concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    trace: str | None = None
    turns: int = 1
    think_time_s: float = 0.0
    acceptance: float | None = None
    images: Images | None = None
    warmup: int = 0
    seed: int = 0

    def at(self, key: str, value: float) -> Load:
        """Return the load with another `concurrency` or `request_rate`."""
        return replace(self, concurrency=int(value)) if key == "concurrency" else replace(self, request_rate=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec:
    """A serving job.

    `engine_args` are flags of the engine without dashes, the same for all candidates. `slo` maps figures such as
    `ttft_s.p99` to upper bounds, which must hold at all load points. `weights` is a Hugging Face directory or a GGUF
    file; without it, candidates can be predicted but not run. `command` starts a server in `directory`; None: the
    engine's program. `cards` is the maximum number of devices of a candidate; None: all. `engine_version` is the
    release of the engine; None: the installed one. Each load point runs `repeats` times. If `client` is given, this
    command sends the load and writes a `report`; otherwise flagcore's client does. `highest` is `request_rate` or
    `concurrency` if a trial searches for the highest one that keeps the SLO; that of the only load is the maximum.
    `prefix_aware`: a request goes to the instance that got the longest prefix of its prompt before, unless that one is
    much busier than others; else to the one with the fewest requests. `default_space`: the spec has no space, so the
    engine searches layouts and limits of the batch.
    """

    engine: str
    loads: tuple[Load, ...]
    precision: str = "bf16"
    engine_args: Mapping[str, EngineArg] = field(default_factory=dict)
    slo: Mapping[str, float] = field(default_factory=dict)
    weights: str | None = None
    command: tuple[str, ...] | None = None
    directory: str | None = None
    cards: int | None = None
    engine_version: str | None = None
    repeats: int = 1
    client: tuple[str, ...] | None = None
    report: str = "report.json"
    highest: str | None = None
    prefix_aware: bool = False
    default_space: bool = False
