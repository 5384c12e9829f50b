"""The pydantic models of a spec file for serving: one class per section, with a docstring for each key."""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, create_model

from flagcore.domain.knob import Knob
from flagcore.domain.objective import COST, SERVING
from flagcore.domain.serving import Load
from flagcore.domain.spec import Precision
from flagcore.spec.knobs import Engines, no_default, serve_knobs_section, serving_types
from flagcore.spec.schema import (
    BudgetSection,
    CommonSection,
    Devices,
    Factor,
    Folder,
    Fraction,
    ModelPath,
    NoSize,
    SearchSection,
    Seconds,
    Shape,
    Text,
    Value,
    Word,
    document_of,
    with_fields,
)
from flagcore.spec.validate import Section

Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
NoTokens = Annotated[int, Field(ge=0, le=10_000_000)]
Clients = Annotated[int, Field(ge=1, le=100_000)]
Requests = Annotated[int, Field(ge=1, le=10_000_000)]
NoRequests = Annotated[int, Field(ge=0, le=10_000_000)]
Share = Annotated[float, Field(gt=0, le=1_000_000)]
Turns = Annotated[int, Field(ge=1, le=1000)]
WaitSeconds = Annotated[float, Field(ge=0, le=86_400)]
PerSecond = Annotated[float, Field(gt=0, le=1_000_000)] | Literal["inf"]
Distribution = Literal["uniform", "lognormal"]
KnobInput = bool | Annotated[int, Field(ge=-1, le=2**31)] | Annotated[float, Field(gt=0, le=1)] | Word | None
"""A value of an engine's knob, which the engine validates."""
Scalar = bool | int | float | Value | None

_LOAD = Load()


class ImagesSection(Section):
    """Random images of each request, in addition to its text. The keys have the names that load generators use."""

    bucket_config: Annotated[dict[str, Share], Field(min_length=1, examples=[{"1280x720": 0.5, "256x256": 0.5}])]
    """Sizes as WIDTHxHEIGHT in pixels, and the relative frequency of each."""
    base_items_per_request: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of images of a request."""
    num_mm_items_range_ratio: Fraction = 0.0
    """Numbers of images are uniform between (1 - ratio) x and (1 + ratio) x base_items_per_request."""
    format: Literal["png", "jpeg"] = "png"
    """Format of the images; jpeg needs Pillow."""


class ProfileSection(Section):
    """The requests of a load point, or of several if concurrency or request_rate is a list. Lengths are in tokens."""

    input_len: Tokens = _LOAD.input_len
    """Length of a prompt without the shared prefix."""
    output_len: Tokens = _LOAD.output_len
    """Length of an answer; the engine ignores the end-of-text token."""
    prefix_len: NoTokens = _LOAD.prefix_len
    """Shared prefix: number of tokens before the prompt that are the same in all requests."""
    range_ratio: Fraction = _LOAD.range_ratio
    """Lengths are uniform between range_ratio x length and length; 1: all equal."""
    range_spread: Fraction | None = None
    """Lengths are uniform between (1 - range_spread) and (1 + range_spread) x length."""
    distribution: Distribution = "uniform"
    """Distribution of the lengths: uniform, or lognormal with the means input_len and output_len, as in chats."""
    num_prompts: Requests | Literal["auto"] = "auto"
    """Number of requests; auto: the load lasts until its steady state is measured precisely."""
    concurrency: Clients | Annotated[list[Clients], Field(min_length=1)] | Literal["auto"] | None = None
    """Requests in flight (closed loop); a list defines several load points of one launch; auto: each trial finds the
    most that keep the SLO, up to num_prompts."""
    request_rate: PerSecond | Annotated[list[PerSecond], Field(min_length=1)] | Literal["auto"] | None = None
    """Requests per second (open loop), inf: all at once; a list defines several load points of one launch; auto: each
    trial finds the highest rate that keeps the SLO."""
    burstiness: Factor = _LOAD.burstiness
    """Shape of the arrival process of an open loop: 1 is Poisson, lower values are burstier."""
    trace: Text | None = None
    """File with texts or lengths, and optional arrival times and images: JSON lines with prompts, conversations as in
    ShareGPT, or lengths as in Mooncake."""
    turns: Turns = _LOAD.turns
    """Most requests of a conversation: each is sent after the answer to the one before, and continues its prompt."""
    think_time_s: WaitSeconds = _LOAD.think_time_s
    """Seconds from an answer to the next turn."""
    images: ImagesSection | None = None
    """Images of the requests, which are then sent as chats; null: none, or those of the trace."""
    acceptance: Fraction | None = None
    """Probability that a drafted token is accepted, for predictions of speculation; null: unknown."""
    warmup: NoRequests = _LOAD.warmup
    """Warm-up requests, which are not measured."""
    seed: NoSize = _LOAD.seed
    """Random seed of prompts; each repeat has new prompts."""


class BoundSection(Section):
    """Upper bounds in seconds of a latency's statistics."""

    mean: Seconds | None = None
    """Upper bound of the mean."""
    p50: Seconds | None = None
    """Upper bound of the median."""
    p90: Seconds | None = None
    """Upper bound of the 90th percentile."""
    p99: Seconds | None = None
    """Upper bound of the 99th percentile."""


class SloSection(Section):
    """Latency limits that the best configuration must meet."""

    ttft_s: BoundSection = BoundSection()
    """Time to the first token."""
    tpot_s: BoundSection = BoundSection()
    """Time per token after the first, of each request."""
    itl_s: BoundSection = BoundSection()
    """Time between two chunks of an answer."""
    e2e_s: BoundSection = BoundSection()
    """Time of a complete answer."""


