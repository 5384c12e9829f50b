"""The kind of job `serve`: the loads, and the job of a spec with its engine and the limits of its metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Interval

from flagcore.domain.metrics import PER_DEVICE, load_text
from flagcore.domain.spec import Precision
from flagcore.domain.units import Factor, Fraction, NoSize, OneOf, Text, Wait
from flagcore.domain.work import Work
from flagcore.i18n import N_, _

QUANTIZERS = {"quantization", "quantization-config", "torchao-config", "hf-overrides", "model-loader-extra-config"}
"""Flags that make an engine quantize weights when it loads them."""
EngineArg: TypeAlias = bool | int | float | str | Sequence[bool | int | float | str | None] | None

ServePrecision = Literal[Precision, "int8", "int4"]
"""Formats of a server's weights: weights in the last three may be converted before they are multiplied."""

DEFAULT_CONCURRENCY = 64
"""The default number of requests in flight."""
CLIENTS_PER_DEVICE = 16
"""The number of clients for each device in a spec that is made from a command or from the name of a model."""
MAX_CLIENTS = 8192
"""The most clients of a search for the highest number of them. A choice: published plans have at most 4,096."""
OPEN_LOOP_FLIGHT = 64
"""The number of requests in flight that is assumed for an open loop if its number of requests is not given."""
MAX_LENGTH_RATIO = 5
"""The maximum of lengths that are not uniform relative to their mean. Benchmarks with filtered ShareGPT prompts have a
similar ratio (a maximum of 1,024 tokens and a mean of 217)."""


SCHEMES = ("mtp", "eagle", "eagle3", "draft_model", "ngram", "suffix")
"""How speculation drafts tokens: with the model's own layers for multi-token prediction, a head that is trained for the
model (EAGLE), another model, or text that repeats (n-grams, suffixes)."""
Tokens = Annotated[int, Interval(ge=1, le=10_000_000)]
NoTokens = Annotated[int, Interval(ge=0, le=10_000_000)]
NoRequests = Annotated[int, Interval(ge=0, le=10_000_000)]
Rates: TypeAlias = tuple[float, ...]
"""The share of drafts in which the token at each position is accepted. Beyond the last one, the rates fall as from the
one before it (at first 1) to it, so that one number is the probability that a token is accepted after accepted ones."""


