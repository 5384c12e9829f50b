"""The report page of a run, written at the end of `flag tune`, or later from its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from flagcore.api.common.context import Snapshot, load_snapshot, run_home
from flagcore.api.common.inputs import knobs_of_spec, labels_of_spec, warn
from flagcore.api.common.runs import SPEC, count_trials, ended_trials, read_run
from flagcore.contracts import Workload, labels_of
from flagcore.domain.plan import summarize
from flagcore.domain.secrets import secrets_in_data, secrets_in_environment
from flagcore.domain.trial import ESTIMATE
from flagcore.errors import FlagError, RunError
from flagcore.files import read_regular
from flagcore.i18n import N_, _
from flagcore.loop import TuneResult
from flagcore.problem import Problem
from flagcore.report.page.assembly import page
from flagcore.report.page.html import as_html
from flagcore.report.page.insight import SCHEMA_VERSION, insight
from flagcore.report.page.markdown import as_markdown
from flagcore.report.page.run import INSIGHT, RunData, json_file
from flagcore.report.result import result
from flagcore.store.directory import write

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
            "folder": run_dir,
            "called": _called(run_dir),
            "knobs": ending.plan.knobs,
            "labels": labels_of(workload),
        }
        return as_html(page(RunData.redacted(data, insight_data, _secrets(run_dir), **rest)))

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
    rest: dict[str, Any] = {"folder": home, "called": _called(folder), "notes": shown_notes}
    return RunData.redacted(found, insight_data, secrets, **rest, knobs=knobs, labels=labels_of_spec(run.spec))


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
    return insight(problem, snapshot.workload, best)


def _predicts_same(predicted: Mapping[str, Any], problem: Problem, row: int) -> bool:
    current = problem.predictions.row(row)
    step, memory = predicted.get("step_time_s") or {}, predicted.get("memory") or {}
    pairs = [
        (step.get("value"), current.step_time_s),
        (memory.get("device_used_gib"), current.device_used_bytes / 2**30),
    ]
    return all(old is None or (new is not None and abs(new - old) <= SAME * abs(old)) for old, new in pairs)
