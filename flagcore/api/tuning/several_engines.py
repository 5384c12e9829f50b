"""Tune several serving engines for one load, one after the other, and keep the best of all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.api.common.inputs import write_spec
from flagcore.api.common.warnings import warn
from flagcore.domain.objective import is_rate
from flagcore.errors import FlagError, Interrupted
from flagcore.spec.serving import only
from flagcore.store.directory import writable, write

WINNERS = ("best", "best.sh", "best.yaml")
"""Files of the best: copied from the folder of the winning engine."""


def each_engine(
    data: Mapping[str, Any],
    engines: tuple[str, ...],
    run_dir: Path,
    tune_one: Callable[[dict[str, Any], Path], Any],
) -> Any:
    """Tune `data` with each of `engines` in a folder of its own below `run_dir`, and return the outcome of the best.

    Each has an equal share of the trials and of the time. An engine that cannot be tuned is skipped with a
    warning; if none can, the error of the first is raised.
    """
    done: dict[str, Any] = {}
    failed: dict[str, FlagError] = {}
    for engine in engines:
        try:
            done[engine] = tune_one(_share(only(data, engine), len(engines)), run_dir / engine)
        except Interrupted:
            raise
        except FlagError as error:
            warn([f"{engine}: {error}"])
            failed[engine] = error
    if not done:
        raise next(iter(failed.values()))
    sign = -1.0 if is_rate(next(iter(done.values())).plan.objective) else 1.0
    order = sorted(done, key=lambda engine: sign * _figure(done[engine].data))
    winner = done[order[0]]
    result = {
        **winner.data,
        "run_dir": str(run_dir),
        "engine": order[0],
        "engines": {engine: done[engine].data for engine in order} | {e: {"error": str(failed[e])} for e in failed},
    }
    with writable(run_dir):
        for name in WINNERS:
            source, target = run_dir / order[0] / name, run_dir / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.exists():
                shutil.copy2(source, target)
        write(run_dir / "result.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        write_spec(run_dir, data, run_dir)
    return replace(winner, run_dir=run_dir, data=result)


def _share(data: dict[str, Any], parts: int) -> dict[str, Any]:
    tuner = dict(data.get("auto_tuner") or {})
    control = dict(tuner.get("control") or {})
    if isinstance(control.get("max_trials", 20), int):
        control["max_trials"] = max(1, control.get("max_trials", 20) // parts)
    if isinstance(control.get("max_time"), (int, float)):
        control["max_time"] = control["max_time"] / parts
    return {**data, "auto_tuner": {**tuner, "control": control}}


def _figure(data: Mapping[str, Any]) -> float:
    """Return the median seconds, or the rate, of a run's best."""
    best = data["best"]
    medians = {each["trial"]: each for each in data["noise"]["medians"]}
    name = data["objective"]["name"]
    if best["number"] in medians:
        return float(medians[best["number"]][name])
    measured = best["measured"]
    figure = measured["step_time_s"]["median"] if measured else best["predicted"]["step_time_s"]["value"]
    return 1.0 / figure if is_rate(name) else float(figure)
