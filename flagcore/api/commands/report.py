"""Reports on runs: the list of the runs in a folder, one run as text, and its page with the data of the page."""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from flagcore.api import runs
from flagcore.api.inputs import RUNS, SpecLike, knobs_of_spec, labels_of_spec, spec_data
from flagcore.api.notes import warn
from flagcore.contracts import Costs, Engine, Problem
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.files import open_regular, write
from flagcore.domain.prediction import MEMORY, components_of_row
from flagcore.domain.records import in_gib, prediction_record
from flagcore.domain.secrets import secrets_in_data
from flagcore.domain.space import LEARNED_MESSAGES, Candidate, Columns
from flagcore.domain.spec import Task
from flagcore.domain.trial import ESTIMATE
from flagcore.errors import FlagError, NoDevice, RunError
from flagcore.i18n import N_, _, printable
from flagcore.plugins import page_writer
from flagcore.report.formats import as_yaml
from flagcore.report.result import Result
from flagcore.report.run import INSIGHT, RunData, json_file
from flagcore.report.run_text import result_text
from flagcore.report.summary import no_best
from flagcore.report.text import duration_text
from flagcore.spec.plain_data import lookup
from flagcore.tuner.budget import seconds_left, seconds_used
from flagcore.tuner.effects import effects_of_row
from flagcore.tuner.feasibility import dry_run
from flagcore.tuner.journal import JOURNAL
from flagcore.tuner.loop import TuneResult
from flagcore.tuner.run_folder import IDENTITY, LOCK
from flagcore.tuner.search_state import summarize
from flagcore.tuner.stages.predict import with_figures
from flagcore.tuner.stages.rank import untried

REPORT = "report.html"


def list_runs(folder: Path | str = RUNS) -> list[dict[str, Any]]:
    """Return a record of each run in a folder, latest first, or of the folder itself if it is a run.

    A run with several engines but no best is listed as one run per engine. Each record has `run` (the folder), `state`,
    `changed` (date and time in UTC), and the known fields of `run_record`. Raises RunError if the folder does not
    exist.
    """
    place = Path(folder)
    if _is_run(place):
        return [run_record(place)]
    try:
        places = [[each] if _is_run(each) else each.glob("*") for each in place.iterdir()]
    except OSError as error:
        raise RunError(_("{file} has no runs: {reason}", file=place, reason=error.strerror)) from None
    found = filter(_is_run, chain.from_iterable(places))
    return sorted(map(run_record, found), key=lambda each: str(each["changed"]), reverse=True)


def show_run(folder: Path | str, without: Collection[str] = ()) -> tuple[Mapping[str, Any], str]:
    """Return the result of a run as data and as text. The run may be in progress. Raises RunError."""
    if not _is_run(Path(folder)):
        raise RunError(_("{folder} is not a run; `flag runs list` lists them", folder=folder))
    with _as_run_error(folder):
        run = report_data(Path(folder), without)
        text = result_text(replace(run, folder_name=str(folder), warnings=()))
    return run.data, "\n".join([*run.warnings, text])


