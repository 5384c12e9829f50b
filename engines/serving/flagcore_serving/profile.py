"""The section `serve.profile` of a spec: the load of a serving job."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from flagcore.domain.metrics import MIN_REQUESTS
from flagcore.domain.spec import AUTO
from flagcore.domain.units import Fraction, Word
from flagcore.errors import SpecError
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import RecordSection, Section, keys_of_record
from flagcore_serving.job import DEFAULT_CONCURRENCY, IMAGE_SIZE, MAX_CLIENTS, SCHEMES, Images, Load, Rates

Clients = Annotated[int, Field(ge=1, le=100_000)]
Requests = Annotated[int, Field(ge=1, le=10_000_000)]
Share = Annotated[float, Field(gt=0, le=1_000_000)]
PerSecond = Annotated[float, Field(gt=0, le=1_000_000)] | Literal["inf"]
Acceptance = Fraction | Annotated[list[Fraction], Field(min_length=1, max_length=64)]
Distribution = Literal["uniform", "lognormal", "chat"]

MAX_RATE = 1e5
"""The upper bound of the search for a request rate, in requests per second."""
DEFAULT_REQUESTS = 128
"""The default number of requests of a load that cannot be measured in a steady state."""
QUEUE_TIMES, ANSWER_TIMES = 20.0, 5.0
"""In a search for the highest rate, requests arrive for at least QUEUE_TIMES the longest time that an answer may wait,
and ANSWER_TIMES the longest time that it may take. A queue that grows until the end of the load then hides a rate that
is too high by at most 1 / QUEUE_TIMES. Chosen by hand."""


class ImagesSection(Section):
    """Random images of each request, in addition to its text. The keys have the names that load generators use."""

    bucket_config: Annotated[dict[str, Share], Field(min_length=1, examples=[{"1280x720": 0.5, "256x256": 0.5}])]
    """Sizes as WIDTHxHEIGHT in pixels, and the relative frequency of each."""
    base_items_per_request: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of images of a request."""
    num_mm_items_range_ratio: Fraction = 0.0
    """Numbers of images are uniform between (1 - ratio) x and (1 + ratio) x base_items_per_request."""


@keys_of_record(
    Load,
    *("input_len", "output_len", "prefix_len", "range_ratio", "range_spread", "distribution", "num_prompts"),
    *("concurrency", "request_rate", "burstiness", "trace", "turns", "think_time_s", "sub_agents", "images"),
    *("acceptance", "adapters", "adapter_share", "adapter_skew", "warmup", "seed"),
)
class ProfileSection(RecordSection):
    """The requests of a load point, or of several if concurrency or request_rate is a list. Lengths are in tokens."""

    num_prompts: Requests | Literal["auto"] = "auto"
    """Number of requests; auto: the load lasts until its steady state is measured precisely."""
    concurrency: Clients | Annotated[list[Clients], Field(min_length=1)] | Literal["auto"] | None = None
    """Requests in flight: how fast is this number of clients served, each waiting for its answer? A list defines
    several load points of one launch; auto: how many clients are served within the SLO, up to a given num_prompts?"""
    request_rate: PerSecond | Annotated[list[PerSecond], Field(min_length=1)] | Literal["auto"] | None = None
    """Requests per second that arrive whether the server is free or not (inf: all at once): which latencies result? A
    list defines several load points of one launch; auto: which rate can arrive within the SLO?"""
    images: ImagesSection | None = None
    """Images of the requests, which are then sent as chats; null: none, or those of the trace."""
    acceptance: Acceptance | dict[Word, Acceptance] | None = None
    """For predictions of speculation: the probability that a drafted token is accepted if those before it are, or the
    shares of drafts in which the 1st, 2nd, ... token is accepted, whose sum is the mean acceptance length - 1.
    One for all schemes, or by scheme; null: a usual one, without a gain for n-grams and suffixes."""


def not_with(other: str, key: str, value: object = None, fix: str = "remove one of the two") -> SpecError:
    """Return the error for a key that cannot be combined with another one."""
    return spec_error(key, f"cannot be combined with {other}", value=value, fix=fix)


def loads(profile: ProfileSection, slo: Mapping[str, float], base: Path) -> tuple[Load, ...]:
    """Return the load points of a profile, one for each value of `concurrency` or `request_rate`. Raises SpecError."""
    _check(profile)
    fields = profile.model_dump(exclude={"concurrency", "request_rate", "trace", "images"})
    fields["num_prompts"] = number = _num_prompts(profile, slo)
    fields["is_steady"] = number is None
    fields["acceptance"] = _acceptance(profile.acceptance)
    if profile.images is not None:
        fields["images"] = _images(profile.images, profile)
    if profile.trace is not None:
        fields["trace"] = str((base / profile.trace).resolve())
    if profile.request_rate == AUTO:
        least_s = _least_s(profile, slo) if profile.num_prompts == AUTO else 0.0
        return (Load(**fields, least_s=least_s, request_rate=MAX_RATE),)
    if profile.concurrency == AUTO:
        return (Load(**fields, concurrency=number or MAX_CLIENTS),)
    if rates := _as_list(profile.request_rate):
        return tuple(Load(**fields, request_rate=float(rate)) for rate in rates)
    if profile.trace is not None and profile.concurrency is None:
        return (Load(**fields),)  # no rate and no concurrency, because the trace may have arrival times
    clients = _as_list(profile.concurrency) or [min(DEFAULT_CONCURRENCY, number or DEFAULT_CONCURRENCY)]
    return tuple(Load(**fields, concurrency=each) for each in clients)


