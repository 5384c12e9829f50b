"""Sends the loads of a trial to its servers: the warm-up, and the load points or the search for the highest load."""

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flagcore.domain.metrics import HighestLoad
from flagcore.domain.trial import TrialState
from flagcore_serving.job import Load
from flagcore_serving.launch.reports import ServerReports, combine
from flagcore_serving.launch.server import TrialJob, plain_load, transfer_port
from flagcore_serving.load.figures import goodput, keeps_up
from flagcore_serving.load.progress import GROWTH, MIN_RATE, RESOLUTION, Verdict, completions_per_s, highest_load
from flagcore_serving.load.result import LoadResult, ProblemKind, Target
from flagcore_serving.load.routing import ENCODE, PREFILL
from flagcore_serving.load.sending import measure
from flagcore_serving.trial.failures import Limit, TrialFailure, fewest_answers, first_error, log_text
from flagcore_serving.trial.servers import (
    EXIT_SECONDS,
    INVALID_ANSWERS,
    Served,
    Server,
    check_all_alive,
    check_ended,
    log,
)

STATES_BY_PROBLEM = {ProblemKind.STATUS.value: TrialState.INVALID, ProblemKind.WRONG_LENGTH.value: TrialState.INVALID}
"""The state of a trial by the kind of its first problem. The default is FAILED."""
TIME_SHARE_OF_LOADS = 0.8
"""Share of the time left that loads without a fixed number of requests may take together."""
TIME_SHARE = 1.5
"""A search does not send a load if the remaining time is less than the time of its arrivals plus this multiple of the
longest time between the last arrival and the last answer of the loads before it. A load is not repeated if the
remaining time is less than this multiple of the last repeat's time, or than that time for a steady load, which can end
early."""
MIN_RUNS = 2
"""The minimum number of runs of the highest load within the limits, which may have met them once by chance. In 24
simulated searches each, 75% instead of 58% (mean) and 83% instead of 79% (p50) end within 10% of the true rate."""
SEARCHED_LOADS = 8
"""The loads of a search that share the time of a trial, if each lasts until its steady state is measured. A choice:
predicted starts need about six."""
OVERLOADED = re.compile(r"refused: HTTP (429|503)\b|: connection lost: after 0 events")
"""Matches the failure of a load that a running server refuses because it has too many requests: it says so, or closes
new connections."""
WARM_UP_TOKENS, MAX_WARM_UP = 4, 64
"""Tokens per answer, and maximum number of requests, of the warm-up. A load may also have a warm-up of its own."""


