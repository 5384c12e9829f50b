"""Warnings about the settings of a serving job."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from flagcore_importers.programs import unknown_release
from flagcore_models.public import find_public

from flagcore.domain.metrics import MIN_REQUESTS, RATES
from flagcore.domain.spec import AUTO, Spec
from flagcore.i18n import _
from flagcore_serving.job import lengths_are_equal
from flagcore_serving.load.traffic import in_flight
from flagcore_serving.model.speculation import USUAL
from flagcore_serving.model.work import build_of, overheads_of
from flagcore_serving.space import knobs as common_knobs
from flagcore_serving.space.adapters import CONFIG, DEFAULT_RANK, rank_of
from flagcore_serving.space.adapters import SWITCH as ADAPTER_SWITCH
from flagcore_serving.space.program import Program
from flagcore_serving.space.weights import WIDE_PRECISIONS, has_unknown_format, is_quantized, quantizes

FIXED_RATES = RATES[:3]
"""Rates that the arrivals of requests determine as long as the servers keep up."""

LONG_LIMITS = {"ttft_s": 100.0, "tpot_s": 5.0, "itl_s": 5.0}
"""Limits of at least this many seconds cause a warning. `e2e_s` has no such bound: a whole answer may take long."""

_OWN_CODE = re.compile(r"(?i)^(?!.*gguf).*(kimi-(?!dev)|moonlight)")  # vllm-project/recipes pull request 116


def speculations(spec: Spec, program: Program) -> list[str]:
    """Return the methods of speculation that a spec fixes or searches."""
    name, fixed = common_knobs.SPECULATION, program.parse(spec).fixed
    given = fixed.get(name, spec.space.get(name)), (spec.baseline or {}).get(name)
    words = [word for each in given for word in (each if isinstance(each, tuple) else (each,))]
    return [*dict.fromkeys(str(word) for word in words if word not in (None, "none", AUTO))]


def spec_warnings(spec: Spec, program: Program) -> Iterator[str]:
    """Yield a one-line warning for each doubtful setting of a spec.

    Doubtful settings are an unknown release, unknown flags, limits that look like milliseconds, too few requests, an
    objective that the load determines, speculation with unknown acceptance, and adapters or weights that are missing or
    of another format.
    """
    for warnings in (_of_flags, _of_limits, _of_loads, _of_adapters, _of_speculation, _of_weights):
        yield from warnings(spec, program)


def _of_flags(spec: Spec, program: Program) -> Iterator[str]:
    version, flags = program.version(spec), program.flags_of(spec)
    stated = spec.serve.engine_version
    if not build_of(program.overheads, stated):
        yield from unknown_release("serve.engine_version", spec.serve.engine, stated, program.releases)
    for name in program.split(spec).others:
        if found := program.flag_problem(name, flags, version):
            release = ", or set serve.engine_version to your release" if found.removed else ""
            yield f"serve.engine_args.{name} {found.problem}; {found.fix}{release}"
    fixed = program.parse(spec).fixed
    for name in program.moved:
        for value in (fixed.get(name), *spec.space.get(name, ()), (spec.baseline or {}).get(name)):
            if text := program.needed_package(name, value, version):
                yield f"{name}: {text}"


def _of_limits(spec: Spec, _program: Program) -> Iterator[str]:
    serve = spec.serve
    for name, limit in serve.slo.items():
        if limit >= LONG_LIMITS.get(name.partition(".")[0], math.inf):
            yield f"serve.slo.{name}: {limit:g} s is a very long limit; limits are in seconds: 200 ms is 0.2"
    fewest = min((load.num_prompts for load in serve.loads if load.num_prompts is not None), default=math.inf)
    min_requests = {name: MIN_REQUESTS.get(name.rpartition(".")[2], 0) for name in serve.slo}
    name = max(min_requests, key=lambda each: min_requests[each], default="")
    if fewest < min_requests.get(name, 0):
        yield f"serve.slo.{name}: {fewest} requests are too few; use serve.profile.num_prompts >= {min_requests[name]}"


def _of_loads(spec: Spec, program: Program) -> Iterator[str]:
    loads = spec.serve.loads
    has_waves = not overheads_of(program.overheads, program.version(spec)).mixes
    if has_waves and any(in_flight(load).concurrency and lengths_are_equal(load) for load in loads):
        yield _(
            "all lengths are equal, so in {engine} requests that start together end together, which few real loads do; "
            "set serve.profile.range_spread, such as 0.5",
            engine=program.title,
        )
    is_open = all(in_flight(load).concurrency is None and load.request_rate != math.inf for load in loads)
    if is_open and spec.serve.highest is None and spec.objective in FIXED_RATES:
        yield _(
            "the load determines {objective}: candidates differ only if they cannot keep up; set auto_tuner.objective "
            "to a latency such as tpot_s.p99, or serve.profile.request_rate: auto with an SLO",
            objective=spec.objective,
        )


def _of_adapters(spec: Spec, program: Program) -> Iterator[str]:
    for folder in spec.serve.adapters:
        if not rank_of(folder):
            yield f"serve.adapters: {folder} has no {CONFIG} with a rank r; predictions assume r = {DEFAULT_RANK}"
    if ADAPTER_SWITCH in program.split(spec).others and not spec.serve.loads[0].adapters:
        yield "serve.profile.adapters is 0: all requests are predicted to use the base model; set it"


def _of_speculation(spec: Spec, program: Program) -> Iterator[str]:
    for word in speculations(spec, program):
        scheme = program.schemes_of(spec).get(word, "")
        if all(load.accepted(scheme) for load in spec.serve.loads):
            continue
        text, fix = f"{common_knobs.SPECULATION} = {word}", "set serve.profile.acceptance"
        if scheme in USUAL and scheme != "mtp" and program.draft_flag not in ("", *program.split(spec).others):
            yield f"{text} is not tried: it needs a draft; set serve.engine_args.{program.draft_flag}"
        elif scheme in USUAL:
            yield f"{text} is predicted with a usual acceptance of {USUAL[scheme]} before its first trial; {fix}"
        else:
            why = "how often drafts are right depends on the traffic"
            yield f"{text} is predicted without a gain before its first trial: {why}; {fix}"


def _of_weights(spec: Spec, program: Program) -> Iterator[str]:
    serve, weights, precision = spec.serve, spec.serve.weights, spec.serve.precision
    if weights is None:
        return
    if _OWN_CODE.search(weights) and not serve.elsewhere and "trust-remote-code" not in program.split(spec).others:
        text = f"servers refuse the tokenizer of {weights}, which is code of its repository"
        yield f"serve.weights: {text}; if you trust it, set serve.engine_args: {{trust-remote-code: true}}"
    if not serve.elsewhere and not find_public(weights) and not Path(weights).exists():
        size = f"predictions compute their size from the model and serve.precision = {precision}"
        yield f"serve.weights: {weights} does not exist here; {size}"
    elif precision in WIDE_PRECISIONS and has_unknown_format(weights):
        text = f"the format of the quantized weights is unknown, so predictions assume {precision}; set it"
        yield f"serve.precision: {text}"
    elif not (precision in WIDE_PRECISIONS or is_quantized(weights) or quantizes(spec)):
        fix = f"set the weights to a checkpoint in {precision}, or serve.engine_args: {{quantization: ...}}"
        yield f"serve.precision: predictions assume {precision}, but {weights} is not quantized; {fix}"
