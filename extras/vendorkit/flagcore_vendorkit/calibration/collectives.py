"""Compares values of the variables of a collective library, by the times of collectives at the sizes of a job."""

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from flagcore.api.inputs import LoadedSpec, OpenedSpec, SpecLike, open_spec, spec_data
from flagcore.contracts import CollectiveCosts, Problem
from flagcore.domain.chip import Device
from flagcore.domain.engine import device_variables
from flagcore.domain.knob import WHOLE_STEP
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import FloatArray, IntArray
from flagcore.errors import RunError, UsageError
from flagcore.i18n import N_, _
from flagcore_vendorkit.calibration.measuring import devices_of_job, run_benchmark
from flagcore_vendorkit.choices import Choice, predicted
from flagcore_vendorkit.engines import all_knobs

KNOB = "collectives"
"""The knob that compares the saved choice with the library's defaults."""
SECONDS = 600.0
CALLS = 12
"""The number of different collectives that are timed, from those that take longest to the shortest."""
MAX_BYTES = 256 << 20
"""The largest size that is timed, as by `flag calibrate`. Larger ones are taken to gain as much."""
GAIN = 0.02
"""The share of the time of collectives that a value must save: less is noise."""
START_SECONDS, HANG_SECONDS, HANG_RATIO = 300.0, 15.0, 2.0
"""Time limits of a benchmark: of the first, and of others in addition to a multiple of the first's duration."""

Call: TypeAlias = tuple[str, int, int, int]
"""A collective: its kind, the number of ranks, how many devices they are apart, and its bytes."""


@dataclass(frozen=True)
class _Other:
    """Costs of collectives with other times."""

    costs: CollectiveCosts

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        return self.costs.compute_share(ranks, stride)


@dataclass(frozen=True)
class _Recorder(_Other):
    """Costs of collectives that note the calls that are asked for, with their predicted seconds."""

    calls: dict[Call, float]

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        found = self.costs.seconds(kind, payload_bytes, ranks, stride)
        arrays = (each.ravel().tolist() for each in np.broadcast_arrays(ranks, stride, payload_bytes, found))
        for count, apart, size, seconds in zip(*arrays, strict=True):
            if count > 1 and size >= 1:
                self.calls[kind, int(count), int(apart), min(int(size), MAX_BYTES)] = seconds
        return found


