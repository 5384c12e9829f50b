"""Runs the trial of one candidate: start servers, read values back, warm up, send the load, write the metrics."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

from flagcore.domain.candidate import KnobValue
from flagcore.domain.serving import Load
from flagcore.domain.trial import TrialState
from flagcore.engines.results import METRICS
from flagcore.engines.serving.common.metrics import combine
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.load.figures import goodput, quantiles_of
from flagcore.engines.serving.load.highest import MIN_RATE, completions_per_s, highest_load
from flagcore.engines.serving.load.result import LoadResult, ProblemKind, Target
from flagcore.engines.serving.load.sending import measure
from flagcore.engines.serving.trial.client import run_client
from flagcore.engines.serving.trial.failures import TrialFailure, first_error, log_text
from flagcore.engines.serving.trial.job import SHARED_FOLDER, Job, log_name, plain_load
from flagcore.engines.serving.trial.remote import connect
from flagcore.engines.serving.trial.servers import Served, Server, check_all_alive, log, start_all, stop_all

ROUTER_HEALTH = "/health"
"""Path that returns 200 when a router is ready; all routers have it."""
MARGIN_SECONDS = 5.0
"""Part of a trial's time that is reserved to stop its servers and to report."""
STOP_SECONDS = 3.0
"""Part of it after which servers that have not stopped are killed, so that the report is in time."""
STATES_BY_PROBLEM = {
    ProblemKind.STATUS.value: TrialState.INVALID,
    ProblemKind.WRONG_LENGTH.value: TrialState.INVALID,
    ProblemKind.TIMED_OUT.value: TrialState.TIMED_OUT,
}
"""The state of a trial by the kind of its first problem; the default is FAILED."""
TIME_SHARE_OF_LOADS = 0.8
"""Part of the time left that the loads without a number of requests may take together."""
EXIT_SECONDS = 2.0
"""Maximum number of seconds between lost requests and the exit of their server."""
TIME_SHARE = 1.5
"""A search ends if the time left is less than this share of that of its longest load, or than the arrivals of the next
one; repeats end if it is less than this share of that of the last repeat. A steady load can end early: it needs 1."""
OVERLOADED = re.compile(r"refused: HTTP (429|503)\b")
"""The failure of a load that a server does not accept."""
INVALID_ANSWERS = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that reading the state of a server may raise."""
WARM_UP_TOKENS, MAX_WARM_UP = 4, 64
"""Length of the answers and maximum number of requests of the warm-up; load points may have their own in addition."""


def run(job: Job, folder: Path) -> None:
    """Run `job` and write its metrics into `folder`. Raises TrialFailure."""
    deadline = time.monotonic() + max(1.0, job.timeout_s - MARGIN_SECONDS)
    engine: Engine = resolve_name(job.engine)
    with (
        running_servers(job, engine, folder, deadline) as servers,
        running_router(job, servers, folder, deadline) as router,
    ):
        effective = _read_back(job, engine, servers)
        points = LoadRunner(job, engine, servers, router, folder, deadline).points()
        metrics = {
            "schema_version": 1,
            "effective": effective,
            "versions": dict(job.versions),
            "points": points,
            "counters": _counters(engine, servers),
            "startup_s": [server.startup_s for server in servers],
            "memory": [dict(engine.memory(log_text(server.log))) for server in servers],
            "resident_bytes": [server.resident_bytes() for server in servers],
        }
        check_all_alive(servers, "after the load")
    _write(folder / METRICS, metrics)


@contextlib.contextmanager
def running_servers(job: Job, engine: Engine, folder: Path, deadline: float) -> Iterator[Sequence[Served]]:
    """Yield the servers when all are healthy. Stop those that run here."""
    patterns = (*engine.program.failures, *job.patterns)
    if job.hosts:
        yield connect(job, folder, patterns, engine.health, deadline)
        return
    servers = [
        Server(f"instance {number}", each, folder / log_name(number), patterns)
        for number, each in enumerate(job.instances)
    ]
    try:
        start_all(servers, job.directory, engine.health, deadline)
        yield servers
    except TrialFailure as failure:
        log(str(failure))  # in case this program is killed while it stops the servers
        raise
    finally:
        stop_all(servers, deadline + STOP_SECONDS)
        shutil.rmtree(folder / SHARED_FOLDER, ignore_errors=True)


@contextlib.contextmanager
def running_router(job: Job, servers: Sequence[Served], folder: Path, deadline: float) -> Iterator[Sequence[Server]]:
    """Yield the router in front of the servers when it is healthy, none if the load goes to the servers."""
    if job.router is None:
        yield ()
        return
    addresses = [urlsplit(server.url) for server in servers]
    kinds = [each.kind for each in job.instances]
    places = [(kind, each.hostname or "", each.port or 0) for kind, each in zip(kinds, addresses, strict=True)]
    router = Server("router", job.router.instance(places), folder / "router.log", job.patterns)
    try:
        start_all([router], job.directory, ROUTER_HEALTH, deadline)
        yield (router,)
    finally:
        stop_all([router], deadline + STOP_SECONDS)


def _read_back(job: Job, engine: Engine, servers: Sequence[Served]) -> dict[str, KnobValue]:
    """Return the knob values in use that are equal on all servers. Raises TrialFailure if one differs from its knob."""
    reported: list[Mapping[str, KnobValue]] = []
    for server, instance in zip(servers, job.instances, strict=True):
        try:
            values = engine.effective(server.fetch, log_text(server.log))
        except INVALID_ANSWERS as error:
            _check_ended([server], "while its settings were read")
            raise TrialFailure(TrialState.FAILED, f"{server.name} does not report its settings: {error}") from None
        for knob, value in values.items():
            set_value = instance.requested.get(knob)
            if set_value is not None and set_value != value:
                reason = f"{server.name} runs {knob} = {value} instead of {set_value}"
                raise TrialFailure(TrialState.INVALID, reason)
        reported.append(values)
    combined = {knob: value for values in reported for knob, value in values.items()}
    return {
        knob: value for knob, value in combined.items() if all(values.get(knob, value) == value for values in reported)
    }


class LoadRunner:
    """Sends all loads to running servers. A round of all load points is one repeat.

    Prompts are equal for all candidates, but differ between points and repeats, so that no prefix cache has them.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        servers: Sequence[Served],
        router: Sequence[Server],
        folder: Path,
        deadline: float,
    ) -> None:
        self.job, self.engine, self.servers, self.folder, self.deadline = job, engine, servers, folder, deadline
        self.model = _model(servers[0])
        self.completions_per_s = math.inf  # of the last load
        self.loads_left = 1
        self.is_cut_off = False  # the last load ended with requests in flight
        self.fronts = router or servers
        self.all: Sequence[Served] = (*servers, *router)
        self.targets = [Target(url=front.url, path=engine.api) for front in self.fronts]

    def points(self) -> list[dict[str, Any]]:
        """Return the metrics of each load point in each repeat for which there is time. Raises TrialFailure."""
        job = self.job
        self._warm_up()
        if job.highest is not None:
            return self._search(job.highest)
        points: list[dict[str, Any]] = [{"load": plain_load(load), "repeats": []} for load in job.loads]
        times_s = [0.0] * len(points)
        for repeat in range(job.repeats):
            for index, load in enumerate(job.loads):
                name = f"load {index + 1} of {len(job.loads)}, repeat {repeat + 1} of {job.repeats}"
                began = time.monotonic()
                if self.deadline - began < times_s[index] * (1.0 if load.is_steady else TIME_SHARE):
                    log(f"no time left for {name}")
                    return points
                log(name)
                measurement: dict[str, Any] | None
                if job.client is not None:
                    measurement = self._run_client(job.client, f"client-{repeat}", name)
                else:
                    self.loads_left = (job.repeats - repeat) * len(job.loads) - index
                    measurement = self._measure(load, name, seed=1 + index * job.repeats + repeat)
                points[index]["repeats"].append(measurement)
                times_s[index] = time.monotonic() - began
        return points

    def _search(self, key: str) -> list[dict[str, Any]]:
        """Return the load points of the search for the highest load, without stopped ones.

        A load above the limits, or one that the servers refuse or do not finish, is tried again at once: a disturbance
        can only raise latencies. The highest load within the limits runs `repeats` times. If it then exceeds a limit,
        the next lower one is repeated, and so on. If none meets the limits, the only point is the lowest one tried.
        """
        base, is_concurrency, points = self.job.loads[0], key == "concurrency", dict[float, dict[str, Any]]()
        maximum = float((base.concurrency if is_concurrency else base.request_rate) or 1)
        tried, longest_s, seed, headroom = dict[float, bool](), 0.0, 0, 1.0

        def run(value: float, *, stop: bool = True) -> bool:
            nonlocal longest_s, seed, headroom
            began = time.monotonic()
            arrivals_s = 0.0 if is_concurrency else (base.num_prompts or 0) / value
            if tried and self.deadline - began < max(TIME_SHARE * longest_s if points else 0.0, arrivals_s):
                log(reason := f"no time left for {key} {value:.4g}")
                if points or stop:
                    return False
                reason += " and below, and higher ones exceed the limits; set a lower serve.profile.num_prompts"
                raise TrialFailure(TrialState.TIMED_OUT, reason)
            load = base.at(key, value)
            log(f"{key} {value:.4g}")
            seed += 1
            try:
                measured = self._measure(load, f"{key} {value:.4g}", seed, self.job.slo if stop else {})
            except TrialFailure as failure:
                late = failure.state is TrialState.TIMED_OUT and points
                if not late and not (stop and OVERLOADED.search(str(failure))):
                    raise
                log(f"{key} {value:.4g} is too high: {failure}")
                measured, self.is_cut_off = None, True
            if measured is None:
                tried[value] = False
            else:
                points.setdefault(value, {"load": plain_load(load), "repeats": []})["repeats"].append(measured)
                tried[value] = keeps_limits([each["figures"] for each in points[value]["repeats"]], self.job.slo)
                ratios = (limit / (measured["figures"].get(name) or limit) for name, limit in self.job.slo.items())
                headroom = min(ratios, default=1.0)
            longest_s = max(longest_s, time.monotonic() - began)
            return tried[value]

        highest_load(
            lambda value: run(value) or run(value),
            self.job.start,
            minimum=1.0 if is_concurrency else MIN_RATE,
            maximum=maximum,
            is_integer=is_concurrency,
            capacity=lambda: math.inf if is_concurrency else self.completions_per_s,
            headroom=lambda: headroom,
        )
        for value in sorted((value for value, kept in tried.items() if kept), reverse=True):
            repeated = [run(value, stop=False) for _ in range(self.job.repeats - 1)]
            if not repeated or repeated[-1]:
                break
        if not points:
            run(min(tried), stop=False)
        return [points[value] for value in sorted(points)]

    def _warm_up(self, most: int = MAX_WARM_UP) -> None:
        """Send the warm-up; a smaller one if the servers refuse so many requests at once. Raises TrialFailure."""
        try:
            self._send(_warm_up(self.job.loads[0], len(self.servers), most), "warm-up", seed=0)
        except TrialFailure as failure:
            if most == 1 or not OVERLOADED.search(str(failure)):
                raise
            self._warm_up(1)

    def _run_client(self, command: Sequence[str], folder: str, name: str) -> dict[str, Any]:
        client_folder = self.folder / folder
        figures, duration_s = run_client(
            command, self.job.report, self.fronts, self.model, client_folder, self.deadline, name
        )
        check_all_alive(self.all, f"during {name}")
        return {"figures": figures, "duration_s": duration_s}

    def _measure(
        self, load: Load, name: str, seed: int, limits: Mapping[str, float] | None = None
    ) -> dict[str, Any] | None:
        """Return the figures of a load, or None if it was stopped because it is certain to exceed one of `limits`."""
        if self.is_cut_off:
            self._warm_up(1)  # returns when the servers have dropped the requests of the last load
        local = [server for server in self.all if isinstance(server, Server)]
        start = _counters(self.engine, self.servers)
        cpu_start_s = sum(server.cpu_seconds() for server in local)
        result = self._send(load, name, seed, limits)
        ended_s = time.monotonic()
        self.completions_per_s = completions_per_s(result.requests)
        self.is_cut_off = result.stopped or result.window is not None
        if result.stopped:
            return None
        figures = {**result.figures, **shares(self.engine, start, _counters(self.engine, self.servers))}
        if local:
            figures["engine_cpu_s"] = sum(server.cpu_seconds() for server in local) - cpu_start_s
        else:  # servers may run on this host, too
            figures.pop("others_cores", None)
        if self.job.slo:
            figures["goodput_requests_per_s"] = goodput(result, self.job.slo)
        return {
            "figures": figures,
            "quantiles": quantiles_of(result.requests),
            "duration_s": result.duration_s,
            "window": [ended_s - result.duration_s + each for each in result.window or (0.0, result.duration_s)],
            "completed": result.completed,
            "notes": list(result.notes),
        }

    def _send(self, load: Load, name: str, seed: int, limits: Mapping[str, float] | None = None) -> LoadResult:
        """Return the result of a load. Raises TrialFailure unless every request has a complete answer."""
        timeout_s = self.deadline - time.monotonic()
        if timeout_s <= 0:
            raise TrialFailure(TrialState.TIMED_OUT, f"no time left for {name}")
        result = measure(
            self.targets,
            load,
            model=self.model,
            vocab_size=self.job.vocab_size,
            seed=seed,
            timeout_s=timeout_s,
            limits=limits,
            asked=self.job.asked,
            prefix_aware=self.job.prefix_aware,
            steady_s=TIME_SHARE_OF_LOADS * timeout_s / self.loads_left,
        )
        if result.problems or result.failed:
            raise _load_failure(result, name, self.all)
        check_all_alive(self.all, f"during {name}")
        return result


