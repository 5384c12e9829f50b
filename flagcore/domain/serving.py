"""Serving jobs: loads, figures and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

EngineArg: TypeAlias = bool | int | float | str | None

STATISTICS = ("mean", "p50", "p90", "p99")
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
"""Seconds to the first token; per further token of a request; between two chunks of a response; of a request."""
RATES = (
    "output_tokens_per_s",
    "total_tokens_per_s",
    "requests_per_s",
    "goodput_requests_per_s",
    "output_tokens_per_s_per_device",
)
"""Rates of the whole cluster, the last one per device. Goodput counts requests that meet the SLO."""


USUAL_CLIENTS = 64
"""Default number of requests in flight."""


def nested(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures grouped by latency: `ttft_s.p50` becomes `p50` of `ttft_s`."""
    data: dict[str, Any] = {}
    for name, figure in figures.items():
        of, _, statistic = name.partition(".")
        if statistic:
            data.setdefault(of, {})[statistic] = figure
        else:
            data[of] = figure
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load point. Lengths are tokens.

    Either `concurrency` requests are in flight all the time (closed loop), or they arrive at `request_rate` a second
    (open loop), infinity for all at once; the gaps are gamma-distributed with shape `burstiness`, 1 is Poisson.

    A length is uniform from `range_ratio` x length to length or, with `range_spread`, from (1 - spread) x length to
    (1 + spread) x length. `prefix_len` tokens before the prompt are the same in all requests. A `trace` gives lengths,
    and arrival times if it has them. `num_prompts` None is a steady state, which can be predicted but not run.
    """

    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 0
    range_ratio: float = 1.0
    range_spread: float | None = None
    num_prompts: int | None = 128
    concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    trace: str | None = None
    warmup: int = 0
    seed: int = 0

    def at(self, key: str, value: float) -> Load:
        """Return the load with another `concurrency` or `request_rate`."""
        return replace(self, concurrency=int(value)) if key == "concurrency" else replace(self, request_rate=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec:
    """The serving job. `slo` are upper bounds by figure: `ttft_s.p99` to seconds; all load points count.

    `engine_args` are flags of the engine without dashes, the same for all candidates. `weights` is a Hugging Face
    directory or a GGUF file; None can be predicted but not run. `command` starts one server in `directory`; None is the
    engine's own program. `cards` is the maximum number of devices of a candidate; None: all. `engine_version` None is
    the installed one. Each load point is sent `repeats` times, by flagcore's client or, with one load point, by the
    command `client`, which writes a `report`. `highest` is `request_rate` or `concurrency` if a trial searches for the
    highest one that keeps the SLO; that of the only load is then the maximum.
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