@dataclass(frozen=True)
class _Measured(_Other):
    """Costs of collectives with the measured seconds of some calls, and between their sizes the measured ratios."""

    times: Mapping[Call, float]

    @cached_property
    def _ratios(self) -> Mapping[tuple[str, int, int], list[tuple[float, float]]]:
        found: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
        for (kind, ranks, stride, size), seconds in sorted(self.times.items()):
            arguments = (np.array([float(size)]), np.array([ranks]), np.array([stride]))
            usual = float(self.costs.seconds(kind, *arguments)[0])
            found.setdefault((kind, ranks, stride), []).append((math.log(size), seconds / usual))
        return found

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        found = self.costs.seconds(kind, payload_bytes, ranks, stride)
        for (own, count, apart), points in self._ratios.items():
            if own == kind:
                sizes, ratios = zip(*points, strict=True)
                ratio = np.interp(np.log(np.maximum(payload_bytes, 1.0)), sizes, ratios)
                found = np.where((ranks == count) & (stride == apart), found * ratio, found)
        return found


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The benchmark with some variables: the seconds of each call, and digests of exact and of random results."""

    seconds: tuple[float, ...] = ()
    exact: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    failed: str = ""


def calibrate_collectives(
    source: SpecLike,
    *,
    seconds: float = SECONDS,
    rounding: bool = False,
    without: Collection[str] = (),
    on_start: Callable[[str], object] = lambda line: None,
) -> tuple[Choice, Path]:
    """Find the fastest values of the collective library's variables for the baseline of a spec, and save them.

    The variables are those that the chip's plugin lists in `collectives`, without those that the user sets. A value
    that fails, hangs or gives wrong results is excluded; so is one whose sums are rounded differently, unless
    `rounding` is true. Values that save time are combined. `seconds` is about the time of the benchmarks. Returns the
    choice and its file. Raises the errors of `flagcore.errors`.
    """
    file, data = spec_data(source)
    opened = open_spec(LoadedSpec(file, data), without=without)
    platform = opened.problem.platform
    chip, here = platform.task.cluster.groups[0].chip, platform.devices_of() if platform.devices else ()
    calls, settings = _calls(opened.problem, len(here)), _settings(opened)
    if not calls:
        text = N_("the baseline of {file} has no collectives among the {count} devices of this machine")
        raise UsageError(_(text, file=file, count=len(here)))
    if not settings:
        text = N_("no variable to compare: `collectives` of the plugin of {chip} has none that you do not set yourself")
        raise UsageError(_(text, chip=chip.name))
    on_start(_("timing {count} collectives with {values} settings", count=len(calls), values=len(settings)))
    compared = _Comparison(opened.problem, here, calls, seconds, len(settings))
    rows = [{"setting": "", "time": 1.0, "excluded": "", "calls": calls, "seconds": compared.default.seconds}]
    good: list[tuple[float, str, str]] = []
    for name, value in settings:
        factor, why = compared.factor({name: value}, rounding)
        rows.append({"setting": f"{name}={value}", "time": factor, "excluded": why})
        if factor is not None and not why:
            good.append((factor, name, value))
    chosen, best = _combined(compared, sorted(good), rows, rounding)
    choice = Choice(
        knob=KNOB,
        chip=chip.name,
        engine=platform.task.spec.work.engine,
        job=file.name,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        how=f"flag calibrate of flagcore {version('flagcore')}",
        environment=chosen,
        time=predicted(1.0 - best),
        part=compared.part,
        rows=tuple(rows),
    )
    return choice, choice.save()


class _Comparison:
    """Runs the benchmark with different variables, and predicts the job with the times of its collectives.

    `default`: the run without variables. `noise`: the share of time that is no gain. `part`: as `Effect.part`.
    """

    def __init__(
        self, problem: Problem, here: Sequence[Device], calls: Sequence[Call], seconds: float, settings: int
    ) -> None:
        platform, self._problem, self._calls = problem.platform, problem, calls
        per_call = seconds / (settings + 4) / len(calls) / 4.0  # programs also have to start
        self._job = {**devices_of_job(platform.support, here, len(here)), "calls": calls, "seconds": min(per_call, 1.0)}
        envs, selected = platform.task.spec.envs, device_variables(platform.support, here)
        self._environment = {**platform.environment, **envs, **platform.task.spec.cluster.envs, **selected}
        self._limit, start = START_SECONDS, time.monotonic()
        self._deadline = start + seconds + START_SECONDS
        first, second = self._run({}), self._run({})
        self._limit = HANG_SECONDS + HANG_RATIO * (time.monotonic() - start) / 2.0
        self._deadline = time.monotonic() + seconds
        if why := first.failed or second.failed:
            raise RunError(why)
        self._is_repeatable = first.random == second.random
        self.part, before = self._predicted(first)
        _, after = self._predicted(second)
        self.noise = max(GAIN, abs(1.0 - after / before))
        self.default = replace(first, seconds=tuple(map(min, first.seconds, second.seconds)))
        self._default_s = self._predicted(self.default)[1]

    def factor(self, variables: Mapping[str, str], rounding: bool) -> tuple[float | None, str]:
        """Return the factor of variables on the time of the job's collectives, and why they cannot be used."""
        run = self._run(variables)
        if run.failed:
            return None, run.failed
        factor = self._predicted(run)[1] / self._default_s
        if run.exact != self.default.exact:
            return factor, _("wrong results")
        if run.random != self.default.random and self._is_repeatable and not rounding:
            return factor, _("rounds sums differently; --rounding admits it")
        return factor, ""

    def _run(self, variables: Mapping[str, str]) -> _Run:
        if (left := self._deadline - time.monotonic()) < 0:
            return _Run(failed=_("no time was left"))
        limit = min(self._limit, left + HANG_SECONDS)
        try:
            found = run_benchmark("collectives", self._job, {**self._environment, **variables}, limit)
        except RunError as error:
            return _Run(failed=str(error))
        us, exact, random = zip(*found, strict=True)
        return _Run(seconds=tuple(1e-6 * each for each in us), exact=exact, random=random)

    def _predicted(self, run: _Run) -> tuple[str, float]:
        """Return the parts of a step that communicate, and their seconds with the times of a run."""
        usual, times = self._problem.platform.costs.collectives, dict(zip(self._calls, run.seconds, strict=True))
        found = _predict(self._problem, _Measured(usual, times))
        parts = {name: float(each[0]) for name, each in found.time_s.items() if "_comm_" in name}
        if (seconds := sum(parts.values())) > 0.0:
            return " ".join(parts), seconds
        return WHOLE_STEP, float(found.step_time_s[0])