def shares(engine: Engine, start: Mapping[str, float], end: Mapping[str, float]) -> dict[str, float]:
    """Return the engine's shares of a load from its counters before and after it, without those that were reset."""
    increases = {name: value - start.get(name, 0.0) for name, value in end.items()} if start else {}
    return {
        name: increases.get(part, 0.0) / whole_increase
        for name, (part, *whole) in engine.program.shares.items()
        if min(increases.get(each, 0.0) for each in (part, *whole)) >= 0
        and (whole_increase := sum(increases.get(each, 0.0) for each in whole)) > 0
    }


def keeps_limits(repeats: Sequence[Mapping[str, float]], limits: Mapping[str, float]) -> bool:
    """Return whether the median of each figure is within its limit. A missing figure is not."""
    return all(
        statistics.median(figures.get(name, math.inf) for figures in repeats) <= limit for name, limit in limits.items()
    )


def _warm_up(load: Load, servers: int, most: int) -> Load:
    """Return a wave of at most `most` short answers, but two per server, which ends lazy initializations of engines."""
    wave = max(min(load.concurrency or load.num_prompts or 1, most), 2 * servers)
    length = 32 if load.trace is not None else load.input_len
    output_len = min(WARM_UP_TOKENS, load.output_len)
    return Load(input_len=length, output_len=output_len, num_prompts=wave, concurrency=wave, images=load.images)


