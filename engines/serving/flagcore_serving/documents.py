"""The pydantic models of a spec file for serving, one class per section.

They are converted to records of `flagcore_serving.job`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from flagcore_importers.programs import strip_dashes
from pydantic import Field

from flagcore.domain.knob import Knob
from flagcore.domain.metrics import LATENCIES, STATISTICS
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import AUTO, COST, SERVING, Control
from flagcore.domain.trial import ESTIMATE
from flagcore.domain.units import SECONDS, Devices, Seconds, Text, Value, Word, parse_amount
from flagcore.errors import SpecError, UsageError, join_errors
from flagcore.i18n import N_, _
from flagcore.spec.knobs import knobs_of_engine, listed_type, section_of, value_type
from flagcore.spec.models import ModelSource, model_of
from flagcore.spec.plain_data import spec_error
from flagcore.spec.schema import BUDGET, CommonSection, SearchSection, command_of, control_of, with_fields
from flagcore.spec.shapes import Shape
from flagcore.spec.validate import Command, Context, Folder, RecordSection, Section, keys_of_record, rule
from flagcore_serving.job import CLIENTS_PER_DEVICE, QUANTIZERS, ServePrecision, ServeSpec
from flagcore_serving.profile import ProfileSection, loads, not_with

KnobInput = bool | Annotated[int, Field(ge=-1, le=2**31)] | Annotated[float, Field(gt=0, le=1)] | Word | None
"""The type of a serving knob's value. The engine's knobs decide which values are valid."""
Scalar = bool | int | float | Value | None


class BoundSection(Section):
    """Upper bounds of a latency's statistics, in seconds or with a unit, such as 600ms."""

    mean: Seconds | None = None
    """Upper bound of the mean."""
    p50: Seconds | None = None
    """Upper bound of the median."""
    p90: Seconds | None = None
    """Upper bound of the 90th percentile."""
    p95: Seconds | None = None
    """Upper bound of the 95th percentile."""
    p99: Seconds | None = None
    """Upper bound of the 99th percentile."""


class SloSection(Section):
    """Latency limits that the best configuration must meet."""

    ttft_s: BoundSection = BoundSection.model_construct()
    """Time to the first token."""
    tpot_s: BoundSection = BoundSection.model_construct()
    """Time per token after the first, of each request."""
    itl_s: BoundSection = BoundSection.model_construct()
    """Time between two chunks of an answer."""
    e2e_s: BoundSection = BoundSection.model_construct()
    """Time of a complete answer."""


class ServeSection(Section):
    """The serving job."""

    engine: Word | Annotated[list[Word], Field(min_length=1)]
    """Name of the engine; the engines of a list are planned and tuned one after the other, and compared."""
    precision: ServePrecision | None = None
    """Number format of the weights; null: the format of the weights file, or bf16. With fp8, vLLM and SGLang convert
    weights that are not quantized."""
    engine_args: dict[str, Scalar | list[Scalar]] = Field(default={}, max_length=2000)
    """Flags of the engine for all candidates, without leading dashes; true is a bare flag, a list several values."""
    profile: ProfileSection = ProfileSection.model_construct()
    """The load: the requests that each trial sends to its servers."""
    slo: SloSection = SloSection.model_construct()
    """Latency limits."""
    repeats: Devices = 1
    """Number of times that each load point runs per launch, with new prompts."""
    router: Literal["auto", "least_requests", "prefix_aware"] = "auto"
    """Which of several instances gets a request: the one with the fewest requests, or the one that got the longest
    prefix of the prompt before; auto: the latter for traces and conversations."""
    weights: Text | None = None
    """Path of the weights (Hugging Face directory or GGUF file); null: the path of the model."""
    adapters: list[Folder] = Field(default=[], max_length=1_000)
    """Folders of adapters (LoRA) that the server loads, in the format of PEFT, relative to the spec."""
    command: Command | None = None
    """Program that starts one server, without flags; null: the engine's default."""
    directory: Folder | None = None
    """Working directory of the command; null: the folder of the spec."""
    engine_version: Word | None = None
    """Version of the engine; null: the installed one."""