@contextmanager
def _as_run_error(folder: Path | str) -> Iterator[None]:
    """Convert errors of a result whose values contradict each other to RunError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(_("the result in {folder} cannot be shown: {reason!r}", folder=folder, reason=error)) from error


def run_record(folder: Path) -> dict[str, Any]:
    """Return the main facts of a run from its result.

    `value`, `low` and `high` are the objective of the best in `unit`: the median and the range over its runs. `speedup`
    is the speedup over the baseline (`flagcore.domain.plan.Speedup`). `seconds` is the sum over all trials.
    `seconds_left` is an upper estimate for a run in progress. `no_best` is the reason why there is no best.
    """
    state, data = runs.INTERRUPTED, dict[str, Any]()
    try:
        data |= runs.read_result(folder)
    except RunError:
        state = runs.UNREADABLE
    home = folder / str(data.get("engine", "")) if data.get("engines") else folder
    is_running = _is_locked(folder)
    record: dict[str, Any] = {
        "run": str(folder),
        "state": runs.RUNNING if is_running else state,
        "model": lookup(json_file(home, IDENTITY), "task.model.name"),
        "changed": _day(folder, " %H:%M"),
    }
    if not data and not is_running:
        return record
    try:
        context = {"folder_name": str(folder), "knobs": knobs_of_spec(_spec(folder))}
        run = report_data(folder, ()) if is_running else RunData.from_json(data, home, **context)
        return {**record, **_run_facts(run, record["state"])}
    except (RunError, LookupError, TypeError, ValueError, AttributeError):
        return record if is_running else {**record, "state": runs.UNREADABLE}


def _run_facts(run: RunData, state: str) -> dict[str, Any]:
    """Return the fields of `run_record` that are read from the content of the run."""
    trials, best, speedup = run.all_trials, run.best, run.speedup
    value, low, high = (best and run.figures(best)) or (None, None, None)
    return {
        "state": state if state == runs.RUNNING else runs.state_of_ended(run),
        "hardware": run.hardware,
        "fidelity": run.fidelity,
        "trials": len(trials),
        "seconds": sum(each.duration_s for each in trials),
        "seconds_left": run.seconds_left,
        "candidate": best.candidate.as_dict() if best else None,
        "best": run.configuration(best) if best else None,
        "unit": run.unit,
        "value": value,
        "low": low,
        "high": high,
        "speedup": None if speedup is None else speedup.value,
        "significant": None if speedup is None else speedup.significant,
        "stopped_because": run.data.get("stopped_because"),
        "no_best": None if best else no_best(run),
    }


def _changed(folder: Path) -> float:
    """Return the time of the last change of a run, in seconds since 1970."""
    files = [file for name in (JOURNAL, runs.RESULT, IDENTITY) if (file := folder / name).is_file()]
    return max(each.stat().st_mtime for each in files or [folder])


def _day(folder: Path, time_form: str = "") -> str:
    """Return the day of the last change of a run in UTC, and its time in a form, if any."""
    return datetime.fromtimestamp(_changed(folder), timezone.utc).strftime("%Y-%m-%d" + time_form)


def _is_run(folder: Path) -> bool:
    """Return whether flagcore wrote a run to a folder. Other programs also write files with these names."""
    is_claimed = json_file(folder, IDENTITY).keys() >= {"run", "task", "fixed"}
    return is_claimed or "schema_version" in json_file(folder, runs.RESULT)


def _is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run, or of one of its engines."""
    return any(map(_holds, [folder / LOCK, *folder.glob(f"*/{LOCK}")]))


def _holds(file: Path) -> bool:
    try:
        lock = open_regular(file)
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def report(run_dir: Path | str, *, without: Collection[str] = ()) -> str:
    """Return the page of the run in a folder as HTML. It is not written to a file.

    The predictions come from insight.json, and are omitted if that is missing. A run that was killed, or is in
    progress, is read from its journal. `without` names plugins to disable. Raises RunError if the folder has no
    readable run, and NoDevice if flagcore-page is not installed.
    """
    with _as_run_error(run_dir):
        return printable(page_writer().as_html(report_data(Path(run_dir), without)))


def plan_report(problem: Problem, spec: SpecLike, start: str, expected: str) -> str:
    """Return the page of the plan of a spec as HTML, with the command `start` and the time that is `expected`.

    Raises NoDevice if flagcore-page is not installed.
    """
    (file, content), plan = spec_data(spec), replace(dry_run(problem), fidelity=ESTIMATE)
    data, best = Result.write(plan, ""), plan.best.candidate if plan.best else None
    context: dict[str, Any] = {"knobs": plan.knobs, "labels": problem.engine.plans.labels, "expected": expected}
    here = f"{file.parent.resolve()}/"  # paths below the spec become relative
    context["start"] = start.replace(here, "")
    with TemporaryDirectory() as parent:
        folder = Path(parent, file.stem)
        folder.mkdir()
        write(folder / "spec.yaml", as_yaml(content).replace(here, "") + "\n")
        return printable(
            page_writer().as_html(_redacted(data, insight(problem, best), folder, folder, folder_name="", **context))
        )


def save_report(run_dir: Path, ending: TuneResult, data: Mapping[str, Any]) -> bool:
    """Write the page and insight.json at the end of a run. Return whether this succeeded.

    A failure is only a warning.
    """

    def made() -> str:
        insight_data = insight(ending.problem, ending.plan.best.candidate if ending.plan.best else None)
        write(run_dir / INSIGHT, json.dumps(insight_data, ensure_ascii=False) + "\n")
        context: dict[str, Any] = {"knobs": ending.plan.knobs, "labels": ending.problem.engine.plans.labels}
        return printable(page_writer().as_html(_redacted(data, insight_data, run_dir, run_dir, **context)))

    return _is_written(run_dir, made)


def save_report_of_engines(run_dir: Path) -> bool:
    """Write the page of a run with several engines, like `save_report`."""
    return _is_written(run_dir, lambda: report(run_dir))


