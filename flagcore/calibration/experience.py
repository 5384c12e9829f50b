"""Stores measured trials between runs, as job records in one file per run in the user's data folder.

The files have measurements rather than errors of predictions, because predictions change with releases of flagcore.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagcore.calibration.store import Calibrations, delete_files, replace_file, same_chip
from flagcore.domain.chip import Chip
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import Task, TrainSpec
from flagcore.domain.trial import RUN, Measurement, Trial, TrialState
from flagcore.files import read_regular
from flagcore.spec.schema import Shape

GIB = 2**30


class Experience:
    """The measured trials in a folder. The folder is created on the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Experience:
        """Return the measured trials of the user, in a folder next to the calibrations."""
        return cls(Calibrations.of_user().folder.parent / "experience")

    def save(self, run: str, task: Task, trials: Iterable[Trial]) -> Path | None:
        """Write the measurements of a run, and return the file; None if there is nothing to store. Raises RunError.

        Serving jobs with several load points, a trace or images are not stored, because a record has one load of text,
        nor jobs of models that no inline shape describes.
        """
        work = task.spec.work
        if not task.spec.model.is_inline:
            return None
        if isinstance(work, ServeSpec) and (len(work.loads) > 1 or work.loads[0].trace or work.loads[0].images):
            return None
        records = [
            _record(run, task, trial)
            for trial in trials
            if trial.state is TrialState.MEASURED
            and trial.fidelity == RUN
            and not (trial.shortened and trial.shortened.nodes)  # its candidate ran with fewer replicas
        ]
        if not records:
            return None
        path = self.folder / f"{run}.jsonl"
        replace_file(path, "".join(json.dumps(each) + "\n" for each in records))
        return path

    def records(self, chip: Chip, engine: str, *, exclude_run: str | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield the records of a chip and an engine, those of the latest run first. Unreadable files are skipped."""
        for path in sorted(self.folder.glob("*.jsonl"), key=_modification_time, reverse=True):
            if path.stem == exclude_run:
                continue
            with suppress(OSError, ValueError):
                lines = [json.loads(line) for line in read_regular(path).splitlines()]
                yield from (line for line in lines if _matches(line, chip, engine))

    def forget(self, chip: str) -> tuple[Path, ...]:
        """Delete the files with measurements on a chip, and return their paths. Raises RunError."""
        deleted = []
        for path in sorted(self.folder.glob("*.jsonl")):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                lines = [json.loads(line) for line in read_regular(path).splitlines()]
                if any(line["cluster"]["chip"].casefold() == chip.casefold() for line in lines):
                    deleted.append(path)
        delete_files(deleted)
        return tuple(deleted)


def _matches(line: Any, chip: Chip, engine: str) -> bool:
    with suppress(KeyError, TypeError, AttributeError):
        if line[line["kind"]]["engine"] == engine:
            return same_chip(line["cluster"]["chip"], line["measured"]["chip_aliases"], chip)
    return False


def _modification_time(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _record(run: str, task: Task, trial: Trial) -> dict[str, Any]:
    """Return a trial as a job record."""
    group, work, measured = task.cluster.groups[0], task.spec.work, trial.measurement
    assert measured is not None
    used_bytes = measured.device_used_bytes
    kind, job = (
        ("serve", _serve_fields(work, measured))
        if isinstance(work, ServeSpec)
        else ("train", _train_fields(work, trial))
    )
    return {
        "id": f"{run}/{trial.number}",
        "kind": kind,
        "model": {name: value for name in Shape.model_fields if (value := getattr(task.spec.model, name)) is not None},
        "cluster": {"chip": group.chip.name, "devices": group.devices, "devices_per_node": group.devices_per_node},
        kind: {name: value for name, value in job.items() if value is not None},
        "candidate": {knob: value for knob, value in trial.candidate.as_dict().items() if value is not None},
        "measured": {
            "chip_aliases": list(group.chip.aliases),
            "objective": task.spec.objective,
            "step_time_s": measured.scaled_from or measured.step_time_s,
            "noise": measured.spread_s / measured.step_time_s if measured.step_time_s else 0.0,
            **({"device_used_gib": used_bytes / GIB} if used_bytes else {}),
        },
    }


def _train_fields(work: TrainSpec, trial: Trial) -> dict[str, Any]:
    """Return the fields of the training job, with the batch size that ran."""
    names = ("seq_length", "global_batch_size", "precision", "attention", "implementation", "engine", "command")
    fields = {**{name: getattr(work, name) for name in names}, "settings": dict(work.settings)}
    return fields | ({"global_batch_size": trial.shortened.global_batch_size} if trial.shortened else {})


def _serve_fields(work: ServeSpec, measured: Measurement) -> dict[str, Any]:
    load = work.loads[0]
    names = ("input_len", "output_len", "prefix_len", "range_ratio", "distribution", "concurrency", "num_prompts")
    return {
        "engine": work.engine,
        "engine_version": measured.versions.get(work.engine) or work.engine_version,
        "precision": work.precision,
        "engine_args": dict(work.engine_args),
        "weights": work.weights if work.weights and Path(work.weights).is_file() else None,
        **{name: getattr(load, name) for name in names},
        "request_rate": "inf" if load.request_rate == math.inf else load.request_rate,
    }