def serve_of(section: ServeSection, context: Context, to_fp8: Collection[str] = ()) -> ServeSpec:
    """Return the serving job that a section describes. If it lists several engines, the first is used.

    `to_fp8`: the engines whose `quantization: fp8` converts any weights. Raises SpecError.
    """
    model, profile, slo = context.given("model"), _with_adapters(section), _slo_of(section.slo)
    weights = section.weights or (model if isinstance(model, str) else None)
    from flagcore_models.public import find_public, quant_method  # late: it loads tables that inline shapes do not need

    public = find_public(weights) if weights and not (context.base / weights).exists() else None
    stored = public[1] if public else _stored_format(context.base / weights) if weights else None
    weights = weights if public or not weights else str((context.base / weights).resolve())
    highest, objective = _highest(section, slo), context.given("auto_tuner", "objective")
    _check_answers(profile, [*slo, *([objective] if isinstance(objective, str) else [])])
    has_prefixes = profile.trace is not None or profile.turns > 1
    engine, args = section.engine if isinstance(section.engine, str) else section.engine[0], dict(section.engine_args)
    is_known = public or (weights and Path(weights, "config.json").is_file())
    method = quant_method(weights) if weights else ""
    if section.precision == "fp8" and is_known and not (stored or method) and engine in to_fp8:
        parts = (args, context.given("auto_tuner", "baseline"), context.given("auto_tuner", "space"))
        keys = [strip_dashes(str(key)) for part in parts if isinstance(part, Mapping) for key in part]
        args |= {"quantization": "fp8"} if QUANTIZERS.isdisjoint(keys) else {}
    return ServeSpec(
        engine=engine,
        loads=loads(profile, slo, context.base),
        adapters=tuple(str((context.base / folder).resolve()) for folder in section.adapters),
        precision=section.precision or stored or "bf16",
        engine_args=args,
        slo=slo,
        repeats=section.repeats,
        highest=highest,
        prefix_aware=section.router == "prefix_aware" or (section.router == AUTO and has_prefixes),
        default_space=not context.given("auto_tuner", "space"),
        weights=weights,
        quant_method=method,
        **command_of(section.command, section.directory, context),
        cards=context.given("auto_tuner", "cards"),
        engine_version=section.engine_version,
        scheduled=context.given("auto_tuner", "control", "fidelity") == SCHEDULE,
    )


def _with_adapters(section: ServeSection) -> ProfileSection:
    """Return the profile, with the number of adapters of the section. Raises SpecError if it has another one."""
    profile, number = section.profile, len(section.adapters)
    if number and profile.adapters not in (0, number):
        problem, fix = f"differs from the {number} folders of serve.adapters", f"remove it, or set {number}"
        raise spec_error("profile.adapters", problem, value=profile.adapters, fix=fix)
    return profile.model_copy(update={"adapters": number or profile.adapters})


def _check_answers(profile: ProfileSection, figures: Iterable[str]) -> None:
    """Raise SpecError if `figures` include a time per token after the first, but answers have one token."""
    if profile.output_len > 1 or profile.trace is not None:
        return
    if name := next((each for each in figures if each.startswith(("tpot_s", "itl_s"))), None):
        problem = f"leaves {name} undefined, because an answer has no token after the first"
        fix = "use 2 or more, or another metric"
        raise spec_error("profile.output_len", problem, value=profile.output_len, fix=fix)


def _stored_format(weights: Path) -> str | None:
    from flagcore_models.formats import config_of, format_of_weights

    with suppress(SpecError):
        return format_of_weights(config_of(weights)) if weights.is_dir() or weights.suffix == ".json" else None
    return None


def _slo_of(section: SloSection) -> dict[str, float]:
    """Return the upper bounds in the section by the names of metrics, such as `ttft_s.p99`."""
    return {
        f"{latency}.{statistic}": limit
        for latency, bounds in section
        for statistic, limit in bounds
        if limit is not None
    }


def _highest(section: ServeSection, slo: Mapping[str, float]) -> str | None:
    """Return the key of `profile` whose highest value each trial searches for, or None. Raises SpecError if there is no
    limit, or if the load comes from a trace."""
    name = next((key for key in ("concurrency", "request_rate") if getattr(section.profile, key) == AUTO), None)
    if name is None:
        return None
    key = f"profile.{name}"
    if not slo:
        problem, fix = "needs latency limits, which the highest load must meet", "set serve.slo"
        raise spec_error(key, problem, value=AUTO, fix=fix)
    if section.profile.trace is not None:
        raise not_with("serve.profile.trace", key, AUTO, "give one of the two")
    return name


@keys_of_record(Control, *BUDGET)
class ServeControlSection(RecordSection):
    """Budgets of the search."""

    fidelity: Literal["estimate", "schedule", "run"] = "run"
    """Fidelity of trials: predictions only; for the fastest, by the installed engine's own scheduler (vLLM with
    `flagcore-vllm-schedule`); or real servers under load."""


SCHEDULE = "schedule"
"""The fidelity of a plan about whose fastest candidates the engine itself is asked (`ServeSpec.scheduled`)."""


def _control_of(section: ServeControlSection, context: Context) -> Control:
    plain = {"fidelity": ESTIMATE} if section.fidelity == SCHEDULE else {}
    return control_of(section.model_copy(update=plain), context)


OBJECTIVES = (*SERVING, COST)


