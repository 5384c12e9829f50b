"""The runs in a folder: lists them, and shows one as text."""

import fcntl
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from flagcore.api.inputs import RUNS, knobs_of_spec
from flagcore.api.managing.report import report_data
from flagcore.api.runs import INTERRUPTED, RUNNING, UNREADABLE, state_of_ended
from flagcore.errors import FlagError, RunError
from flagcore.i18n import _
from flagcore.report.page.assembly import result_text
from flagcore.report.page.run import RunData, json_file, predicted
from flagcore.report.page.summary import no_best
from flagcore.report.text import heading
from flagcore.spec.plain_data import spec_as_data
from flagcore.tuner.store.directory import IDENTITY, LOCK


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
        raise RunError(_("cannot read {file}: {reason}", file=place, reason=error.strerror)) from None
    found = filter(_is_run, chain.from_iterable(places))
    return sorted(map(run_record, found), key=lambda each: str(each["changed"]), reverse=True)


def show_run(folder: Path | str, without: Collection[str] = ()) -> tuple[Mapping[str, Any], str]:
    """Return the result of a run as data and as text. The run may be in progress. Raises RunError."""
    run = report_data(_required(Path(folder)), without)
    text = result_text(replace(run, called=str(folder), warnings=()))
    return run.data, "\n".join([*run.warnings, text])


def run_record(folder: Path) -> dict[str, Any]:
    """Return the main facts of a run from its result.

    `value`, `low` and `high` are the objective of the best in `unit`: the median and the range over its runs. `speedup`
    is the speedup over the baseline (`flagcore.domain.plan.Speedup`). `seconds` is the sum over all trials. `no_best`
    is the reason why there is no best.
    """
    files = [file for name in ("journal.log", "result.json", IDENTITY) if (file := folder / name).is_file()]
    changed = max(each.stat().st_mtime for each in files or [folder])
    record: dict[str, Any] = {
        "run": str(folder),
        "state": RUNNING if _is_locked(folder) else INTERRUPTED,
        "changed": datetime.fromtimestamp(changed, timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }
    result = json_file(folder / "result.json")
    if not result:
        return record
    try:
        return {**record, **_facts(folder, result, record["state"])}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {**record, "state": UNREADABLE}


def _facts(folder: Path, data: Mapping[str, Any], state: str) -> dict[str, Any]:
    """Return the fields of `run_record` that are read from `data`, the content of the run's result.json."""
    try:
        knobs = knobs_of_spec(spec_as_data(folder / "spec.yaml"))
    except FlagError:
        knobs = {}
    home = folder / str(data["engine"]) if data.get("engines") else folder
    run = RunData.from_json(data, home, called=str(folder), knobs=knobs)
    trials, best, speedup = run.all_trials, run.best, run.speedup
    value, low, high = (best and run.figures(best)) or (None, None, None)
    used = best.measurement.device_used_bytes if best and best.measurement else None
    memory_gib = predicted(best, "memory.device_used_gib") if best else None
    return {
        "state": state if state == RUNNING else state_of_ended(run),
        "hardware": run.hardware,
        "fidelity": run.fidelity,
        "trials": len(trials),
        "seconds": sum(each.duration_s for each in trials),
        "candidate": best.candidate.as_dict() if best else None,
        "best": run.configuration(best) if best else None,
        "unit": heading(run.objective) if run.serves else run.unit,
        "more_is_better": run.is_rate,
        "value": value,
        "low": low,
        "high": high,
        "speedup": None if speedup is None else speedup.median,
        "significant": None if speedup is None else speedup.significant,
        "memory_gib": memory_gib if used is None else used / 2**30,
        "cost_per_million_tokens": run.cost.get("cost_per_million_tokens"),
        "stopped_because": data.get("stopped_because"),
        "no_best": None if best else no_best(run),
    }


def _required(folder: Path) -> Path:
    if not _is_run(folder):
        raise RunError(_("{folder} is not a run; `flag runs list` lists them", folder=folder))
    return folder


def _is_run(folder: Path) -> bool:
    """Return whether flagcore wrote a run to a folder. Other programs also write files with these names."""
    is_claimed = json_file(folder / IDENTITY).keys() >= {"run", "task", "fixed"}
    return is_claimed or "schema_version" in json_file(folder / "result.json")


def _is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run, or of one of its engines."""
    return any(map(_holds, [folder / LOCK, *folder.glob(f"*/{LOCK}")]))


def _holds(file: Path) -> bool:
    try:
        lock = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
