"""Stores the measured trials of all runs, which later runs learn from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from flagcore.contracts import Platform
from flagcore.domain.chip import Chip
from flagcore.domain.files import data_folder, read_regular, save
from flagcore.domain.secrets import redact_data
from flagcore.domain.spec import Task
from flagcore.domain.trial import RUN, Trial, TrialState
from flagcore.domain.work import Work
from flagcore.loading.entry_points import changed_at
from flagcore.spec.shapes import Shape

GIB = 2**30


class Experience:
    """The measured trials in a folder. The folder is created on the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Experience:
        """Return the user's measured trials."""
        return cls(data_folder() / "experience")

    def save(self, run: str, platform: Platform, trials: Iterable[Trial]) -> Path | None:
        """Write the measured trials of a run to a file, and return its path. Returns None if there is nothing to store.

        Raises RunError if the file cannot be written. Serving jobs with several load points, a trace or images are not
        stored, because a record describes a single load of text. Jobs whose model has no inline shape are not stored
        either. Records have the settings of a command, not the command.
        """
        work = platform.engine.plans.without_command(platform.task.spec)
        if not platform.task.spec.model.is_inline or work.record({}) is None:
            return None
        records = [
            _record(run, platform.task, work, trial)
            for trial in trials
            if trial.state is TrialState.MEASURED
            and trial.fidelity == RUN
            and not trial.fewer_nodes  # it ran with fewer replicas than its candidate has
        ]
        if not records:
            return None
        path = self.folder / f"{run}.jsonl"
        save(path, "".join(json.dumps(each) + "\n" for each in records), private=True)
        return path

    def start_s(self, chip: Chip, engine: str) -> float | None:
        """Return the median seconds that trials of an engine on a chip took to start, or None if unknown."""
        known = [line["measured"].get("start_s") for line in self.records(chip, engine)]
        seconds = [float(each) for each in known if isinstance(each, (int, float)) and each > 0]
        return median(seconds) if seconds else None

    def records(self, chip: Chip, engine: str, *, exclude_run: str | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield the stored trials of an engine on a chip, latest run first. Unreadable files are skipped."""
        for path in sorted(self.folder.glob("*.jsonl"), key=changed_at, reverse=True):
            if path.stem == exclude_run:
                continue
            with suppress(OSError, ValueError):
                lines = [json.loads(line) for line in read_regular(path).splitlines()]
                yield from (line for line in lines if _matches(line, chip, engine))


def _matches(line: Any, chip: Chip, engine: str) -> bool:
    with suppress(KeyError, TypeError, AttributeError):
        if line[line["kind"]]["engine"] == engine:
            return chip.is_same(line["cluster"]["chip"], line["measured"]["chip_aliases"])
    return False


def _record(run: str, task: Task, work: Work, trial: Trial) -> dict[str, Any]:
    """Return a measured trial as a record of its model, cluster, job, candidate and measurements."""
    group, measured = task.cluster.groups[0], trial.measurement
    assert measured is not None
    used_bytes = measured.device_used_bytes
    control = task.spec.control
    start_s = trial.overhead_s(control.train_iters, control.warmup_iters) if work.has_steps else None
    job = (work.with_samples(trial.shortened.global_batch_size) if trial.shortened else work).record(measured.versions)
    assert job is not None
    return {
        "id": f"{run}/{trial.number}",
        "kind": work.kind,
        "model": {name: value for name in Shape.model_fields if (value := getattr(task.spec.model, name)) is not None},
        "cluster": {"chip": group.chip.name, "devices": group.devices, "devices_per_node": group.devices_per_node},
        work.kind: redact_data({name: value for name, value in job.items() if value is not None}),
        "candidate": {knob: value for knob, value in trial.candidate.as_dict().items() if value is not None},
        "measured": {
            "chip_aliases": list(group.chip.aliases),
            "objective": task.spec.objective,
            "step_time_s": measured.scaled_from or measured.step_time_s,
            "noise": max(measured.spread_s / measured.step_time_s, trial.interval) if measured.step_time_s else 0.0,
            **({"device_used_gib": used_bytes / GIB} if used_bytes else {}),
            **({"start_s": start_s} if start_s else {}),
        },
    }
