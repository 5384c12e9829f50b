"""Checks of serving specs: what prevents a start, and warnings about what may mislead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flagcore.domain.knob import unknown_release
from flagcore.domain.serving import MIN_REQUESTS, RATES
from flagcore.domain.spec import Spec
from flagcore.engines.serving.load.images import check_format
from flagcore.engines.serving.load.traffic import in_flight, traffic
from flagcore.engines.serving.space.knobs import SPECULATION
from flagcore.engines.serving.space.program import Program
from flagcore.engines.serving.space.weights import WIDE_PRECISIONS, has_unknown_format
from flagcore.errors import SpecError

FIXED_RATES = RATES[:3]
"""Rates that the arrivals of requests determine, if servers keep up."""

LONG_LIMITS = {"ttft_s": 100.0, "tpot_s": 5.0, "itl_s": 5.0}
"""Seconds from which a limit is questioned. The whole answer (`e2e_s`) may take long."""


def check(spec: Spec, program: Program) -> None:
    """Raise SpecError or NoDevice unless servers of `spec` can run here."""
    serve, cluster = spec.serve, spec.cluster
    if cluster.groups:
        chips, problem = [group.chip for group in cluster.groups], "are several chips, but one machine has one"
        fix = "predict with `flag estimate`"
        raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)
    if cluster.nodes > 1 and not spec.on_each_host:
        problem = "is more than one, but no launcher for several hosts is set"
        fix = "set auto_tuner.launcher and cluster.hostfile, or predict with `flag estimate`"
        raise SpecError(key="cluster.nodes", value=cluster.nodes, problem=problem, fix=fix)
    for load in serve.loads:
        traffic(in_flight(replace(load, num_prompts=1) if load.is_steady else load))
        if load.images is not None:
            check_format(load.images.format)
    if serve.directory is not None and not Path(serve.directory).is_dir():
        problem, fix = "is not a folder, but serve.command starts there", "use an existing folder, or remove it"
        raise SpecError(key="serve.directory", value=serve.directory, problem=problem, fix=fix)
    if spec.objective == "goodput_requests_per_s" and not spec.limits:
        problem, fix = "needs an SLO: it counts the requests that meet it", "set serve.slo"
        raise SpecError(key="auto_tuner.objective", value=spec.objective, problem=problem, fix=fix)
    program.ready(spec)


def spec_warnings(spec: Spec, program: Program) -> Iterator[str]:
    """Yield a line for an unknown release, limits that look like milliseconds, too few requests, an objective that
    the load determines, speculation with unknown acceptance, and quantized weights of an unknown format.
    """
    serve = spec.serve
    yield from unknown_release("serve.engine_version", serve.engine, serve.engine_version, program.releases)
    for name, limit in serve.slo.items():
        if limit >= LONG_LIMITS.get(name.partition(".")[0], math.inf):
            yield f"serve.slo.{name}: {limit:g} s is a very long limit; limits are in seconds: 200 ms is 0.2"
    fewest = min((load.num_prompts for load in serve.loads if load.num_prompts is not None), default=math.inf)
    needed = {name: MIN_REQUESTS.get(name.rpartition(".")[2], 0) for name in serve.slo}
    name = max(needed, key=lambda each: needed[each], default="")
    if fewest < needed.get(name, 0):
        yield f"serve.slo.{name}: {fewest} requests are too few, use serve.profile.num_prompts >= {needed[name]}"
    is_open = all(in_flight(load).concurrency is None and load.request_rate != math.inf for load in serve.loads)
    if is_open and serve.highest is None and serve.client is None and spec.objective in FIXED_RATES:
        fix = (
            "set auto_tuner.objective to a latency such as tpot_s.p99, or serve.profile.request_rate: auto with an SLO"
        )
        yield f"the load determines {spec.objective}: candidates differ only if they cannot keep up; {fix}"
    speculates = SPECULATION in spec.space or SPECULATION in program.parse(spec).fixed
    if speculates and any(load.acceptance is None for load in serve.loads):
        yield "speculation is predicted without a gain before its first trial: serve.profile.acceptance is not set"
    if serve.weights is not None and serve.precision in WIDE_PRECISIONS and has_unknown_format(serve.weights):
        text = f"the format of the quantized weights is unknown, so predictions assume {serve.precision}; set it"
        yield f"serve.precision: {text}"
