"""The serving half of a spec file as pydantic models: one class a section, one docstring a key."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from flagcore.domain.objective import SERVING
from flagcore.domain.serving import Load
from flagcore.spec.knobs import Engines
from flagcore.spec.limits import (
    Devices,
    Factor,
    Folder,
    Fraction,
    NoSize,
    Precision,
    Seconds,
    Text,
    Value,
    Word,
)
from flagcore.spec.schema import BudgetSection, CommonSection, SearchSection, document_of
from flagcore.spec.validate import Section

Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
NoTokens = Annotated[int, Field(ge=0, le=10_000_000)]
Clients = Annotated[int, Field(ge=1, le=100_000)]
Requests = Annotated[int, Field(ge=1, le=10_000_000)]
NoRequests = Annotated[int, Field(ge=0, le=10_000_000)]
PerSecond = Annotated[float, Field(gt=0, le=1_000_000)] | Literal["inf"]
KnobInput = bool | Annotated[int, Field(ge=-1, le=2**31)] | Annotated[float, Field(gt=0, le=1)] | Word | None
"""A value of an engine's knob; the engine decides what is legal."""
Scalar = bool | int | float | Value | None

_LOAD = Load()


class ProfileSection(Section):
    """The requests of one load point, or of several where concurrency or request_rate is a list. Lengths are tokens."""

    input_len: Tokens = _LOAD.input_len
    """Length of a prompt, its shared prefix aside."""
    output_len: Tokens = _LOAD.output_len
    """Length of an answer; the engine ignores the end-of-text token."""
    prefix_len: NoTokens = _LOAD.prefix_len
    """Tokens before the prompt that are the same in all requests."""
    range_ratio: Fraction = _LOAD.range_ratio
    """Lengths are drawn evenly from range_ratio x length to length; 1: all equal."""
    range_spread: Fraction | None = None
    """Lengths are drawn evenly from (1 - range_spread) to (1 + range_spread) x length."""
    num_prompts: Requests = 128
    """Number of requests."""
    concurrency: Clients | Annotated[list[Clients], Field(min_length=1)] | None = None
    """Requests in flight (closed loop); a list is several load points in one launch."""
    request_rate: PerSecond | Annotated[list[PerSecond], Field(min_length=1)] | None = None
    """Requests a second (open loop), inf: all at once; a list is several load points in one launch."""
    burstiness: Factor = _LOAD.burstiness
    """Shape of the gaps between requests of an open loop: 1 is Poisson, less is burstier."""
    trace: Text | None = None
    """File with lengths, and times where it has them: ShareGPT-like JSONL, Mooncake JSONL or BurstGPT CSV."""
    warmup: NoRequests = _LOAD.warmup
    """Requests before those that count."""
    seed: NoSize = _LOAD.seed
    """What prompts are drawn from; each repeat has fresh ones."""


class BoundSection(Section):
    """Upper bounds in seconds of a latency's statistics."""

    mean: Seconds | None = None
    """The mean must not be longer."""
    p50: Seconds | None = None
    """The median must not be longer."""
    p90: Seconds | None = None
    """At least 90% must not be longer."""
    p99: Seconds | None = None
    """At least 99% must not be longer."""


class SloSection(Section):
    """What a configuration must keep to be the best one."""

    ttft_s: BoundSection = BoundSection()
    """Time to the first token."""
    tpot_s: BoundSection = BoundSection()
    """Time per token after the first, of each request."""
    itl_s: BoundSection = BoundSection()
    """Gap between two pieces of an answer."""
    e2e_s: BoundSection = BoundSection()
    """Time of a whole answer."""


class ClientSection(Section):
    """Another client in place of flagcore's own, whose report is read: guidellm, aiperf, or that of an engine."""

    command: Annotated[list[Text], Field(min_length=1)]
    """Its command, one word an item, run without a shell; {url}, {model} and {report} are filled in."""
    report: Word = "report.json"
    """Name of the file that it writes, in the folder in which it runs."""