def _load_failure(result: LoadResult, name: str, servers: Sequence[Served]) -> TrialFailure:
    """Return the failure of a load. A cause in a server's log takes precedence.

    Raises the failure of a server that has ended or ends soon: connections may be lost before it ends.
    """
    reason = result.problems[0] if result.problems else "unknown reason"
    state = STATES_BY_PROBLEM.get(reason.partition(":")[0], TrialState.FAILED)
    if state is TrialState.INVALID and re.match(r"refused: HTTP (5\d\d|408|429)", reason):
        state = TrialState.FAILED
    reason = f"{result.failed} of {result.completed + result.failed} requests in {name}: {reason}"
    _check_ended(servers, f"during {name}", EXIT_SECONDS if state is TrialState.FAILED else 0.0)
    for server in servers if state is TrialState.FAILED else ():
        cause, line = first_error(log_text(server.log), server.patterns)
        if cause is TrialState.OUT_OF_MEMORY:
            return TrialFailure(cause, f"{server.name}: {line}; {reason}")
        if cause is not None:
            reason += f"; the log of {server.name}: {line}"
    return TrialFailure(state, reason)


def _check_ended(servers: Sequence[Served], when: str, seconds: float = EXIT_SECONDS) -> None:
    """Raise TrialFailure if one of the servers has ended, or ends within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        check_all_alive(servers, when)
        if time.monotonic() >= deadline:
            return
        time.sleep(0.1)


def _model(server: Served) -> str:
    try:
        return str(json.loads(server.fetch("/v1/models"))["data"][0]["id"])
    except INVALID_ANSWERS as error:
        _check_ended([server], "while its model was read")
        raise TrialFailure(TrialState.FAILED, f"{server.name} does not report its model: {error}") from None


def _counters(engine: Engine, servers: Sequence[Served]) -> dict[str, float]:
    """Return the counters of all servers together."""
    counters = [engine.read_counters(server.fetch) for server in servers]
    names = dict.fromkeys(name for each in counters for name in each)
    combined = {name: combine(name, [each[name] for each in counters if name in each]) for name in names}
    return {name: value for name, value in combined.items() if math.isfinite(value)}


def _write(file: Path, data: Mapping[str, Any]) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    temporary.replace(file)