class LoadRunner:
    """Sends all loads to running servers. A round of all load points is one repeat.

    Prompts are equal for all candidates, but differ between points and repeats, so that no prefix cache already has
    them.
    """

    later: Sequence[Load] = ()
    """In the first round, the loads after the current one, for which time must be left."""
    highest: HighestLoad | None = None
    """The result of a search for the highest load."""
    is_slow = False
    """Whether a load was stopped because it was very likely slower than `job.min_rate`. It is then the last one."""
    may_be_cut = True
    """Whether the load may end with few requests, because it was not measured before: few are better than none."""

    def __init__(
        self, job: TrialJob, reports: ServerReports, servers: Sequence[Served], folder: Path, deadline: float
    ) -> None:
        self.job, self.reports, self.servers, self.deadline = job, reports, servers, deadline
        self.model = _model(servers[0])
        self.completions_per_s = math.inf  # the rate of the last load; infinity before the first load
        self.limit = Limit.of(folder, job.timeout_s, max(each.startup_s for each in servers))
        self.loads_left = 1
        self.is_cut_off = False  # whether the last load ended with requests in flight
        targets = [
            Target(url=each.url, path=reports.api, transfer_port=transfer_port(urlsplit(each.url).port or 0))
            for each in servers
        ]
        by_kind = list(zip(targets, (each.kind for each in job.instances), strict=True))
        self.prefill = [target for target, kind in by_kind if kind == PREFILL]
        self.encode = [target for target, kind in by_kind if kind == ENCODE]
        self.targets = [target for target, kind in by_kind if kind not in (PREFILL, ENCODE)]
        self.answering = [server for server, (_, kind) in zip(servers, by_kind, strict=True) if kind != ENCODE]

    def points(self) -> list[dict[str, Any]]:
        """Measure all load points, with as many repeats as there is time for. Raises TrialFailure."""
        job = self.job
        self._warm_up()
        if job.highest is not None:
            return self._search(job.highest)
        points: list[dict[str, Any]] = [{"load": plain_load(load), "repeats": []} for load in job.loads]
        times_s = [0.0] * len(points)
        # all points once, then all again: if the time runs out, all points have almost the same number of repeats
        for repeat, (index, load) in product(range(job.repeats), enumerate(job.loads)):
            name = f"load {index + 1} of {len(job.loads)}, repeat {repeat + 1} of {job.repeats}"
            began = time.monotonic()
            if repeat and self.deadline - began < times_s[index] * (1.0 if load.is_steady else TIME_SHARE):
                log(f"no time left for {name}")
                break
            log(name)
            self.loads_left = (job.repeats - repeat) * len(job.loads) - index
            self.later, self.may_be_cut = () if repeat else job.loads[index + 1 :], repeat == 0
            try:
                measurement = self._measure(load, name, seed=1 + index * job.repeats + repeat)
            except TrialFailure as failure:
                if not repeat or failure.state is not TrialState.TIMED_OUT:
                    raise  # a point needs one repeat, and other failures than timeouts end the trial
                log(f"{name} is left out: {failure}")
                break
            points[index]["repeats"].append(measurement)
            if self.is_slow:
                return points
            times_s[index] = time.monotonic() - began
        for repeats in (point["repeats"] for point in points):
            if len(repeats) < job.repeats:
                note = f"{len(repeats)} of {job.repeats} repeats: the time of the trial was used up"
                repeats[-1].setdefault("notes", []).append(note)
        return points

    def _search(self, key: str) -> list[dict[str, Any]]:
        """Search for the highest load, and return all measured load points, without loads that were stopped.

        `key`: concurrency or request_rate. A load above the limits, or one that the servers refuse or do not finish, is
        tried again at once, because disturbances can only raise latencies. A rate of which the servers complete less
        than half is tried once. The highest load within the limits runs `repeats` times, at least MIN_RUNS. If it then
        exceeds a limit, the next lower load is repeated, and so on; a wide gap above it is divided. If no load is left,
        lower ones are tried. If none meets the limits, the only point is the lowest load that was tried. `highest` is
        the result of the search.
        """
        base, is_concurrency, points = self.job.loads[0], key == "concurrency", dict[float, dict[str, Any]]()
        maximum = float((base.concurrency if is_concurrency else base.request_rate) or 1)
        least = 1.0 if is_concurrency else MIN_RATE
        tried, untested, answers_s, seed, headroom = dict[float, Verdict](), set[float](), 0.0, 0, 1.0

        def run(value: float, *, stop: bool = True) -> Verdict:
            nonlocal answers_s, seed, headroom
            began, load = time.monotonic(), base.at(key, value)
            arrivals_s = 0.0 if is_concurrency else (load.num_prompts or 0) / value
            # A load that runs out of time has no metrics, so it starts only if it is likely to end. Before the first
            # metrics, only the arrivals of the fewest requests that give metrics are considered, because a lower load
            # may be faster than those tried before.
            # The estimate is the same for all numbers of clients, so their search ends with the first untested one.
            fewest_s = arrivals_s * min(fewest_answers(load) / (load.num_prompts or 1), 1.0)
            if tried and self.deadline - began < (arrivals_s + TIME_SHARE * answers_s if points else fewest_s):
                log(reason := f"no time left for {key} {value:.4g}")
                untested.add(value)
                if points or stop:
                    return Verdict.UNTESTED
                reason += " and below, and higher ones exceed the limits"
                reason += "; set a lower serve.profile.num_prompts" if load.num_prompts else ""
                raise TrialFailure(TrialState.TIMED_OUT, reason)
            self.may_be_cut, self.completions_per_s = not points, math.inf
            self.loads_left = max(SEARCHED_LOADS - len(tried), 2)
            log(f"{key} {value:.4g}")
            seed += 1
            try:
                # the first answers of a steady load, which do not count, may exceed a limit
                limits = self.job.slo if stop and not load.is_steady else {}
                measured = self._measure(load, f"{key} {value:.4g}", seed, limits)
            except TrialFailure as failure:
                late = failure.state is TrialState.TIMED_OUT and points
                if not late and not (stop and OVERLOADED.search(str(failure))):
                    raise
                self.is_cut_off = True
                if late:
                    log(f"no time left for {key} {value:.4g}: {failure}")
                    untested.add(value)
                    return Verdict.UNTESTED
                log(f"{key} {value:.4g} is too high: {failure}")
                measured = None
            if measured is None:
                tried[value] = Verdict.EXCEEDED
            else:
                points.setdefault(value, {"load": plain_load(load), "repeats": []})["repeats"].append(measured)
                figures = [each["figures"] for each in points[value]["repeats"]]  # a missing metric exceeds its limit
                medians = {key: statistics.median(each.get(key, math.inf) for each in figures) for key in self.job.slo}
                is_met = all(medians[key] <= limit for key, limit in self.job.slo.items())
                is_met = is_met and keeps_up(load, measured["figures"], self.job.slo)
                tried[value] = Verdict.MET if is_met else Verdict.EXCEEDED
                ratios = (limit / (measured["figures"].get(name) or limit) for name, limit in self.job.slo.items())
                headroom = min(ratios, default=1.0)
            answers_s = max(answers_s, time.monotonic() - began - arrivals_s)
            return tried[value]

        def run_twice(value: float) -> Verdict:
            """Test a load, again if it exceeds a limit by what may be a disturbance, which can only raise latencies."""
            if (outcome := run(value)) is Verdict.EXCEEDED and (is_concurrency or 2 * self.completions_per_s > value):
                run(value)
            return tried.get(value, outcome)

        # Servers work off the requests of a far too high rate before those of the next load. The first warm-up does not
        # show their rate, because it includes their lazy initialization.
        highest_load(
            run_twice,
            self.job.start if is_concurrency else min(self.job.start, self._warm_up()),
            minimum=least,
            maximum=maximum,
            is_integer=is_concurrency,
            capacity=lambda: math.inf if is_concurrency else self.completions_per_s,
            headroom=lambda: headroom,
        )
        repeated = set[float]()
        while True:
            met = max((value for value, outcome in tried.items() if outcome is Verdict.MET), default=0.0)
            if met and met not in repeated:  # it may have met the limits once by chance, so repeats decide
                repeated.add(met)
                for _ in range(max(self.job.repeats, MIN_RUNS) - 1):
                    run(met, stop=False)
                continue
            over = min((each for each, found in tried.items() if each > met and found is not Verdict.MET), default=met)
            middle = math.sqrt(met * over) if met else max(over / GROWTH, least)
            middle = max(min(float(round(middle)), over - 1.0), 1.0) if is_concurrency else middle
            if over <= met * RESOLUTION**2 or middle in tried or run_twice(middle) is Verdict.UNTESTED:
                break
        if not points:
            run(min(tried), stop=False)
        self.highest = _highest(tried, untested)
        return [points[value] for value in sorted(points)]

    def _warm_up(self, most: int = MAX_WARM_UP) -> float:
        """Send at most `most` warm-up requests, or fewer if the servers refuse so many at once.

        Return how many they answer per second. Raises TrialFailure.
        """
        try:
            result = self._send(_warm_up(self.job.loads[0], len(self.servers), most), "warm-up", seed=0)
        except TrialFailure as failure:
            if most == 1 or not OVERLOADED.search(str(failure)):
                raise
            return self._warm_up(1)
        return result.completed / result.duration_s

    def _measure(
        self, load: Load, name: str, seed: int, limits: Mapping[str, float] | None = None
    ) -> dict[str, Any] | None:
        """Send a load and return its metrics, or None if it was stopped because it surely exceeds one of `limits`."""
        if self.is_cut_off:
            self._warm_up(1)  # returns when the servers have dropped the requests of the last load
        local = [server for server in self.servers if isinstance(server, Server)]
        start = counters(self.reports, self.answering)
        cpu_start_s = sum(server.cpu_seconds() for server in local)
        result = self._send(load, name, seed, limits, fewest=fewest_answers(load) if self.may_be_cut else sys.maxsize)
        ended_s = time.monotonic()
        self.completions_per_s = completions_per_s(result.requests)
        self.is_cut_off, self.is_slow = result.stopped or result.window is not None, result.slow
        if result.stopped:
            return None
        figures = {**result.figures, **shares(self.reports, start, counters(self.reports, self.answering))}
        if local:
            figures["engine_cpu_s"] = sum(server.cpu_seconds() for server in local) - cpu_start_s
        else:  # unknown, because remote servers may also run on this host
            figures.pop("others_cores", None)
        if self.job.slo:
            figures["goodput_requests_per_s"] = goodput(result, self.job.slo)
        return {
            "figures": figures,
            "duration_s": result.duration_s,
            "window": [ended_s - result.duration_s + each for each in result.window or (0.0, result.duration_s)],
            "completed": result.completed,
            "error": result.error,
            "notes": list(result.notes),
        }

    def _send(
        self, load: Load, name: str, seed: int, limits: Mapping[str, float] | None = None, *, fewest: int | None = None
    ) -> LoadResult:
        """Send a load and return its result.

        Raises TrialFailure unless all requests have complete answers or, when the load's share of the time is used up,
        at least `fewest` requests.
        """
        timeout_s = self.deadline - time.monotonic()
        if timeout_s <= 0:
            raise TrialFailure(TrialState.TIMED_OUT, self.limit.no_time(name))
        if load.is_steady:
            share_s = TIME_SHARE_OF_LOADS * timeout_s / self.loads_left
        else:
            share_s = timeout_s / (1 + len(self.later))
        # warm-ups and repeats always run to their end
        min_rate = self.job.min_rate if fewest is not None and self.may_be_cut else None
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
            prefill=self.prefill,
            encode=self.encode,
            protocol=self.job.protocol,
            share_s=share_s,
            fewest=fewest,
            min_rate=min_rate,
        )
        if result.failed and result.progress is None:
            raise _load_failure(result, name, self.servers)
        check_all_alive(self.servers, f"during {name}")
        if result.progress is None:
            return result
        loads, predicted_s = (load, *self.later), self.job.predicted_s
        reason = self.limit.short_of_time(result.progress, name, loads, timeout_s, predicted_s)
        if result.failed:
            raise TrialFailure(TrialState.TIMED_OUT, reason)
        return replace(result, notes=(*result.notes, reason))


