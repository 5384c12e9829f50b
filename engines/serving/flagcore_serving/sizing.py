"""How many devices keep the latency limits of a spec at a rate of requests, on which chip, and by hour of a day.

A replica is the fastest predicted configuration of some devices. Requests are spread over replicas at random, so each
receives an equal share of the rate. No trial runs, but a run may have measured one replica.

The highest rate of a replica is found only to RESOLUTION. Where that could cost a replica, the share of fewer ones is
predicted, too, so that the number is that of predictions of each number of replicas.
"""

import logging
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flagcore import Estimate, estimate
from flagcore.api.inputs import LoadedSpec, SpecLike, changed_spec, check_spec, open_spec, spec_data
from flagcore.api.notes import LOG
from flagcore.api.runs import read_result
from flagcore.domain.metrics import HIGHEST_LOAD, flat_statistics
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Spec
from flagcore.errors import NothingFits, SpecError, UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.script import job_name
from flagcore.plugins import find_engine
from flagcore.report.text import limits_text, nearest_limit, values_text
from flagcore_serving.job import Load, lengths_text
from flagcore_serving.load.progress import RESOLUTION
from flagcore_serving.load.traces import read_trace
from flagcore_serving.model.simulated_load import SEARCHED

RATE, NUMBER = "serve.profile.request_rate", "serve.profile.num_prompts"
Planned = Callable[..., Estimate]
"""A function that predicts a spec, by default only its best candidate and without advice. `change`: see `estimate`."""
WHOLE = 8
"""Replicas have any number of devices up to this one. Instances that prefill and others that decode rarely need a power
of two."""
MAX_TOTAL_RATE = 1e6
HOUR = 3600
WINDOW_S = 300.0
"""The rate of an hour is that of its busiest WINDOW_S seconds: autoscalers and starts of servers take minutes."""
LISTED = 8
"""Candidates per size among which the one with the highest load is chosen; they are sorted by output tokens per second,
which is the load times the length of answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Replicas of one configuration that keep the limits at a rate.

    - `nodes`: those of one replica.
    - `devices_per_replica`, `replicas`, `devices`: whole numbers; `devices` is the product of the others.
    - `safe_devices`: the devices if each replica only reaches the low end of the 80% interval of its rate.
    - `rate`: requests per second that one replica serves within the limits. `low_rate`: the low end of its interval.
    - `in_flight`: the mean number of requests that a replica holds at this rate: rate x latency (Little's law).
    - `ttft_s`, `tpot_s`: medians at this rate. `ttft_p99_s`: the 99th percentile. `limited`: the statistics that have
      limits, by latency. `nearest_limit`: the one closest to its limit.
    - `load`: the keys of the spec, with values, for which an estimate of this candidate has these figures.
    - `cost_per_hour`, `cost_per_million_tokens`: of all devices, per million output tokens, if the chip has a price.
    """

    chip: str
    nodes: int
    devices_per_replica: int
    replicas: int
    devices: int
    safe_devices: int
    rate: float
    low_rate: float
    in_flight: float
    ttft_s: float
    ttft_p99_s: float
    tpot_s: float
    limited: Mapping[str, Mapping[str, float]]
    nearest_limit: str
    candidate: Mapping[str, KnobValue]
    load: Mapping[str, float | str]
    configuration: str
    cost_per_hour: float | None = None
    cost_per_million_tokens: float | None = None


def _replicas(rate: float, of_one: float) -> int:
    """Return how many replicas serve a rate, at least 1. An exact multiple needs no more because of rounding."""
    return max(1, math.ceil(rate / of_one - 1e-9))


