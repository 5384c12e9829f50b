"""The report page of a run, written at the end of `flag tune` or later from its folder, and its data (insight.json)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flagcore.api.inputs import knobs_of_spec, labels_of_spec, warn
from flagcore.api.runs import SPEC, count_trials, ended_trials, read_run
from flagcore.api.snapshot import Snapshot, load_snapshot, run_home
from flagcore.contracts import Problem, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.effects import effects_of_row, engine_task
from flagcore.domain.files import read_regular
from flagcore.domain.plan import summarize
from flagcore.domain.prediction import MEMORY, components_of_row
from flagcore.domain.search_state import LEARNED_MESSAGES
from flagcore.domain.secrets import secrets_in_data, secrets_in_environment
from flagcore.domain.space import IntArray
from flagcore.domain.spec import Task
from flagcore.domain.trial import ESTIMATE
from flagcore.errors import FlagError, RunError
from flagcore.i18n import N_, _
from flagcore.physics.cost_stack import KernelCostStack
from flagcore.report.page.assembly import page
from flagcore.report.page.html import as_html
from flagcore.report.page.markdown import as_markdown
from flagcore.report.page.run import INSIGHT, RunData, json_file
from flagcore.report.result import result
from flagcore.tuner.loop import TuneResult
from flagcore.tuner.stages.predict import in_gib, record
from flagcore.tuner.store.directory import write

REPORT = "report.html"
FORMS = {"html": as_html, "markdown": as_markdown}
DIFFERENT = N_("This machine predicts another time for the best than the run: details of the prediction are omitted.")
SAME = 1e-6
"""Maximum relative difference between equal predictions of a candidate."""


def report(run_dir: Path | str, form: str = "html", *, without: Collection[str] = ()) -> str:
    """Return the page of the run in a folder, as `html` or `markdown`, without writing it.

    The predictions are in insight.json. If it is missing, they are made again, and omitted if they differ from those of
    the run. A run that was killed, or is in progress, is read from its journal. `without` names plugins to disable.
    Raises RunError if the folder has no readable run.
    """
    try:
        return FORMS[form](page(report_data(Path(run_dir), without)))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(_("the result in {folder} cannot be shown: {reason!r}", folder=run_dir, reason=error)) from error


def save_report(run_dir: Path, ending: TuneResult, workload: Workload, data: Mapping[str, Any]) -> bool:
    """Write the page and insight.json at the end of a run. Return whether this succeeded; a failure is a warning."""

    def made() -> str:
        best = ending.plan.best.candidate if ending.plan.best else None
        insight_data = insight(ending.problem, workload, best)
        write(run_dir / INSIGHT, json.dumps(insight_data, ensure_ascii=False) + "\n")
        rest: dict[str, Any] = {
            "called": _called(run_dir),
            "knobs": ending.plan.knobs,
            "labels": workload.labels,
        }
        return as_html(page(RunData.redacted(data, insight_data, _secrets(run_dir), run_dir, **rest)))

    return _is_written(run_dir, made)


def save_report_of_engines(run_dir: Path) -> bool:
    """Write the page of a run over several engines; like `save_report`."""
    return _is_written(run_dir, lambda: report(run_dir))


def _is_written(run_dir: Path, made: Callable[[], str]) -> bool:
    file = run_dir / REPORT
    try:
        write(file, made())
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        command = f"flag report {run_dir}"
        warn([_("{file} was not written ({reason}); try `{command}`", file=file, reason=reason, command=command)])
        return False
    return True


def report_data(folder: Path, without: Collection[str]) -> RunData:
    """Return the data for the page of the run in a folder. Raises RunError if the folder has no readable run."""
    run = read_run(folder)
    home, found, notes = run_home(run), run.data, list[str]()
    saved_insight = json_file(home / INSIGHT)
    insight_data = saved_insight if saved_insight.get("schema_version") == SCHEMA_VERSION else {}
    new_trials = ended_trials(run) - count_trials(found) if run.fidelity != ESTIMATE else 0
    if not found or not insight_data or new_trials > 0:
        loaded, reason = _load_or_reason(folder, without)
        if not found and loaded is None:
            raise RunError(
                _("{folder} has no result yet, and its trials cannot be read: {reason}", folder=folder, reason=reason)
            )
        if loaded is None:
            notes.append(
                _("{count} more trials have ended since the result was written.", count=new_trials)
                if new_trials > 0
                else ""
            )
            notes.append("" if insight_data else _("Details of predictions are omitted: {reason}", reason=reason))
        elif not found or new_trials > 0:
            task, space = loaded.task, loaded.problem.space
            plan = summarize(task, space, loaded.pruned, loaded.search_state, "", loaded.problem.knobs)
            found, insight_data = result(plan, str(folder)), {}
            notes.append(_("This run is in progress, or was killed: the report contains the trials that have ended."))
        if loaded is not None and not insight_data:
            insight_data = _predicted_again(loaded, found)
            notes.append("" if insight_data else _(DIFFERENT))
    shown_notes = tuple(filter(None, notes))
    names = found["baseline"]["candidate"] if found.get("baseline") else ()
    knobs = knobs_of_spec(run.spec, names, without)
    secrets = _secrets(home)
    rest: dict[str, Any] = {"called": _called(folder), "warnings": shown_notes}
    return RunData.redacted(found, insight_data, secrets, home, **rest, knobs=knobs, labels=labels_of_spec(run.spec))


def _called(folder: Path) -> str:
    """Return a folder relative to the working directory; `.` if it is elsewhere, because pages have no own paths."""
    relative = os.path.relpath(folder)
    return "." if relative.startswith("..") else relative


def _secrets(folder: Path) -> tuple[str, ...]:
    """Return the secrets of this shell and of the run's spec, which the page must not show."""
    try:
        spec = yaml.safe_load(read_regular(folder / SPEC))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        spec = None
    return tuple(dict.fromkeys((*secrets_in_environment(os.environ), *secrets_in_data(spec))))