def _check(profile: ProfileSection) -> None:
    """Raise SpecError for keys that exclude each other."""
    has_ratio, has_spread = profile.range_ratio != 1.0, profile.range_spread is not None
    if profile.concurrency is not None and profile.request_rate is not None:
        raise not_with("serve.profile.request_rate", "profile.concurrency", profile.concurrency)
    if profile.sub_agents > max(profile.turns - 1, 0):
        problem = f"is more than the {profile.turns - 1} later turns"
        raise spec_error("profile.sub_agents", problem, value=profile.sub_agents, fix="set more serve.profile.turns")
    if has_spread and has_ratio:
        raise not_with("serve.profile.range_ratio", "profile.range_spread", profile.range_spread)
    if profile.distribution != "uniform" and (has_spread or has_ratio):
        other = "serve.profile.range_ratio or range_spread"
        raise not_with(other, "profile.distribution", profile.distribution)


def _acceptance(value: float | list[float] | Mapping[Any, float | list[float]] | None) -> tuple[tuple[str, Rates], ...]:
    """Return `Load.acceptance`. Raises SpecError if a rate is above the one before."""
    by_scheme = value if isinstance(value, Mapping) else {} if value is None else {"": value}
    acceptance = tuple((scheme, tuple(_as_list(rates))) for scheme, rates in by_scheme.items())
    for scheme, rates in acceptance:
        if scheme and scheme not in SCHEMES:
            fix = f"use {', '.join(SCHEMES)}"
            raise spec_error("profile.acceptance", "is not a scheme of speculation", value=scheme, fix=fix)
        if [*rates] != sorted(rates, reverse=True):
            key = f"profile.acceptance.{scheme}".rstrip(".")
            problem = "increases, but a token is accepted only after the ones before it"
            raise spec_error(key, problem, value=[*rates], fix="list the share of drafts for each position")
    return acceptance


def _num_prompts(profile: ProfileSection, slo: Mapping[str, float]) -> int | None:
    """Return the number of requests, or None for a load that can be measured in its steady state.

    Traces, conversations, bursts and searches for the highest rate need a number of requests. The default is the number
    that the percentiles in the limits need, at least DEFAULT_REQUESTS.
    """
    if profile.num_prompts != AUTO:
        return int(profile.num_prompts)
    has_end = profile.trace is not None or profile.turns > 1 or "inf" in _as_list(profile.request_rate)
    if has_end or profile.request_rate == AUTO:
        return max([DEFAULT_REQUESTS, *(MIN_REQUESTS.get(name.rpartition(".")[2], 0) for name in slo)])
    return None


def _least_s(profile: ProfileSection, slo: Mapping[str, float]) -> float:
    """Return the minimum seconds over which the requests of a search for the highest rate arrive.

    In less time, the queue of an overloaded server would not reach the limits, and a server would not have as many
    requests in flight as it has at this rate.
    """
    by_latency = {
        latency: max((limit for name, limit in slo.items() if name.startswith(latency)), default=0.0)
        for latency in ("ttft_s", "e2e_s", "tpot_s", "itl_s")
    }
    answer_s: float = max(by_latency["tpot_s"], by_latency["itl_s"]) * profile.output_len
    return max(QUEUE_TIMES * by_latency["ttft_s"], QUEUE_TIMES / 2 * by_latency["e2e_s"], ANSWER_TIMES * answer_s)


def _images(section: ImagesSection, profile: ProfileSection) -> Images:
    """Return the images of a load. Raises SpecError for an invalid size, and for loads that cannot have images."""
    if profile.trace is not None:
        raise not_with("serve.profile.trace", "profile.images", fix="put the images into the trace")
    if profile.turns > 1:
        raise not_with("serve.profile.turns", "profile.images")
    buckets, total = list[tuple[int, int, float]](), sum(section.bucket_config.values())
    for text, share in section.bucket_config.items():
        size = re.match(IMAGE_SIZE, text)
        if size is None:
            key, problem = ("profile", "images", "bucket_config", text), "is not a size in pixels"
            raise spec_error(key, problem, fix="write WIDTHxHEIGHT up to 9999, such as 1280x720")
        buckets.append((int(size[1]), int(size[2]), share / total))
    return Images(buckets=tuple(buckets), **section.model_dump(exclude={"bucket_config"}))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