def _is_written(run_dir: Path, made: Callable[[], str]) -> bool:
    file = run_dir / REPORT
    try:
        write(file, made())
    except NoDevice as error:
        warn([str(error)])
        return False
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        command = f"flag report {run_dir}"
        warn([_("{file} was not written ({reason}); try `{command}`", file=file, reason=reason, command=command)])
        return False
    return True


def report_data(folder: Path, without: Collection[str]) -> RunData:
    """Return the data for the page of the run in a folder. Raises RunError if the folder has no readable run."""
    run = runs.read_run(folder)
    home, data, notes, left = runs.run_home(run), run.data, [*run.notes], None
    insight_data = json_file(home, INSIGHT)
    insight_data = insight_data if insight_data.get("schema_version") == SCHEMA_VERSION else {}
    new_trials = runs.ended_trials(run) - runs.count_trials(data) if run.fidelity != ESTIMATE else 0
    if not data or new_trials > 0:
        try:
            loaded = runs.load_snapshot(folder, None, without)
        except FlagError as error:
            if not data:
                text = N_("{folder} has no result yet, and its trials cannot be read: {reason}")
                raise RunError(_(text, folder=folder, reason=error)) from None
            notes.append(_("{count} more trials have ended since the result was written.", count=new_trials))
        else:
            problem, search_state = loaded.problem, loaded.search_state
            plan = summarize(loaded.task, problem.space, loaded.pruned, search_state, "", problem.knobs)
            data, insight_data = (
                Result.write(plan, str(folder)),
                insight(problem, plan.best.candidate if plan.best else None),
            )
            left = _seconds_left(home, loaded)
            notes.append(_("This run is in progress, or was killed: the report contains the trials that have ended."))
            notes += [] if left is None else [_("at most ~{time} left", time=duration_text(left))]
    if not insight_data:
        notes.append(_("Details of predictions are omitted: {reason}", reason=_("{file} is missing", file=INSIGHT)))
    used = data["baseline"]["candidate"] if data.get("baseline") else ()
    context: dict[str, Any] = {"knobs": knobs_of_spec(run.spec, used, without), "labels": labels_of_spec(run.spec)}
    context["seconds_left"] = left
    return _redacted(data, insight_data, home, folder, warnings=tuple(notes), **context)


def _seconds_left(folder: Path, loaded: runs.Snapshot) -> float | None:
    """Return the estimated maximum of the seconds until a run ends. None if unknown, or if no process holds it."""
    if not _is_locked(folder):
        return None
    state, trials = loaded.search_state, runs.all_trials(loaded.run)
    candidates = len(state.settled) + len(untried(replace(loaded.problem, pruned=loaded.pruned), state))
    left = seconds_left(loaded.task.spec.control, state, candidates, seconds_used(trials))
    return None if left is None else max(0.0, left - (time.time() - _changed(folder)))


def _redacted(data: Mapping[str, Any], insight: Mapping[str, Any], home: Path, folder: Path, **context: Any) -> RunData:
    """Return the data of a page without the secrets of this shell and of the run's spec.

    Commands on the page name the folder relative to the working directory, or `.` if it is elsewhere, so that the page
    does not reveal paths of this machine.
    """
    spec = _spec(home)
    secrets = tuple(dict.fromkeys((*secrets_in_data(os.environ), *secrets_in_data(spec))))
    relative = os.path.relpath(folder)
    context = {"folder_name": "." if relative.startswith("..") else relative, "date": _day(home), **context}
    return RunData.redacted(data, insight, spec, secrets, home, **context)


def _spec(folder: Path) -> dict[str, Any]:
    """Return the spec of the run in a folder as data. It is empty if the file cannot be read."""
    with suppress(FlagError):
        return runs.saved_spec(folder)
    return {}


SCHEMA_VERSION = 1


def insight(problem: Problem, best: Candidate | None) -> dict[str, Any]:
    """Return the rules, chips and environment of a run, and more about its best candidate, for the report page.

    The latter are the memory of its stages, its pipelines, and the fastest candidate for each value of each knob.
    """
    row = None if best is None else problem.space.find(best)
    used = {*problem.space.illegal, *problem.pruned.rules, *LEARNED_MESSAGES}
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "messages": {name: text for name, text in problem.messages.items() if name in used},
        "chips": list(_chips(problem.task)),
        "kernels_guessed": any(each.guessed for each in problem.platform.costs.groups),
        "environment": dict(problem.platform.environment),
    }
    if best is None or row is None:
        return data
    columns, engine = problem.space.columns(np.array([row])), problem.engine
    task, costs = problem.task.for_engine(effects_of_row(problem.task, columns)), problem.platform.costs
    pipelines = engine.plans.pipelines(task, columns, costs)
    is_one_stage = len(problem.task.cluster.groups) < 2 and all(len(each.forward_s) < 2 for each in pipelines)
    return {
        **data,
        "stages": list(_stages(engine, task, columns, costs)),
        "pipelines": [] if is_one_stage else [asdict(each) for each in pipelines],
        "knobs": what_if(problem, best),
    }


