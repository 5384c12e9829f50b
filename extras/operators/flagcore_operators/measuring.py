"""Runs a job to record its operators, times their implementations in other processes, and saves the best choice.

What vendors' plugins say against implementations is in their files `operators.yaml`.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flagcore_vendorkit.choices import Choice, predicted
from flagcore_vendorkit.fields import build, read_file

import flagcore
from flagcore import plugins
from flagcore.api.inputs import LoadedSpec, SpecLike, changed_spec, loaded_plugins, read_spec, spec_data
from flagcore.domain.chip import Chip, Device, Source
from flagcore.domain.engine import EngineSupport, device_variables
from flagcore.domain.files import data_folder
from flagcore.domain.launch import Exit, Launch, failure
from flagcore.errors import Interrupted, RunError, UsageError
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins
from flagcore_operators.contract import OperatorLibrary, find_library, libraries
from flagcore_operators.start import RECORD

SECONDS = 600.0
SHAPES = 4
"""The number of calls of an operator that are timed: those with most work."""
START_SECONDS, HANG_SECONDS, HANG_SHARE, POLL_SECONDS = 180.0, 60.0, 0.25, 0.2
"""The benchmark may take so long to start, and for one implementation of one call, which may have to be compiled. The
latter is at most a share of the time limit."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a job runs: its chip, the devices of this machine, and the variables of its trials."""

    chip: Chip
    support: EngineSupport
    devices: tuple[Device, ...]
    package: str
    environment: Mapping[str, str]


def calibrate_operators(
    source: SpecLike,
    *,
    library: str | None = None,
    seconds: float = SECONDS,
    without: Collection[str] = (),
    on_start: Callable[[str], object] = lambda line: None,
) -> tuple[Choice, Path]:
    """Find the fastest right implementation of each operator of a library that the job of a spec calls, and save them.

    The baseline of the spec runs once. `library`: its name; by default, the only one that the job can use. `seconds`:
    the time limit of the benchmark. Returns the choice and its file. Raises the errors of `flagcore.errors`.
    """
    file, data = spec_data(source)
    spec = read_spec(LoadedSpec(file, data), without=without)
    engine = spec.work.engine
    with loaded_plugins(without) as loaded, tempfile.TemporaryDirectory(prefix="flagcore-operators-") as folder:
        place = _place(loaded, spec.cluster.chip, engine, spec.envs)
        used = _library(library, place, engine)
        reasons = avoided(place.package, used.data) if place.package else {}
        in_effect = used.in_effect({**place.environment, **os.environ, **spec.envs}, place.chip.vendor)
        if "*" in in_effect:
            text = N_("{library} is restricted to some operators by variables of this shell or the spec; unset them")
            raise UsageError(_(text, library=used.name))
        try:
            on_start(_("recording the operators of the baseline"))
            calls, run_s = _record(LoadedSpec(file, data), used, Path(folder), without)
            reasons = _of_orders(reasons, calls)
            count = len({call["operator"] for call in calls})
            on_start(_("timing {count} operators for at most {seconds:.0f} s", count=count, seconds=seconds))
            job = {
                "library": used.name,
                "device_type": place.support.device_type,
                "preload": list(place.support.preload),
                "threads": 1 if place.support.shared_devices else 0,
                "calls": calls,
            }
            environment = {**place.environment, **spec.envs, **device_variables(place.support, place.devices[:1])}
            rows = _time(job, _todo(calls, used, in_effect, reasons), environment, Path(folder), seconds)
        except KeyboardInterrupt:
            raise Interrupted(_("interrupted; nothing was saved")) from None
    found = choose(calls, rows, in_effect, reasons)
    better = {each.operator: each.chosen for each in found if each.chosen != each.default}
    run_s = max(run_s, math.fsum(each.default_s or 0.0 for each in found))
    gain = min(math.fsum(each.gain_s for each in found) / run_s, 0.9) if run_s else 0.0
    choice = Choice(
        knob=f"{used.name}_operators",
        chip=place.chip.name,
        engine=engine,
        job=file.name,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        how=f"flag operators of flagcore {version('flagcore')}",
        environment=used.environment({**in_effect, **better}) if better else {},
        time=predicted(gain),
        rows=tuple(asdict(each) for each in found),
        file=used.file({**in_effect, **better}) if better else "",
    )
    return choice, choice.save()


