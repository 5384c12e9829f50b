"""The runs in a folder: lists them, shows one as text, compares several, and removes one."""

import fcntl
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from flagcore.api.inputs import RUNS, knobs_of_spec
from flagcore.api.managing.report import report_data
from flagcore.api.runs import INTERRUPTED, RUNNING, UNREADABLE, state_of_ended
from flagcore.domain.space import KnobValue
from flagcore.errors import FlagError, RunError
from flagcore.i18n import _
from flagcore.report.page.assembly import result_text
from flagcore.report.page.run import RunData, json_file, predicted
from flagcore.report.page.summary import no_best
from flagcore.report.text import heading
from flagcore.spec.plain_data import spec_as_data
from flagcore.tuner.store.directory import IDENTITY, LOCK

FILES = (
    *("best", "best.sh", "best.yaml", "insight.json", "journal.log", "report.html", "report.txt", "result.json"),
    *(LOCK, "spec.yaml", IDENTITY, "tensorboard", "trials"),
)
"""What a run writes into its folder."""


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


def compare_runs(folders: Sequence[Path | str]) -> list[dict[str, Any]]:
    """Return the `run_record` of each run, with the `gain` of its best over the best of the first run.

    `gain` is None if objectives or hardware differ, or if a run has no measurement. Raises RunError for a folder
    without a run.
    """
    records = [run_record(_required(Path(each))) for each in folders]
    for each in records:
        first, own = (one.get("value") for one in (records[0], each))
        same = all(each.get(key) == records[0].get(key) for key in ("unit", "hardware", "fidelity"))
        each["gain"] = None
        if same and first and own:
            each["gain"] = own / first - 1.0 if each["more_is_better"] else first / own - 1.0
    return records


def show_run(folder: Path | str, without: Collection[str] = ()) -> tuple[Mapping[str, Any], str]:
    """Return the result of a run as data and as text. The run may be in progress. Raises RunError."""
    run = report_data(_required(Path(folder)), without)
    text = result_text(replace(run, called=str(folder), warnings=()))
    return run.data, "\n".join([*run.warnings, text])


def remove_run(folder: Path | str) -> None:
    """Delete the files of a run, and its folder if it contains nothing else.

    Raises RunError for a folder without a run, for a run that is in progress, and for the working directory.
    """
    place = _required(Path(folder))
    if place.is_symlink() or Path.cwd().is_relative_to(place.resolve()):
        raise RunError(_("{folder} is a link or the working directory: delete it yourself", folder=place))
    if _is_locked(place):
        raise RunError(_("{folder} is in progress: stop it first", folder=place))
    engines = json_file(place / "result.json").get("engines") or ()
    for each in place.iterdir():
        if each.name in engines and _is_run(each):  # checked, because a result.json may name any path
            remove_run(each)
    for name in FILES:
        file = place / name
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
    if not any(place.iterdir()):
        place.rmdir()


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


def differing_knobs(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the knobs in which the best candidates of the runs differ."""
    candidates: list[Mapping[str, KnobValue]] = [each["candidate"] for each in records if each.get("candidate")]
    names = [name for name in (candidates or [{}])[0] if all(name in each for each in candidates)]
    return [name for name in names if len({repr(each[name]) for each in candidates}) > 1]


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