IMAGE_SIZE = r"^([1-9][0-9]{0,3})x([1-9][0-9]{0,3})$"
"""The pattern of an image size: WIDTHxHEIGHT in pixels, each up to 9999."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The random images of a load's requests.

    The number of images per request is uniformly distributed from floor((1 - ratio) x base) to ceil((1 + ratio) x
    base), where base is `base_items_per_request` and ratio is `num_mm_items_range_ratio`.

    `buckets`: the possible sizes of an image, each with width, height and probability. Probabilities add up to 1.
    """

    buckets: tuple[tuple[int, int, float], ...]
    base_items_per_request: int = 1
    num_mm_items_range_ratio: float = 0.0

    @property
    def counts(self) -> tuple[int, int]:
        """The minimum and the maximum number of images per request."""
        base, ratio = self.base_items_per_request, self.num_mm_items_range_ratio
        return math.floor(base * (1 - ratio)), math.ceil(base * (1 + ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load point. Lengths are numbers of tokens.

    A closed loop has a `concurrency`, an open loop a `request_rate`.
    """

    input_len: Tokens = 1024
    """Length of a prompt without the shared prefix."""
    output_len: Tokens = 128
    """Length of an answer; the engine ignores the end-of-text token."""
    prefix_len: NoTokens = 0
    """Shared prefix: number of tokens before the prompt that are the same in all requests."""
    range_ratio: Fraction = 1.0
    """Lengths are uniform between range_ratio x length and length; 1: all equal."""
    range_spread: Fraction | None = None
    """Lengths are uniform between (1 - range_spread) and (1 + range_spread) x length."""
    distribution: Annotated[str, OneOf(("uniform", "lognormal", "chat"))] = "uniform"
    """Distribution of the lengths: uniform, or with the means input_len and output_len: lognormal, or those of ShareGPT
    (chat). Such lengths are at most 5 times their mean."""
    longest: int | None = None
    """The longest of such lengths in tokens. None means `MAX_LENGTH_RATIO` times the mean. With `lengths`, which
    are samples: the longest possible request, prompt and answer."""
    lengths: tuple[tuple[int, int], ...] = ()
    """The lengths of the prompt and the answer of each request, in place of a distribution. Empty if unknown."""
    distinct: int = 0
    """The number of different prompts of `lengths`, which requests use in turn. 0: all are different."""
    num_prompts: int | None = 128
    """The number of requests. None means that the load continues until it is stopped."""
    least_s: float = 0.0
    """In a search for the highest request rate, the minimum time over which requests arrive. `num_prompts` grows with
    the rate accordingly."""
    is_steady: bool = False
    """Whether only the requests between the first and the last ones count. Otherwise all requests count."""
    concurrency: int | None = None
    """This number of requests is always in flight."""
    request_rate: float | None = None
    """This number of requests arrives per second; infinity means all at once."""
    burstiness: Factor = 1.0
    """Shape of the arrival process of an open loop: 1 is Poisson, lower values are burstier."""
    trace: Text | None = None
    """File with texts or lengths, and optional arrival times and images: JSON lines with prompts, conversations as in
    ShareGPT, or lengths as in Mooncake, also with sessions; or agents as in AgentX (Weka)."""
    turns: Annotated[int, Interval(ge=1, le=1000)] = 1
    """Maximum number of requests in a conversation. Each is sent after the answer to the previous request, and its
    prompt continues the conversation."""
    think_time_s: Wait = 0.0
    """Seconds from an answer to the next turn, such as those of a user or a tool."""
    sub_agents: Annotated[int, Interval(ge=0, le=1000)] = 0
    """Number of sub-agents of a conversation, at most turns - 1. Each is a conversation of as many turns with a prompt
    of its own after the shared prefix. They run one after the other, each before one of the later turns."""
    acceptance: tuple[tuple[str, Rates], ...] = ()
    """By scheme of speculation, the rates at which drafted tokens are accepted. An empty name stands for all other
    schemes."""
    adapters: Annotated[int, Interval(ge=0, le=1_000)] = 0
    """Number of adapters (LoRA) that requests use; by default that of serve.adapters."""
    adapter_share: Fraction = 1.0
    """Share of the requests that use an adapter; the others use the base model."""
    adapter_skew: Annotated[float, Interval(ge=0, le=10)] = 0.0
    """How unevenly adapters are used: the n-th one gets a share proportional to 1 / n ** adapter_skew; 0: all equal."""
    images: Images | None = None
    """Images that are sent in addition to the text."""
    warmup: NoRequests = 0
    """Warm-up requests, which are not measured."""
    seed: NoSize = 0
    """Random seed of prompts; each repeat has new prompts."""

    def longest_of(self, mean: int) -> int:
        """Return the longest of lengths with this mean that are not uniform, in tokens."""
        return max(self.longest or MAX_LENGTH_RATIO * mean, mean)

    @property
    def means(self) -> tuple[float, float]:
        """The mean tokens of a prompt, with the shared prefix, and of an answer."""
        if self.lengths:
            prompts, answers = zip(*self.lengths, strict=True)
            return sum(prompts) / len(prompts) + self.prefix_len, sum(answers) / len(answers)
        is_uniform = self.distribution == "uniform" and self.range_spread is None
        share = 0.5 * (1.0 + self.range_ratio) if is_uniform else 1.0
        return share * self.input_len + self.prefix_len, share * self.output_len

    def accepted(self, scheme: str) -> Rates | None:
        """Return the acceptance of a scheme of speculation, or None if it is unknown."""
        rates = dict(self.acceptance)
        return rates.get(scheme, rates.get(""))

    @property
    def adapter_shares(self) -> tuple[float, ...]:
        """The share of each adapter among the requests that use one."""
        weights = [(number + 1.0) ** -self.adapter_skew for number in range(self.adapters)]
        return tuple(each / sum(weights) for each in weights)

    def at(self, key: str, value: float) -> Load:
        """Return the load with another value of `key`, which is `concurrency` or `request_rate`."""
        if key == "concurrency":
            return replace(self, concurrency=int(value))
        count = max(self.num_prompts, math.ceil(self.least_s * value)) if self.num_prompts else None
        return replace(self, request_rate=value, num_prompts=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec(Work):
    """A serving job.

    `loads`: the load points.
    `adapters`: the folders of the adapters that requests use; empty if they are only predicted.
    `engine_args`: flags of the engine without dashes, the same for all candidates.
    `slo`: upper bounds by metric, such as `ttft_s.p99`. They must hold at all load points.
    `weights`: a Hugging Face directory or a GGUF file. Without it, candidates can be predicted but not run.
    `command`: a command that starts a server.
    `repeats`: how many times each load point runs.
    `highest`: `request_rate` or `concurrency`, if each trial searches for the highest value that meets the SLO. The
    value in the only load is then the upper bound of this search. None otherwise.
    `prefix_aware`: whether a request goes to the instance that has already received the longest prefix of its prompt,
    unless that instance is much busier than others. Otherwise it goes to the instance with the fewest requests.
    `default_space`: whether the spec has no space, so that the engine searches layouts and batch limits.
    `scheduled`: whether the installed engine itself is asked about the fastest candidates of a plan.
    `elsewhere`: `host` or `image` if commands are for another machine or for a container image, so that programs are
    not looked up on this machine. Empty otherwise.
    `quant_method`: the method that the weights are quantized by, as their config.json names it. Empty if it is unknown.
    """

    kind: ClassVar[str] = "serve"
    documents: ClassVar[str] = "flagcore_serving.documents"
    records: ClassVar[str] = "flagcore_serving.records"
    paths: ClassVar[tuple[tuple[str, ...], ...]] = (("weights",), ("profile", "trace"))
    several_engines: ClassVar[bool] = True
    default_objective: ClassVar[str] = "output_tokens_per_s"
    cheapest_objective: ClassVar[str] = PER_DEVICE
    has_steps: ClassVar[bool] = False
    reserves_memory: ClassVar[bool] = True
    takes_any_flag: ClassVar[bool] = True
    plans_with: ClassVar[tuple[tuple[str, str], ...]] = (("gguf", "llamacpp"), ("", "vllm"))
    start_seconds: ClassVar[float] = 1200.0  # servers load their weights and compile before the load begins

    loads: tuple[Load, ...]
    precision: str = "bf16"
    engine_args: Mapping[str, EngineArg] = field(default_factory=dict)
    slo: Mapping[str, float] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    weights: str | None = None
    cards: int | None = None
    repeats: int = 1
    highest: str | None = None
    only_best: bool = False
    prefix_aware: bool = False
    default_space: bool = False
    elsewhere: Literal["", "host", "image"] = ""
    scheduled: bool = False
    quant_method: str = ""

    @property
    def missing(self) -> str:
        return "weights" if self.weights is None else ""

    def with_advice(self, section: str, name: str, value: EngineArg, knobs: Collection[str]) -> ServeSpec:
        arguments = {each.lstrip("-").replace("_", "-") for each in (*self.engine_args, *knobs)}
        if section == "precision" and self.precision == "bf16":
            return replace(self, precision=str(value))
        if section != "engine_args" or name.replace("_", "-") in arguments:
            return self
        return replace(self, engine_args={**self.engine_args, name: value})

    @property
    def runs_as(self) -> str:
        text = _("as {engine} serves {load} (serve.profile)", engine=self.engine, load=_text_of(self))
        if self.highest == "request_rate" or any(math.isfinite(each.request_rate or math.inf) for each in self.loads):
            rate = N_("{text}; ~req/s counts until the last answer: a little lower if servers keep up, else far lower")
            text = _(rate, text=text)
        if not self.slo or self.highest or self.loads[0].trace is not None:
            return text
        advice = N_(
            "{text}; within the limits, concurrency: auto finds the most clients, request_rate: auto the highest rate"
        )
        return _(advice, text=text)

    def without_args(self, names: Collection[str]) -> ServeSpec:
        return replace(self, engine_args={name: each for name, each in self.engine_args.items() if name not in names})

    def with_default_space(self) -> ServeSpec:
        return replace(self, default_space=True, only_best=True)

    def at_load(self, value: float) -> ServeSpec:
        if self.highest is None:
            return self
        return replace(self, highest=None, loads=tuple(load.at(self.highest, value) for load in self.loads))

    def with_warmup(self, requests: int) -> ServeSpec:
        loads = tuple(replace(load, warmup=max(load.warmup, requests)) for load in self.loads)
        return replace(self, loads=loads)

    def on_other_machines(self, place: Any) -> ServeSpec:
        return replace(self, elsewhere=place)

    def record(self, versions: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the section of a job record, which describes a single load of text. None for other loads."""
        load = self.loads[0]
        if len(self.loads) > 1 or load.trace or load.images or load.adapters:
            return None
        names = ("input_len", "output_len", "prefix_len", "range_ratio", "distribution", "concurrency", "num_prompts")
        return {
            "engine": self.engine,
            "engine_version": versions.get(self.engine) or self.engine_version,
            "precision": self.precision,
            "engine_args": dict(self.engine_args),
            "weights": self.weights if self.weights and os.path.isfile(self.weights) else None,
            **{name: getattr(load, name) for name in names},
            "request_rate": "inf" if load.request_rate == math.inf else load.request_rate,
        }


def _text_of(serve: ServeSpec) -> str:
    """Return a text with the requests of a serving job, and with the clients or rates of its load points."""
    loads = serve.loads
    points = [load_text({name: value for name, value in asdict(load).items() if value is not None}) for load in loads]
    if serve.highest is not None:
        points = [_("the highest {figure} within the SLO", figure=serve.highest)]
    first = loads[0]
    if first.turns > 1:
        points.append(_("conversations of up to {turns} turns", turns=first.turns))
    if first.images is not None:
        low, high = first.images.counts
        numbers = f"{low}" if low == high else f"{low}-{high}"
        sizes = ", ".join(f"{width}x{height}" for width, height, _share in first.images.buckets)
        points.append(_("images per request: {numbers} ({sizes} pixels)", numbers=numbers, sizes=sizes))
    if first.adapters:
        points.append(
            _("{count} adapters for {share} of the requests", count=first.adapters, share=f"{first.adapter_share:.0%}")
        )
    if first.trace is not None:
        return ", ".join(filter(None, [first.trace, *points]))
    return ", ".join([*dict.fromkeys(points), lengths_text(first)])


def lengths_are_equal(load: Load) -> bool:
    """Return whether all prompts of a load, and all its answers, have the same length."""
    is_drawn = load.trace is not None or load.lengths or load.turns > 1 or load.images is not None
    return not is_drawn and load.range_ratio == 1.0 and not load.range_spread and load.distribution == "uniform"


def lengths_text(load: Load) -> str:
    """Return the lengths of a load's requests in words."""
    lengths = {"prompt": f"{load.prefix_len + load.input_len:,}", "answer": f"{load.output_len:,}"}
    text = _("prompts of {prompt} and answers of {answer} tokens", **lengths)
    if load.distribution != "uniform":
        return _("{lengths} on average", lengths=text)
    if load.range_spread:
        return _("{lengths}, each up to {share} more or less", lengths=text, share=f"{load.range_spread:.0%}")
    if load.range_ratio < 1.0:
        return _("{lengths}, each down to {share} of that", lengths=text, share=f"{load.range_ratio:.0%}")
    return text