def shares(reports: ServerReports, start: Mapping[str, float], end: Mapping[str, float]) -> dict[str, float]:
    """Return the ratios in `reports.shares` for a load, from the engine's counters at its start and end.

    Ratios of counters that were reset in between are omitted.
    """
    increases = {name: value - start.get(name, 0.0) for name, value in end.items()} if start else {}
    found = dict[str, float]()
    for name, (counted, *total_counters) in reports.shares.items():
        parts = [increases.get(each, 0.0) for each in counted.split("+")]
        totals = [increases.get(each, 0.0) for each in total_counters]
        if min(*parts, *totals) >= 0 and sum(totals) > 0:
            found[name] = sum(parts) / sum(totals)
    return found


def _highest(tried: Mapping[float, Verdict], untested: Collection[float]) -> HighestLoad:
    met = max((value for value, outcome in tried.items() if outcome is Verdict.MET), default=None)
    over = [value for value, outcome in tried.items() if outcome is Verdict.EXCEEDED and value > (met or 0.0)]
    exceeded = min(over, default=None)
    between = [value for value in untested if (met or 0.0) < value < (exceeded or math.inf)]
    return HighestLoad(met=met, exceeded=exceeded, untested=min(between, default=None))


def _warm_up(load: Load, servers: int, most: int) -> Load:
    """Return a warm-up load, with which engines finish their lazy initialization.

    The requests have short answers and are sent at once. There are at most `most` requests, but at least two per
    server.
    """
    wave = max(min(load.concurrency or load.num_prompts or 1, most), 2 * servers)
    length = 32 if load.trace is not None else load.input_len
    output_len = min(WARM_UP_TOKENS, load.output_len)
    return Load(input_len=length, output_len=output_len, num_prompts=wave, concurrency=wave, images=load.images)