def _load_or_reason(folder: Path, without: Collection[str]) -> tuple[Snapshot | None, str]:
    """Return the snapshot of a run on this machine, or the reason why there is none."""
    try:
        snapshot = load_snapshot(folder, None, without)
    except FlagError as error:
        return None, str(error)
    return snapshot, ""


def _predicted_again(snapshot: Snapshot, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current predictions; empty if they differ from those of the run."""
    problem, run = snapshot.problem, snapshot.run
    best = run.best.candidate if run and run.best else None
    if best is not None and found.get("best"):
        row, predicted = problem.space.find(best), found["best"]["predicted"]
        if row is None or not _predicts_same(predicted, problem, row):
            return {}
    return insight(problem, snapshot.problem.workload, best)


def _predicts_same(predicted: Mapping[str, Any], problem: Problem, row: int) -> bool:
    current = problem.predictions.row(row)
    step, memory = predicted.get("step_time_s") or {}, predicted.get("memory") or {}
    pairs = [
        (step.get("value"), current.step_time_s),
        (memory.get("device_used_gib"), current.device_used_bytes / 2**30),
    ]
    return all(old is None or (new is not None and abs(new - old) <= SAME * abs(old)) for old, new in pairs)


SCHEMA_VERSION = 1


def insight(problem: Problem, workload: Workload, best: Candidate | None) -> dict[str, Any]:
    """Return the rules, chips and environment of a run and, of `best`, its stages, pipeline and neighbours."""
    row = None if best is None else problem.space.find(best)
    used = {*problem.space.illegal, *problem.pruned.rules, *LEARNED_MESSAGES}
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "messages": {name: text for name, text in problem.messages.items() if name in used},
        "chips": list(_chips(problem.platform.task)),
        "kernels_guessed": any(each.guessed for each in problem.platform.costs.groups),
        "kernel_sources": {} if row is None else _kernel_sources(problem, workload, row),
        "environment": dict(problem.platform.environment),
    }
    if row is None:
        return data
    return data | {
        "stages": _stages(problem, workload, row),
        "pipelines": _pipelines(problem, workload, row),
        "knobs": what_if(problem, row),
    }


def _stages(problem: Problem, workload: Workload, row: int) -> list[dict[str, Any]]:
    """Return the memory of the first device of each pipeline stage, by component if the workload has them."""
    platform, task = problem.platform, problem.platform.task
    columns = problem.space.columns(np.array([row]))
    task_as_set = engine_task(task, effects_of_row(task, columns))
    stages = []
    for stage, first in enumerate(workload.stage_ranks(task_as_set, columns)):
        parts = workload.components(task_as_set, columns, np.array([stage]), platform.costs)
        rank = workload.rank(task_as_set, columns, first, platform.costs)
        stages.append(
            {
                "stage": stage,
                "rank": rank.rank,
                **in_gib({name: getattr(rank, name) for name in MEMORY if name != "activation_bytes"}),
                "components": {name: in_gib(part) for name, part in components_of_row(parts, 0).items()},
            }
        )
    return stages


def _kernel_sources(problem: Problem, workload: Workload, row: int) -> dict[str, list[str]]:
    """Return the sources of the times of kernels of one candidate, by kind of kernel."""
    costs = problem.platform.costs
    if not isinstance(costs.kernels, KernelCostStack):
        return {}
    kernels = costs.kernels.recording()
    workload.predict(problem.platform.task, problem.space.columns(np.array([row])), replace(costs, kernels=kernels))
    return {kind: sorted(names) for kind, names in (kernels.used_sources or {}).items()}


def _pipelines(problem: Problem, workload: Workload, row: int) -> list[dict[str, Any]]:
    task, columns = problem.platform.task, problem.space.columns(np.array([row]))
    pipelines = workload.pipelines(engine_task(task, effects_of_row(task, columns)), columns, problem.platform.costs)
    is_one_stage = len(task.cluster.groups) < 2 and all(len(each.forward_s) < 2 for each in pipelines)
    return [] if is_one_stage else [asdict(each) for each in pipelines]


def _chips(task: Task) -> Iterator[Mapping[str, Any]]:
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
    yield "memory bandwidth", "bytes/s", chip.memory_bandwidth_bytes_per_second
    for precision, fact in chip.dense_flops_per_second.items():
        yield f"peak of dense matrix products in {precision}", "flops/s", fact
    if chip.link:
        yield f"link {chip.link.name} ({chip.link.topology})", "bytes/s", chip.link.bytes_per_second
    yield "network of a device", "bytes/s", chip.nic_bytes_per_second


CHUNK = 1 << 16


@dataclass(slots=True)
class _Value:
    """The fastest row with a value of a knob, and the fastest of the rows that are nearest to the best."""

    count: int = 0
    fastest: tuple[float, int] = (np.inf, -1)
    nearest: tuple[int, float, int] = (1 << 30, np.inf, -1)


def what_if(problem: Problem, best: int) -> list[dict[str, Any]]:
    """Return two candidates for each value of each knob with several values, among candidates that are predicted to
    fit.

    `fastest` is the fastest predicted candidate with the value, `nearest` the fastest of the candidates that differ
    from row `best` in the fewest knobs. Candidates without a predicted time are ignored.
    """
    space, own = problem.space, {knob: int(code[0]) for knob, code in problem.space.columns(np.array([best])).items()}
    knobs: dict[str, dict[int, _Value]] = {knob: {} for knob in own}
    for rows in space.chunks(CHUNK):
        columns = space.columns(rows)
        seconds = problem.predictions.step_time_s[rows]
        usable_rows = np.flatnonzero(np.isfinite(seconds) & problem.predictions.fits[rows])
        if not usable_rows.size:
            continue
        seconds = seconds[usable_rows]
        columns = {knob: codes[usable_rows] for knob, codes in columns.items()}
        distance = np.sum([codes != own[knob] for knob, codes in columns.items()], axis=0)
        for knob, codes in columns.items():
            _update_entry(knobs[knob], codes, seconds, distance, rows.start + usable_rows)
    by_knob = []
    for axis in space.axes:
        values = knobs[axis.knob]
        if len(values) > 1:
            records = []
            for code in sorted(values):
                places = {"fastest": values[code].fastest[-1], "nearest": values[code].nearest[-1]}
                candidates = {name: _candidate(problem, row, best) for name, row in places.items()}
                records.append({"value": axis.decode(code), "candidates": values[code].count, **candidates})
            by_knob.append({"knob": axis.knob, "best": axis.decode(own[axis.knob]), "values": records})
    return by_knob


def _update_entry(values: dict[int, _Value], codes: IntArray, seconds: Any, distance: IntArray, rows: IntArray) -> None:
    for code in np.unique(codes).tolist():
        places = np.flatnonzero(codes == code)
        fastest = places[np.argmin(seconds[places])]
        nearest_row = places[np.lexsort((seconds[places], distance[places]))[0]]
        entry = values.setdefault(code, _Value())
        entry.count += int(places.size)
        entry.fastest = min(entry.fastest, (float(seconds[fastest]), int(rows[fastest])))
        entry.nearest = min(
            entry.nearest, (int(distance[nearest_row]), float(seconds[nearest_row]), int(rows[nearest_row]))
        )


def _candidate(problem: Problem, row: int, best: int) -> dict[str, Any]:
    """Return a candidate by its differences from the best, with its prediction."""
    candidate, own = problem.space.candidate(row), problem.space.candidate(best).as_dict()
    predicted: Mapping[str, Any] = record(problem.platform.task, problem.predictions.row(row))
    keys = ("step_time_s", "tokens_per_second_per_device", "objective", "time", "limit", "memory")
    return {
        "candidate": candidate.as_dict(),
        "differs": {knob: value for knob, value in candidate.items if own.get(knob) != value},
        "predicted": {name: predicted[name] for name in keys if name in predicted},
    }