def _predict(problem: Problem, collectives: CollectiveCosts) -> Predictions:
    """Return the engine's prediction of the baseline with other costs of collectives."""
    platform, task = problem.platform, problem.platform.task.for_engine()
    of_plugins = {knob.name for knob in platform.task.knobs}
    values = {name: value for name, value in problem.baseline.as_dict().items() if name not in of_plugins}
    columns = platform.engine.columns(task, values)
    return platform.engine.predict(task, columns, replace(platform.costs, collectives=collectives))


def _calls(problem: Problem, devices: int) -> list[Call]:
    """Return the collectives of the baseline among `devices` devices, those that take longest first."""
    calls = dict[Call, float]()
    _predict(problem, _Recorder(problem.platform.costs.collectives, calls))
    fitting = [call for call in calls if devices and devices % (call[1] * call[2]) == 0]
    return sorted(fitting, key=lambda call: -calls[call])[:: -(-len(fitting) // CALLS) or 1]


def _settings(opened: OpenedSpec) -> list[tuple[str, str]]:
    """Return the values of variables that the chip's plugin lists, without variables that the user sets."""
    platform, loaded = opened.problem.platform, opened.plugins
    chip, engine = platform.task.cluster.groups[0].chip, platform.task.spec.work.engine
    package = next((each.package for each in loaded.plugins if each.name == loaded.owner(chip.name)), "")
    own = {*os.environ, *(name for each in opened.spec.variables for name in each)}
    listed = [each for each in (all_knobs(package) if package else ()) if each.is_screened]
    knobs = [each.knob for each in listed if each.scope.includes(chip, engine, platform.engine_version)]
    settings = (item for knob in knobs for effect in knob.effects.values() for item in effect.environment.items())
    return [(name, value) for name, value in settings if name not in own]


def _combined(
    compared: _Comparison, good: Sequence[tuple[float, str, str]], rows: list[dict[str, Any]], rounding: bool
) -> tuple[dict[str, str], float]:
    """Return the values that together save the most time, added one by one, and their time relative to the default.

    `good`: the time, the variable and the value of each setting that saves time, the fastest first. `rows` get the
    combinations that were timed.
    """
    chosen, best = dict[str, str](), 1.0
    for factor, name, value in good:
        if name not in chosen and factor < 1.0 - compared.noise:
            joined = {**chosen, name: value}
            together, why = compared.factor(joined, rounding) if chosen else (factor, "")
            if chosen:
                text = " ".join(f"{name}={value}" for name, value in joined.items())
                rows.append({"setting": text, "time": together, "excluded": why})
            if together is not None and not why and together < best - compared.noise:
                chosen, best = joined, together
    return chosen, best