def _stages(engine: Engine, task: Task, columns: Columns, costs: Costs) -> Iterator[dict[str, Any]]:
    """Yield the memory of the first device of each pipeline stage, split into components if the engine has them."""
    if engine.probes is None:
        return
    for stage, first in enumerate(engine.probes.stage_ranks(task, columns)):
        parts = engine.plans.components(task, columns, np.array([stage]), costs)
        rank = engine.probes.predict(task, columns, first, costs, alone=False)
        levels = in_gib({name: getattr(rank, name) for name in MEMORY if name != "activation_bytes"})
        components = {name: in_gib(part) for name, part in components_of_row(parts, 0).items()}
        yield {"stage": stage, "rank": rank.rank, **levels, "components": components}


def _chips(task: Task) -> Iterator[Mapping[str, Any]]:
    """Yield the chip of each node group as plain data, with the source of each figure."""
    for group in task.cluster.groups:
        yield {
            "name": group.chip.name,
            "title": group.title,
            "vendor": group.chip.vendor,
            "nodes": group.nodes,
            "devices_per_node": group.devices_per_node,
            "memory_budget_bytes": group.memory_bytes,
            "notes": group.chip.notes,
            "facts": [
                {"fact": name, "value": fact.value, "unit": unit, "kind": fact.source.kind, "from": fact.source.detail}
                for name, unit, fact in _facts(group.chip)
                if fact is not None
            ],
        }


def _facts(chip: Chip) -> Iterator[tuple[str, str, Fact | None]]:
    yield "memory", "bytes", chip.memory_bytes
    yield "memory for programs", "bytes", chip.usable_bytes
    yield "memory bandwidth", "bytes/s", chip.memory_bandwidth_bytes_per_second
    for precision, fact in chip.dense_flops_per_second.items():
        yield f"peak of dense matrix products in {precision}", "flops/s", fact
    if chip.link:
        yield f"link {chip.link.name} ({chip.link.topology})", "bytes/s", chip.link.bytes_per_second
    yield "network of a device", "bytes/s", chip.nic_bytes_per_second


CHUNK = 1 << 16
MAX_VALUES = 200
"""The maximum number of values of one knob that are listed, the fastest ones and that of the best."""


def what_if(problem: Problem, best: Candidate) -> list[dict[str, Any]]:
    """Return the fastest candidate that is predicted to fit, for each value of each knob with several values.

    Of a knob with more than MAX_VALUES values, only the fastest ones are included. Candidates without a predicted time
    are ignored. `best` is the best candidate.
    """
    space, predictions, own = problem.space, problem.predictions, best.as_dict()
    usable = np.flatnonzero(np.isfinite(predictions.step_time_s) & predictions.fits)
    by_time = usable[np.argsort(predictions.step_time_s[usable], kind="stable")]
    counts, fastest = Counter[tuple[str, int]](), dict[tuple[str, int], int]()
    for start in range(0, by_time.size, CHUNK):
        rows = by_time[start : start + CHUNK]
        for knob, codes in space.columns(rows).items():
            for code, first, count in zip(*np.unique(codes, return_index=True, return_counts=True), strict=True):
                counts[knob, int(code)] += int(count)
                fastest.setdefault((knob, int(code)), int(rows[first]))
    by_knob = []
    for axis in space.axes:
        by_speed = sorted(
            (key for key in counts if key[0] == axis.knob),
            key=lambda key: (axis.decode(key[1]) != own[axis.knob], predictions.step_time_s[fastest[key]]),
        )
        keys = sorted(by_speed[:MAX_VALUES])
        values = [
            {"value": axis.decode(key[1]), "candidates": counts[key], "fastest": _fastest(problem, fastest[key])}
            for key in keys
        ]
        if len(keys) > 1:
            by_knob.append({"knob": axis.knob, "best": own[axis.knob], "values": values})
    return by_knob


def _fastest(problem: Problem, row: int) -> dict[str, Any]:
    predicted = prediction_record(with_figures(problem.task, problem.predictions.row(row)))
    figures = {name: predicted[name] for name in ("step_time_s", "objective") if name in predicted}
    return {"candidate": problem.space.candidate(row).as_dict(), "predicted": figures}