def _place(loaded: LoadedPlugins, name: str | None, engine: str, envs: Mapping[str, str]) -> _Place:
    """Return where a job runs. `name`: the chip of the spec, or `auto`."""
    devices = loaded.devices(envs)
    chip = (name and loaded.find_chip(name)) or plugins.target(loaded)[0]
    own = tuple(device for device in devices if chip.has_name(device.chip))
    if not own:
        raise UsageError(_("this machine has no {chip}; operators are timed on the job's devices", chip=chip.name))
    return _Place(
        chip=chip,
        support=loaded.engine_support(chip, engine),
        devices=own,
        package=next((each.package for each in loaded.plugins if each.name == loaded.owner(chip.name)), ""),
        environment=loaded.environment(chip, engine),
    )


def _library(name: str | None, place: _Place, engine: str) -> OperatorLibrary:
    if name is not None:
        return find_library(name)
    device_type = place.support.device_type or ""
    usable = [each for each in libraries() if each.serves(device_type, engine)]
    if len(usable) != 1:
        names = ", ".join(each.name for each in usable or libraries())
        text = N_("several libraries have operators of this job; choose one with --library: {names}")
        none = N_("no installed library has operators of {engine} on {device}; libraries: {names}")
        raise UsageError(_(text if usable else none, names=names, engine=engine, device=device_type))
    return usable[0]


def _record(
    source: LoadedSpec, library: OperatorLibrary, folder: Path, without: Collection[str]
) -> tuple[list[dict[str, Any]], float]:
    """Run the baseline, and return the calls of the process with most work, and the predicted seconds of its steps.

    The measurement is not kept, because recording slows the run down.
    """
    recorded = folder / "calls"
    recorded.mkdir()
    control = {f"auto_tuner.control.{name}": value for name, value in (("max_trials", 1), ("repeats", 0))}
    recording = changed_spec(source, {**control, f"envs.{RECORD}": f"{library.name}:{recorded}"})
    try:
        outcome = flagcore.tune(recording, run_dir=folder / folder.name, without=without)
    finally:
        for file in (data_folder() / "experience").glob(f"{folder.name}-*.jsonl"):
            file.unlink()
    processes = [json.loads(file.read_text("utf-8")) for file in recorded.glob("*.json")]
    if not processes:
        text = N_("the job called no operator of {library}: does it run torch 2.5 or later in this environment?")
        raise RunError(_(text, library=library.name))
    calls: list[dict[str, Any]] = max(processes, key=lambda each: sum(call["count"] * call["size"] for call in each))
    spec, (trial, *_others) = read_spec(source, without=without), outcome.data["trials"]
    predicted = (trial["predicted"].get("step_time_s") or {}).get("value")
    run_s = spec.control.train_iters * float(predicted) if predicted and spec.work.has_steps else 0.0
    return sorted(calls, key=lambda call: -call["count"] * call["size"]), run_s