def _load_failure(result: LoadResult, name: str, servers: Sequence[Served]) -> TrialFailure:
    """Return the failure of a load. A cause in a server's log takes precedence over the client's view. Raises the
    failure of a server that has ended or ends soon, because connections may be lost before the server ends."""
    reason = result.problems[0] if result.problems else "unknown reason"
    state = STATES_BY_PROBLEM.get(reason.partition(":")[0], TrialState.FAILED)
    if state is TrialState.INVALID and re.match(r"refused: HTTP (5\d\d|408|429)", reason):
        state = TrialState.FAILED
    reason = f"{result.failed} of {result.completed + result.failed} requests in {name}: {reason}"
    check_ended(servers, f"during {name}", EXIT_SECONDS if state is TrialState.FAILED else 0.0)
    for server in servers if state is TrialState.FAILED else ():
        cause, line = first_error(log_text(server.log), server.patterns)
        if cause is TrialState.OUT_OF_MEMORY:
            return TrialFailure(cause, f"{server.name}: {line}; {reason}")
        if cause is not None:
            reason += f"; the log of {server.name}: {line}"
    return TrialFailure(state, reason)


def _model(server: Served) -> str:
    try:
        return str(json.loads(server.fetch("/v1/models"))["data"][0]["id"])
    except INVALID_ANSWERS as error:
        check_ended([server], "while its model was read")
        raise TrialFailure(TrialState.FAILED, f"{server.name} does not report its model: {error}") from None


def counters(reports: ServerReports, servers: Sequence[Served]) -> dict[str, float]:
    """Return the counters by name, combined over all servers."""
    counters_of_servers = [reports.read_counters(server.fetch) for server in servers]
    names = dict.fromkeys(name for each in counters_of_servers for name in each)
    combined = {name: combine(name, [each[name] for each in counters_of_servers if name in each]) for name in names}
    return {name: value for name, value in combined.items() if math.isfinite(value)}