def sizes_of(spec: LoadedSpec, rate: float, chips: Mapping[str, float | None], planned: Planned) -> list[Size]:
    """Return the sizes that keep the limits of `serve.slo` at `rate` requests per second, the best first.

    Each has other devices per replica: from 1 to WHOLE and powers of two up to a node of the spec, and whole nodes up
    to its nodes.
    `chips`: the chips to compare, each with the price of a device for an hour or None; empty means that of the spec.
    The best has the lowest cost if all have prices, otherwise the fewest devices. Raises the errors of
    `flagcore.estimate`, and NothingFits if no size serves a request within the limits.
    """
    found, failed = list[Size](), dict[str, LoadedSpec]()
    cluster = _section(spec.data, "cluster")
    if cluster.get("groups"):
        planned(spec)  # which refuses them
    for chip, price in (chips or {"": None}).items():
        if price is None and chip in ("", cluster.get("chip")):
            price = cluster.get("price_per_device_hour")  # that of its own chip
        for nodes, devices in _shapes(spec):
            replica = _replica(spec, chip, price, nodes, devices)
            try:
                sizes = list(_size(replica, rate, nodes, devices, planned))
                seen = {(each.chip, each.devices_per_replica) for each in found}
                found += (each for each in sizes if (each.chip, each.devices_per_replica) not in seen)
                chip = sizes[0].chip if sizes else chip  # a note explains an alias once
            except NothingFits:
                failed[chip] = replica
    if not found:
        none = _("no size serves a request within the limits of serve.slo")
        raise NothingFits("\n".join(_advice(failed, planned)) or none)
    has_prices = all(each.cost_per_hour is not None for each in found)
    return sorted(found, key=lambda each: (each.cost_per_hour if has_prices else 0, each.devices, each.replicas))


def _advice(failed: Mapping[str, LoadedSpec], planned: Planned) -> Iterator[str]:
    """Yield why nothing fits on the largest replica of each chip."""
    for chip, spec in failed.items():
        try:
            planned(spec, change=replace)
        except NothingFits as error:
            yield f"{chip}: {error}" if len(failed) > 1 else str(error)