class ServeTunerSection(SearchSection):
    """The search."""

    cards: Devices | None = None
    """Devices that a configuration may use; null: all devices of the cluster."""
    space: Any = Field(default={})
    """The search space: for each knob a value, a list of values, or auto; missing knobs keep the engine's default.
    Empty: layouts on all devices and limits of the batch."""
    baseline: Any = None
    """The configuration to which the gain is relative; null: an expert's layout on all devices. All candidates keep its
    knobs that the space does not list, but not layouts and limits of the batch."""
    control: Annotated[ServeControlSection, rule(_control_of)] = ServeControlSection.model_construct()
    """Budget of the search."""
    objective: Literal[OBJECTIVES] = SERVING[0]  # type: ignore[valid-type]
    """The metric to optimize: rates are maximized, latencies minimized (the mean, unless a statistic is given). cost is
    that of an output token on the devices that a configuration uses, so it maximizes output_tokens_per_s_per_device."""


def _model_or_weights(source: str | Shape | Mapping[str, Any] | None, context: Context) -> object:
    """Return the model of a spec or, if it names none, the model of its weights. Raises SpecError without either."""
    serve, weights = context.given("serve"), context.given("serve", "weights")
    if source is not None:
        return model_of(source, context)
    if weights is None and isinstance(serve, Mapping):
        raise spec_error("", _("is missing"), fix=_("give a path such as ./Qwen3-8B or a mapping"))
    try:
        return model_of(weights, context) if isinstance(weights, str) else None
    except SpecError as error:
        if error.key not in ("", "model"):  # a key of the weights' own file
            raise
        file = error.file or context.file or "the spec"
        raise spec_error("serve.weights", error.problem, value=weights, fix=error.fix, file=file) from None


class ServeDocument(CommonSection):
    """A tuning task: model, cluster, server with its load, and search."""

    model: Annotated[ModelSource | None, rule(_model_or_weights)] = None  # type: ignore[assignment]
    """Path of a directory with a config.json, of that file or of a GGUF file, relative to the spec; or the name of a
    public model; or an inline shape; or the keys of a config.json, with its model_type; null: that of the weights."""
    serve: Annotated[ServeSection, rule(serve_of)]
    """The serving job: the engine, its load, and the latency limits."""
    auto_tuner: ServeTunerSection = ServeTunerSection.model_construct()
    """The search; absent: layouts on all devices and limits of the batch."""


ServedEngines = tuple[tuple[str, tuple[Knob, ...]], ...]
"""The names of a spec's serving engines, and the knobs of each."""


@lru_cache(maxsize=64)
def document_for(engines: ServedEngines) -> type[ServeDocument]:
    """Return the pydantic model of a spec for these serving engines, or for any engine if there are none.

    Its space and baseline accept knobs of all engines, and a section with knobs for each engine.
    """
    if not engines:
        return ServeDocument
    space, baseline = _knobs_section(engines, listed=True), _knobs_section(engines, listed=False)
    suffix = f"_{engines[0][0]}" if len(engines) == 1 else ""

    def values(key: str, context: Context) -> dict[str, Any]:
        # The values as the user wrote them: validation has turned a share of 1 into 1.0.
        name, knobs = engines[0]
        user_values = context.given("auto_tuner", key)
        return _values_of(knobs_of_engine(user_values, name), knobs) if len(engines) == 1 else {}

    def listed(_section: Section, context: Context) -> dict[str, Any]:
        found = values("space", context).items()
        return {name: each if isinstance(each, tuple) or each == AUTO else (each,) for name, each in found}

    def given(section: Section | None, context: Context) -> dict[str, Any] | None:
        return None if section is None else values("baseline", context)

    tuner = with_fields(
        ServeTunerSection,
        suffix,
        space=(Annotated[space, rule(listed)], space),
        baseline=(Annotated[baseline | None, rule(given)], None),
    )
    names: Any = Literal[tuple(name for name, _ in engines)]
    kinds = names | Annotated[list[names], Field(min_length=1)]
    to_fp8 = {name for name, knobs in engines for each in knobs if each.name == "quantization" and "fp8" in each.words}
    serve = with_fields(ServeSection, suffix, engine=(kinds, ...))
    convert = rule(partial(serve_of, to_fp8=to_fp8))
    return with_fields(ServeDocument, suffix, serve=(Annotated[serve, convert], ...), auto_tuner=(tuner, tuner))


def _knobs_section(engines: ServedEngines, *, listed: bool) -> type[Section]:
    """Return the pydantic model of a space if `listed`, else of a baseline, with a section for each engine."""
    title, suffix = "Space" if listed else "Baseline", f"_{engines[0][0]}" if len(engines) == 1 else ""

    def rows(knobs: Iterable[Knob]) -> list[tuple[Knob, Any, Any]]:
        return [(knob, kind, None) for knob, kind in _types_of(knobs, listed=listed)]

    fields = rows(knob for _, knobs in engines for knob in knobs)
    for name, knobs in engines:
        doc = "Knobs of one engine. Missing knobs keep the engine's default."
        section: Any = section_of(f"{title}Of_{name}", doc, rows(knobs))
        fields.append((Knob(name=name, help=f"Knobs of {name} alone."), section | None, None))
    doc = "Knobs of the engine, or of each of several engines. Missing knobs keep the engine's default."
    return section_of(f"Serve{title}{suffix}", doc, fields)