class ServeSection(Section):
    """The serving job."""

    engine: Word | Annotated[list[Word], Field(min_length=1)]
    """Name of the engine; a list tunes one after the other."""
    precision: Precision | None = None
    """Number format of the weights; null: bf16, or what the weights say."""
    engine_args: dict[str, Scalar] = Field(default={})
    """The engine's own flags for all candidates, in its spelling without the leading dashes; true is a bare flag."""
    profile: ProfileSection = ProfileSection()
    """The requests that it is measured with."""
    slo: SloSection = SloSection()
    """What must be kept."""
    repeats: Devices = 1
    """How often each load point is sent in one launch, with fresh prompts."""
    client: ClientSection | None = None
    """Another client that loads the servers, as its own command says; null: flagcore's, as profile says."""
    weights: Text | None = None
    """Path of the weights (Hugging Face directory or GGUF file); null: the model's own path."""
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Program that starts one server, flags aside; null: the engine's own."""
    directory: Folder | None = None
    """Where the command is started; null: the spec's folder."""
    engine_version: Word | None = None
    """Version to plan for; null: the installed one."""


ServeSpace = dict[
    str, KnobInput | Annotated[list[KnobInput], Field(min_length=1)] | dict[str, KnobInput | list[KnobInput]]
]
"""For each knob of the engine a value, a list of values, or auto; with several engines a section for each."""


class ServeControlSection(BudgetSection):
    """Budgets of the search."""

    max_time_per_task: Seconds = 1200.0
    """Wall-clock limit of one trial, start of the servers included, in seconds."""
    fidelity: Literal["estimate", "run"] = "run"
    """How real trials are: none, or real servers under a real load."""


class ServeTunerSection(SearchSection):
    """What is searched, and how."""

    cards: Devices | None = None
    """Devices that a configuration may use; null: all of the cluster."""
    space: ServeSpace = Field(default={})
    """What may be tried: for each knob a value, a list of values, or auto; a knob that is absent is the engine's."""
    baseline: dict[str, KnobInput | dict[str, KnobInput]] | None = None
    """The configuration that the gain is relative to; null: the engine's own defaults."""
    control: ServeControlSection = ServeControlSection()
    """How long to look."""
    objective: Literal[SERVING] = SERVING[0]  # type: ignore[valid-type]
    """The figure to optimise: more of a rate, or less of a latency (its mean, unless a statistic is named)."""


class ServeDocument(CommonSection):
    """What flagcore shall tune: a model, a cluster, a server with its load, and a search."""

    serve: ServeSection
    """What is served, the requests of a trial, and the limits."""
    auto_tuner: ServeTunerSection = ServeTunerSection()
    """The search: absent, the engine runs as it is."""


def json_schema(engines: Engines) -> dict[str, Any]:
    """Return the JSON Schema of a spec: a document that trains with one of `engines`, or one that serves."""
    training = [document_of(name, engine.knobs) for name, engine in engines.items() if engine.kind == "train"]
    document: Any = reduce(or_, [*training, ServeDocument])
    made = TypeAdapter(document).json_schema()
    space = made["$defs"]["ServeTunerSection"]["properties"]["space"]
    texts = _serving_knobs(engines)
    values = {"$ref": "#/$defs/ServeTunerSection/properties/space/additionalProperties"}
    space["properties"] = {knob: {"description": text, **values} for knob, text in texts.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "flagcore spec"}


def _serving_knobs(engines: Engines) -> dict[str, str]:
    """Return a description of each knob of the engines that serve, for editors; engines may differ in its values."""
    texts: dict[str, dict[str, list[str]]] = {}
    for name, engine in engines.items():
        for knob in engine.knobs if engine.kind == "serve" else ():
            texts.setdefault(knob.name, {}).setdefault(knob.help, []).append(name)
    return {
        knob: "; ".join(f"{help} ({', '.join(names)})" for help, names in each.items())
        for knob, each in sorted(texts.items())
    }