def _shapes(spec: LoadedSpec) -> Iterator[tuple[int, int]]:
    """Yield the nodes and the devices per node of each replica to try."""
    cluster = _section(spec.data, "cluster")
    given = cluster.get("nodes"), cluster.get("devices_per_node")
    nodes, per_node = (default if each is None else each for each, default in zip(given, (1, 8), strict=True))
    if not (isinstance(nodes, int) and isinstance(per_node, int) and min(nodes, per_node) > 0):
        yield nodes, per_node  # the estimate names the wrong value
        return
    yield from ((1, count) for count in range(1, per_node) if count <= WHOLE or count.bit_count() == 1)
    yield from ((each, per_node) for each in range(1, nodes + 1))


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section, which is empty if it is missing or wrong: the estimate names what is wrong."""
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _replica(spec: LoadedSpec, chip: str, price: float | None, nodes: int, per_node: int) -> LoadedSpec:
    """Return the spec of a search for the highest rate of one replica. `chip`: empty means that of `spec`."""
    changes: dict[str, Any] = {RATE: "auto", "serve.profile.concurrency": None}
    changes |= {"cluster.nodes": nodes, "cluster.devices_per_node": per_node, "cluster.price_per_device_hour": price}
    changes |= without_baseline(spec)
    if isinstance(given := _number(spec), int) and given < SEARCHED:
        changes[NUMBER] = "auto"
    changes |= {"cluster.chip": chip} if chip else {}
    return changed_spec(spec, changes)


def without_baseline(spec: LoadedSpec) -> dict[str, Any]:
    """Return the changes without the baseline of a valid spec, whose layout is that of the whole cluster. What all
    candidates keep of it becomes arguments of the engine."""
    engine, tuner = engine_of(spec), _section(spec.data, "auto_tuner")
    if tuner.get("baseline") is None:
        return {}
    program: Any = getattr(find_engine(engine), "program", None)
    baseline, space = ({**each, **_section(each, engine)} for each in (tuner["baseline"], _section(tuner, "space")))
    args = program.known_args(_section(spec.data["serve"], "engine_args"))
    kept = program.kept(baseline, {*space, *program.divided(args, "", "serve.engine_args.").fixed})
    return {"auto_tuner.baseline": None, **{f"serve.engine_args.{name}": value for name, value in kept.items()}}


def _number(spec: LoadedSpec) -> object:
    """Return the number of requests of a profile, None by default. A trace has its own."""
    profile = _section(_section(spec.data, "serve"), "profile")
    return "of the trace" if profile.get("trace") else profile.get("num_prompts")


def _fixed(spec: LoadedSpec, rate: float) -> dict[str, Any]:
    """Return the load of a replica at a rate, with the fewest requests of a search for the highest rate."""
    return {RATE: rate, **({NUMBER: SEARCHED} if _number(spec) in (None, "auto") else {})}


def _fewest(spec: LoadedSpec, highest: float, rate: float, planned: Planned) -> tuple[int, Mapping[str, Any] | None]:
    """Return the fewest replicas for a rate, and a configuration that serves more than `highest` if they need one.

    `spec`, `highest`: those of `_replica`, and the rate that its search found.
    """
    found = dict[int, Mapping[str, Any]]()

    def fits(replicas: int) -> bool:
        changes = {**_fixed(spec, rate / replicas), "auto_tuner.objective": "goodput_requests_per_s"}
        with suppress(NothingFits):
            plan = planned(changed_spec(spec, changes))
            kept = [each for each in plan.candidates if "last" not in each and not each["slo"]]
            found.update({replicas: kept[0]} if kept else {})
        return replicas in found

    most = _replicas(rate, highest)
    fewest = bisect_left(range(most), True, lo=_replicas(rate, highest * RESOLUTION), key=fits)
    return fewest, found.get(fewest)


def _size(spec: LoadedSpec, rate: float, nodes: int, per_node: int, planned: Planned) -> Iterator[Size]:
    """Yield the size of replicas on these devices, if the best candidate serves requests within the limits."""
    plan = planned(spec)
    loads = [each for each in plan.candidates if each.get("highest_load") and "last" not in each]
    if not loads:
        return
    best = max(loads, key=lambda each: float(each["highest_load"]))
    speed, (number, other) = best["objective"], _fewest(spec, float(best["highest_load"]), rate, planned)
    load = {RATE: "auto", **({NUMBER: "auto"} if _number(spec) == "auto" else {})}
    if other is not None:
        best, load = {**other, HIGHEST_LOAD: rate / number}, _fixed(spec, rate / number)
    used = nodes * per_node
    if nodes == 1 and best["output_tokens_per_s"]:  # no others, which would stay idle
        used = round(best["output_tokens_per_s"] / best["output_tokens_per_s_per_device"])
    low = float(best["highest_load"]) * min(1.0, speed["low"] / speed["value"])
    replica = {"chip": plan.chip, "nodes": nodes, "devices_per_replica": used, "candidate": best["candidate"]}
    text = values_text(best["candidate"], plan.knobs)
    yield _of_figures(spec, rate, best, low, **replica, load=load, configuration=text)


def measured_size(spec: LoadedSpec, rate: float, folder: Path) -> Size:
    """Return the size whose replicas have the best configuration of a run, at the highest rate that it measured.

    `folder`: that of a run of `flag tune` with `request_rate: auto`. Raises RunError, and UsageError without this rate.
    """
    result = read_result(folder)
    best = result.get("best") or {}
    trials = [each for each in (*result.get("trials", ()), *result.get("repeats", ())) if each.get("measured")]
    same = [each["measured"]["figures"] for each in trials if each["candidate"] == best.get("candidate")]
    rates = [float(each[HIGHEST_LOAD]) for each in same if each.get(HIGHEST_LOAD)]
    if not rates:
        raise UsageError(_("{folder} measured no highest rate; tune with request_rate: auto", folder=folder))
    knobs = {each.name: each for each in find_engine(engine_of(spec)).knobs}
    nodes, devices = int(_section(spec.data, "cluster").get("nodes") or 1), int(result["devices"])
    figures = {**same[0], HIGHEST_LOAD: statistics.median(rates)}
    replica = {"chip": result["chip"], "nodes": nodes, "devices_per_replica": devices, "candidate": best["candidate"]}
    replica["load"] = {RATE: "auto"}
    return _of_figures(spec, rate, figures, min(rates), **replica, configuration=values_text(best["candidate"], knobs))


def _of_figures(spec: LoadedSpec, rate: float, figures: Mapping[str, Any], low: float, **replica: Any) -> Size:
    """Return the size whose replicas have these `figures`. `low`: the rate that a replica serves at least. `replica`:
    the fields of `Size` about its devices and its configuration."""
    per_replica, price = float(figures[HIGHEST_LOAD]), _section(spec.data, "cluster").get("price_per_device_hour")
    slo = _section(_section(spec.data, "serve"), "slo")
    replicas, devices = _replicas(rate, per_replica), replica["devices_per_replica"]
    cost = None if price is None else price * devices * replicas
    output = figures["output_tokens_per_s"] / figures["requests_per_s"] if figures.get("requests_per_s") else 0.0
    return Size(
        **replica,
        replicas=replicas,
        devices=devices * replicas,
        safe_devices=devices * _replicas(rate, low),
        rate=per_replica,
        low_rate=low,
        in_flight=per_replica * figures["e2e_s"]["mean"],
        ttft_s=figures["ttft_s"]["p50"],
        ttft_p99_s=figures["ttft_s"]["p99"],
        tpot_s=figures["tpot_s"]["p50"],
        limited={name: {each: figures[name][each] for each in bounds} for name, bounds in slo.items()},
        nearest_limit=nearest_limit(flat_statistics(figures), flat_statistics(slo))[0],
        cost_per_hour=cost,
        cost_per_million_tokens=cost / HOUR / (rate * output) * 1e6 if cost is not None and output else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """An hour of a trace, with its highest rate over WINDOW_S seconds and the replicas that this rate needs."""

    hour: int
    requests: int
    rate: float
    replicas: int = 0


def hours_of(trace: str) -> list[Hour]:
    """Return the hours of a trace with arrival times, from its first request. Raises SpecError."""
    times = read_trace(trace).arrive_s
    if times is None:
        problem, fix = "has no arrival times", "give each row a timestamp in milliseconds"
        raise SpecError(key="--day", value=trace, problem=problem, fix=fix)
    windows = np.bincount((times / WINDOW_S).astype(int))
    per_hour = np.pad(windows, (0, -len(windows) % int(HOUR / WINDOW_S))).reshape(-1, int(HOUR / WINDOW_S))
    return [
        Hour(hour=number, requests=int(counts.sum()), rate=float(counts.max() / WINDOW_S))
        for number, counts in enumerate(per_hour)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The answer of `flag size`: the sizes that keep the limits at `rate` requests per second, the best first.

    - `hours`: the hours of a trace with the replicas of the best size.
    - `slo`: the limits in seconds, by latency and statistic.
    - `assumed`: the requests and the limits for which the sizes are predicted, in words.
    - `name`: that of the Deployment that `flag export` writes for the spec or run.
    - `has_image`: whether a published container image has the engine for the chip of the best size.
    - `changes`: the keys of the spec that replicas change, with values, besides their devices and load.
    """

    rate: float
    sizes: tuple[Size, ...]
    hours: tuple[Hour, ...] = ()
    engine: str
    model: str
    slo: Mapping[str, Mapping[str, float]]
    assumed: str = ""
    name: str = ""
    has_image: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Size:
        """The size with the lowest cost, or with the fewest devices."""
        return self.sizes[0]