def _types_of(knobs: Iterable[Knob], *, listed: bool) -> list[tuple[Knob, Any]]:
    """Return a knob and the type of its values for each name and alias of the knobs of serving engines.

    If knobs of several engines have the same name, the type is the union of their types.

    `listed`: whether the type also accepts lists of values and `auto`, as in a space.
    """
    types_by_name: dict[str, tuple[Knob, Any]] = {}
    for knob in knobs:
        kind = listed_type(value_type(knob) | None) if listed else value_type(knob) | None
        for name in knob.names:
            earlier = types_by_name.get(name)
            types_by_name[name] = (replace(knob, name=name), kind if earlier is None else earlier[1] | kind)
    return list(types_by_name.values())


def _values_of(given: Mapping[str, Any], knobs: Sequence[Knob]) -> dict[str, KnobValue | str | tuple[KnobValue, ...]]:
    """Check the knob values `given` in a section, and return them. Lists become tuples without duplicates.

    Raises SpecError with all invalid values, and all knobs that are given under two names.
    """
    by_name = {name: knob for knob in knobs for name in knob.names}
    values: dict[str, Any] = {}
    given_names: dict[str, str] = {}
    problems: list[SpecError] = []
    for name, value in given.items():
        knob = by_name[name]
        if (other := given_names.setdefault(knob.name, name)) != name:
            problem = f"is the same knob as {other}"
            problems.append(spec_error((name,), problem, fix=_("remove one of the two")))
        for place, each in enumerate(value if isinstance(value, list) else [value]):
            path = (name, place) if isinstance(value, list) else (name,)
            try:
                if each != AUTO and not knob.effects:
                    knob.parse(each, "")
            except SpecError as error:
                problems.append(spec_error(path, error.problem, value=error.value, fix=error.fix))
        values[name] = tuple(dict.fromkeys(value)) if isinstance(value, list) else value
    if problems:
        raise join_errors(problems)
    return values


def changes_of_load(limits: Iterable[str], rate: float | str | None) -> dict[str, object]:
    """Return the keys that set latency limits, such as `p99 ttft 1s`, and a rate of requests per second (or `auto`).

    Without a statistic, a limit is of the p99. Raises UsageError.
    """
    load = {"request_rate": rate, "concurrency": None} if rate else {}
    changes: dict[str, object] = {f"serve.profile.{key}": value for key, value in load.items()}
    for limit in (each for text in limits for each in text.split(",")):
        text = limit.lower().replace("=", " ").replace("<", " ").strip()
        words = re.sub(rf" +({'|'.join(SECONDS)})$", r"\1", text).split()
        latency = next((name for word in words for name in LATENCIES if word in (name, name.removesuffix("_s"))), None)
        statistic = next((word for word in words if word in STATISTICS), "p99")
        seconds = parse_amount(words[-1], SECONDS) if words else None
        if latency is None or seconds is None or len(words) != 2 + (statistic in words):
            names = ", ".join(name.removesuffix("_s") for name in LATENCIES)
            form = N_("--slo {limit}: expected a limit such as `p99 ttft 1s`: one of {statistics}, of {names}")
            raise UsageError(_(form, limit=limit, statistics=", ".join(STATISTICS), names=names))
        changes[f"serve.slo.{latency}.{statistic}"] = seconds
    return changes


DEFAULTS: Mapping[str, Any] = {"input_len": 1024, "output_len": 128, "concurrency": CLIENTS_PER_DEVICE}
"""The values that a new spec needs, with their defaults."""
MOST_CLIENTS = 100_000


def for_devices(count: int) -> Mapping[str, Any]:
    """Return the defaults of a plan for `count` devices, without a spec: each has its clients. Raises UsageError."""
    if count * CLIENTS_PER_DEVICE > MOST_CLIENTS:
        text = N_("--nodes, --devices: {count:,} devices are too many for the default load; write a spec: flag init")
        raise UsageError(_(text, count=count))
    return {**DEFAULTS, "concurrency": count * CLIENTS_PER_DEVICE}


PROPOSED: Mapping[str, Any] = {"range_spread": 0.5}
"""Further values that `flag init` proposes: lengths of real loads differ."""
PARTS: Mapping[str, type[Section]] = {"serve": ServeSection, "serve.profile": ProfileSection}
"""The sections of a new spec. The last one has the values in DEFAULTS."""