def _of_orders(
    reasons: Mapping[str, Mapping[str, str]], calls: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """Return the reasons against implementations of the calls' operators; an order has those of its first one."""
    known = {call["operator"]: call["implementations"] for call in calls}
    return {
        operator: {each: why for each in known[operator] for name, why in own.items() if each.split("|")[0] == name}
        for operator, own in reasons.items()
        if operator in known
    }


def _todo(
    calls: Sequence[Mapping[str, Any]],
    library: OperatorLibrary,
    in_effect: Mapping[str, str],
    avoided: Mapping[str, Mapping[str, str]],
) -> list[tuple[int, list[str]]]:
    """Return the calls to time, those with most work first, each with its implementations, the reference first."""
    counts, todo = dict[str, int](), []
    for place, call in enumerate(calls):
        operator, known = call["operator"], call["implementations"]
        counts[operator] = counts.get(operator, 0) + 1
        if counts[operator] <= SHAPES:
            default = in_effect.get(operator, known[0])
            first = library.reference_of(known) or known[0]
            others = [each for each in known if each == default or each not in avoided.get(operator, {})]
            todo.append((place, list(dict.fromkeys([first, *others]))))
    return todo


def _time(
    job: dict[str, Any], todo: list[tuple[int, list[str]]], environment: Mapping[str, str], folder: Path, seconds: float
) -> list[dict[str, Any]]:
    """Return the results of the benchmark. A process that crashes or hangs costs one implementation of one operator.

    Calls for which no time is left have no result.
    """
    rows, deadline, hang_seconds = (
        list[dict[str, Any]](),
        time.monotonic() + seconds,
        min(HANG_SECONDS, HANG_SHARE * seconds),
    )
    operators = [call["operator"] for call in job["calls"]]
    while todo and (left := deadline - time.monotonic()) > 0:
        lines, ended = _run({**job, "todo": todo}, environment, folder, left, hang_seconds)
        rows += [line for line in lines if line.get("done")]
        begun = next((line for line in lines[-1:] if line and not line.get("done")), None)
        if begun and ended.ended_by != "timeout":
            is_hanging = ended.ended_by == "request"
            why = f"hangs for more than {hang_seconds:.0f} s" if is_hanging else f"crashes with exit code {ended.code}"
            rows.append({**begun, "failed": why})
        left_over = _left_over(todo, rows, operators)
        if left_over == todo:
            break
        todo = left_over if begun else []
    return rows


def _run(
    job: Mapping[str, Any], environment: Mapping[str, str], folder: Path, seconds: float, hang_seconds: float
) -> tuple[list[dict[str, Any]], Exit]:
    """Run the benchmark until it ends or hangs, and return the lines of its output and how it ended. Raises RunError if
    it has no output."""
    output = folder / "found.jsonl"
    output.write_text("")
    (folder / "job.json").write_text(json.dumps({**job, "output": str(output)}), encoding="utf-8")
    argv = (sys.executable, "-m", "flagcore_operators.bench", str(folder / "job.json"))
    running = plugins.launcher("local").start(
        Launch(argv=argv, folder=str(folder / "bench"), environment=environment, timeout_seconds=seconds)
    )
    try:
        size, since, limit = 0, time.monotonic(), START_SECONDS
        while running.wait(POLL_SECONDS) is None and time.monotonic() - since <= limit:
            if output.stat().st_size > size:
                size, since, limit = output.stat().st_size, time.monotonic(), hang_seconds
    finally:
        ended = running.stop()
    lines = [json.loads(line) for line in output.read_text("utf-8").splitlines() if line.endswith("}")]
    if not lines:
        reason = failure(ended, str(folder / "bench"), (), ())[1]
        raise RunError(_("the benchmark of operators did not start: {reason}", reason=reason))
    return lines, ended


def _left_over(
    todo: Sequence[tuple[int, list[str]]], rows: Sequence[Mapping[str, Any]], operators: Sequence[str]
) -> list[tuple[int, list[str]]]:
    """Return the calls without a result, each with its implementations, without those that are broken."""
    broken = {(operators[row["call"]], row["implementation"]) for row in rows if "seconds" not in row}
    known = {(row["call"], row["implementation"]) for row in rows}
    left = (
        (place, [each for each in names if (place, each) not in known and (operators[place], each) not in broken])
        for place, names in todo
    )
    return [(place, names) for place, names in left if names]


GAIN = 0.02
"""The share by which another implementation must be faster than the default: less is noise, and a default is tested
more often."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The choice for one operator. Times are seconds of all its calls in the recorded run.

    `excluded`: the reason for each implementation that cannot be used. `chosen` is `default` if nothing was measured.
    """

    operator: str
    calls: int
    default: str
    chosen: str
    default_s: float | None
    chosen_s: float | None
    excluded: Mapping[str, str] = field(default_factory=dict)

    @property
    def gain_s(self) -> float:
        """The seconds that the choice saves."""
        return 0.0 if self.default_s is None or self.chosen_s is None else self.default_s - self.chosen_s


def choose(
    calls: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    in_effect: Mapping[str, str],
    avoided: Mapping[str, Mapping[str, str]],
) -> list[Chosen]:
    """Return the fastest right implementation of each operator, those with the largest gain first.

    `calls`: as the recorder saves them. `rows`: results of the benchmark: `call` (a place in `calls`),
    `implementation`, and `seconds`, `wrong` or `failed`. Calls that were not timed count as the timed ones of their
    operator, by their sizes. `in_effect`: see `OperatorLibrary.in_effect`. `avoided`: reasons against implementations,
    by operator.
    """
    found = []
    for operator in dict.fromkeys(call["operator"] for call in calls):
        own = {place: call for place, call in enumerate(calls) if call["operator"] == operator}
        implementations = next(iter(own.values()))["implementations"]
        set_by_user = in_effect.get(operator, in_effect.get("*", ""))
        default = set_by_user if set_by_user in implementations else implementations[0]
        results = [row for row in rows if row["call"] in own]
        excluded = _excluded(results, avoided.get(operator, {}))
        times = _times(own, results, implementations)
        right = {each: value for each, value in times.items() if each not in excluded}
        chosen = min(right, key=lambda each: right[each], default=default)
        if default in right and right[chosen] > (1.0 - GAIN) * right[default]:
            chosen = default
        found.append(
            Chosen(
                operator=operator,
                calls=sum(call["count"] for call in own.values()),
                default=default,
                chosen=chosen,
                default_s=times.get(default),
                chosen_s=times.get(chosen),
                excluded=excluded,
            )
        )
    return sorted(found, key=lambda each: -each.gain_s)


def _excluded(results: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> dict[str, str]:
    excluded = dict(reasons)
    for row in results:
        if "seconds" not in row:
            why = f"wrong result: it {row['wrong']}" if row.get("wrong") else str(row["failed"])
            excluded.setdefault(row["implementation"], why)
    return excluded


def _times(
    calls: Mapping[int, Mapping[str, Any]], results: Sequence[Mapping[str, Any]], implementations: Sequence[str]
) -> dict[str, float]:
    """Return the seconds of all calls of an operator with each implementation that has a time of every timed call."""
    timed = {row["call"] for row in results}
    work = {place: call["count"] * max(call["size"], 1.0) for place, call in calls.items()}
    scale = sum(work.values()) / (sum(work[place] for place in timed) or 1.0)
    times = {}
    for each in implementations:
        seconds = {row["call"]: row.get("seconds") for row in results if row["implementation"] == each}
        if timed and seconds.keys() == timed and None not in seconds.values():
            times[each] = scale * sum(calls[place]["count"] * value for place, value in seconds.items())
    return times


def avoided(package: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return a vendor's reasons against implementations, by operator, from `operators.yaml` of its plugin's package.

    `names`: the libraries whose entries apply. Raises SpecError if the file is not valid.
    """
    content, found = read_file(package, "operators.yaml") or {}, dict[str, dict[str, str]]()
    for entry in build(tuple[Avoided, ...], content.get("avoid") or [], f"{package}/operators.yaml", "avoid"):
        for operator in entry.operators if entry.name in names else ():
            found.setdefault(operator, {})[entry.implementation] = f"{entry.why} ({entry.source.detail})"
    return found


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An implementation that a vendor, or users of its chips, found wrong, broken or slow for some operators.

    `name`: that of the library.
    """

    name: str
    implementation: str
    operators: tuple[str, ...]
    why: str
    source: Source