def engine_of(spec: LoadedSpec) -> str:
    """Return the name of the engine of a spec, the first one of several."""
    engine = spec.data["serve"].get("engine")
    return engine[0] if isinstance(engine, list) else str(engine)


def sizing(
    spec: SpecLike,
    rate: float | None,
    day: str | None,
    chips: Mapping[str, float | None],
    run: Path | None = None,
    without: Collection[str] = (),
) -> Sizing:
    """Return how many devices keep the limits of a spec at a rate, or at that of the busiest hour of the trace `day`.

    `chips`: as in `sizes_of`. `run`: a run that measured one replica, as in `measured_size`. `without`: plugins that
    are not used. Raises the errors of `flagcore.estimate`, and UsageError without a rate.
    """
    file, data = spec_data(spec)
    serve = data.get("serve")
    if not isinstance(serve, dict):
        raise UsageError(_("flag size is for servers, but {file} has no section {section}", file=file, section="serve"))
    hours = hours_of(day) if day is not None else []
    given = _section(serve, "profile").get("request_rate")
    rate = rate or max((each.rate for each in hours), default=given if isinstance(given, (int, float)) else None)
    if not rate:
        raise UsageError(_("flag size needs the rate to serve: give --rate or --day"))
    if not rate <= MAX_TOTAL_RATE:
        raise UsageError(
            _("--rate {rate:g}: give at most {most:g} requests per second", rate=rate, most=MAX_TOTAL_RATE)
        )
    if not serve.get("slo") and run is not None:
        text = N_(
            "{file} has no serve.slo, within which a run finds its highest rate; tune one with --slo and --rate auto"
        )
        raise UsageError(_(text, file=file))
    if not serve.get("slo"):
        raise UsageError(_("flag size needs latency limits: give --ttft-p99 or --slo, or set serve.slo"))
    check_spec(spec, without)
    loaded, said = LoadedSpec(file, data), set[str]()

    def planned(spec: SpecLike, change: Callable[[Spec], Spec] = _for_best) -> Estimate:
        with _once(said):
            return estimate(spec, top=LISTED, distinct=True, without=without, change=change)

    found = sizes_of(loaded, rate, chips, planned) if run is None else [measured_size(loaded, rate, run)]
    best = found[0]
    spec = _replica(loaded, best.chip, None, best.nodes, best.devices_per_replica // best.nodes)
    numbers = (
        _replicas(each.rate, best.rate) if run is not None else _fewest(spec, best.rate, each.rate, planned)[0]
        for each in hours
    )
    with _once(said):
        opened = open_spec(changed_spec(spec, {RATE: "auto", "serve.profile.concurrency": None}), change=_for_best)
    return Sizing(
        rate=rate,
        sizes=tuple(found),
        hours=tuple(replace(each, replicas=number) for each, number in zip(hours, numbers, strict=True)),
        engine=engine_of(loaded),
        model=model if isinstance(model := data.get("model"), str) else "",
        slo=serve.get("slo") or {},
        assumed=_assumed(opened.spec.work),
        name=job_name(run.name if run else file.stem),
        has_image=bool(opened.problem.engine.plans.image(opened.problem.task, opened.problem.platform.support)),
        changes=without_baseline(loaded),
    )


def _for_best(spec: Spec) -> Spec:
    return replace(spec, work=replace(spec.serve, only_best=True))


@contextmanager
def _once(said: set[str]) -> Iterator[None]:
    """Log no warning that is in `said`, and add those of the block: each size is a plan with the same ones."""

    def is_new(record: logging.LogRecord) -> bool:
        count = len(said)
        said.add(record.getMessage())
        return len(said) > count

    LOG.addFilter(is_new)
    try:
        yield
    finally:
        LOG.removeFilter(is_new)


def _assumed(work: Any) -> str:
    """Return the requests and the limits of servers, in words."""
    load: Load = work.loads[0]
    shared = N_("of which all prompts share {count:,}") if load.prefix_len else N_("without a shared prefix")
    count = _("at least {count:,} requests", count=SEARCHED)
    requests = load.trace or ", ".join([lengths_text(load), _(shared, count=load.prefix_len), count])
    return _("for {requests}, within {limits}", requests=requests, limits=limits_text(work.slo))