class ClientSection(Section):
    """Another load generator, such as guidellm, aiperf, or the benchmark of an engine; flagcore reads its report."""

    command: Annotated[list[Text], Field(min_length=1)]
    """Command as a list of words, run without a shell; {url}, {model} and {report} are replaced."""
    report: Word = "report.json"
    """Name of the report file, in the working directory of the command."""


class ServeSection(Section):
    """The serving job."""

    engine: Word | Annotated[list[Word], Field(min_length=1)]
    """Name of the engine; the engines of a list are tuned one after the other."""
    precision: Precision | None = None
    """Number format of the weights; null: the format of the weights file, or bf16."""
    engine_args: dict[str, Scalar] = Field(default={})
    """Flags of the engine for all candidates, without leading dashes; true is a bare flag."""
    profile: ProfileSection = ProfileSection()
    """The load."""
    slo: SloSection = SloSection()
    """Latency limits."""
    repeats: Devices = 1
    """Number of times that each load point runs per launch, with new prompts."""
    router: Literal["auto", "least_requests", "prefix_aware"] = "auto"
    """Which of several instances gets a request: the one with the fewest requests, or the one that got the longest
    prefix of the prompt before; auto: the latter for traces and conversations."""
    client: ClientSection | None = None
    """Another load generator; null: flagcore's, with `profile`."""
    weights: Text | None = None
    """Path of the weights (Hugging Face directory or GGUF file); null: the path of the model."""
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Program that starts one server, without flags; null: the engine's default."""
    directory: Folder | None = None
    """Working directory of the command; null: the folder of the spec."""
    engine_version: Word | None = None
    """Version of the engine; null: the installed one."""


class ServeControlSection(BudgetSection):
    """Budgets of the search."""

    fidelity: Literal["estimate", "run"] = "run"
    """Fidelity of trials: predictions only, or real servers under load."""


OBJECTIVES = (*SERVING, COST)


class ServeTunerSection(SearchSection):
    """The search."""

    cards: Devices | None = None
    """Devices that a configuration may use; null: all devices of the cluster."""
    space: Any = Field(default={})
    """The search space: for each knob a value, a list of values, or auto; missing knobs keep the engine's default.
    Empty: layouts on all devices and limits of the batch."""
    baseline: Any = None
    """The configuration to which the gain is relative; null: an expert's layout on all devices."""
    control: ServeControlSection = ServeControlSection()
    """Budget of the search."""
    objective: Literal[OBJECTIVES] = SERVING[0]  # type: ignore[valid-type]
    """The figure to optimize: rates are maximized, latencies minimized (the mean, unless a statistic is given). cost is
    that of an output token on the devices that a configuration uses, so it maximizes output_tokens_per_s_per_device."""


class ServeDocument(CommonSection):
    """A tuning task: model, cluster, server with its load, and search."""

    model: ModelPath | Shape | None = None  # type: ignore[assignment]
    """Path of a Hugging Face directory, config.json or GGUF file, relative to the spec, or an inline shape; null: that
    of the weights."""
    serve: ServeSection
    """The serving job: the engine, its load, and the latency limits."""
    auto_tuner: ServeTunerSection = ServeTunerSection()
    """The search; absent: layouts on all devices and limits of the batch."""


ServedEngines = tuple[tuple[str, tuple[Knob, ...]], ...]
"""The serving engines of a spec, and the knobs of each."""


@lru_cache(maxsize=64)
def serve_document_of(engines: ServedEngines) -> type[ServeDocument]:
    """Return the pydantic model of a document for serving engines, with a section for the knobs of each."""
    space, baseline = _knobs_section(engines, listed=True), _knobs_section(engines, listed=False)
    suffix = f"_{engines[0][0]}" if len(engines) == 1 else ""
    tuner = with_fields(ServeTunerSection, suffix, space=(space, space()), baseline=(baseline | None, None))
    names: Any = Literal[tuple(name for name, _ in engines)]
    serve = with_fields(ServeSection, suffix, engine=(names | Annotated[list[names], Field(min_length=1)], ...))
    return with_fields(ServeDocument, suffix, serve=(serve, ...), auto_tuner=(tuner, tuner()))


def _knobs_section(engines: ServedEngines, *, listed: bool) -> type[Section]:
    """Return the pydantic model of a space (`listed`) or a baseline, with a section for each engine."""
    fields: dict[str, Any] = {
        knob.name: (kind, Field(None, description=knob.help, json_schema_extra=no_default))
        for knob, kind in serving_types([knob for _, knobs in engines for knob in knobs], listed=listed)
    }
    for name, knobs in engines:
        section = serve_knobs_section(name, knobs, listed=listed)
        text = f"Knobs of {name} alone."
        fields[name] = (section | None, Field(None, description=text, json_schema_extra=no_default))
    doc = "Knobs of the engine, or of each of several engines. Missing knobs keep the engine's default."
    suffix = f"_{engines[0][0]}" if len(engines) == 1 else ""
    name = f"{'ServeSpace' if listed else 'ServeBaseline'}{suffix}"
    return create_model(name, __base__=Section, __doc__=doc, **fields)


def json_schema(engines: Engines) -> dict[str, Any]:
    """Return the JSON Schema of specs for all `engines`."""
    rows = [(name, engine.kind, engine.knobs) for name, engine in engines.items()]
    documents: list[Any] = [document_of(name, knobs) for name, kind, knobs in rows if kind == "train"]
    served = tuple((name, knobs) for name, kind, knobs in rows if kind == "serve")
    documents += [serve_document_of((each,)) for each in served]
    if len(served) > 1:
        documents.append(serve_document_of(served))
    schema = TypeAdapter(reduce(or_, documents)).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "flagcore spec"}
