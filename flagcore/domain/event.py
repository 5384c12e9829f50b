"""Events of a run, for programs that watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

RUN_STARTED, TRIAL_STARTED, TRIAL_FINISHED, RUN_FINISHED = KINDS = (
    *("run_started", "trial_started"),
    *("trial_finished", "run_finished"),
)
"""The kinds of events. A run that is resumed starts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run. All fields are plain data, without known secrets.

    `kind` is one of KINDS, `time` in seconds since the epoch. `run` is the unique name of the run, `folder` its
    absolute path. `job` has `engine`, `kind` (train or serve), `model`, `chip`, `devices`, `objective`, `fidelity`.
    `trial` is the trial of the event and `best` the best trial so far, in the format of `result.json`; None if there is
    none. `result` is the content of `result.json`, for `run_finished` only; None if there is no result.
    """

    kind: str
    time: float
    run: str
    folder: str
    job: Mapping[str, Any]
    trial: Mapping[str, Any] | None = None
    best: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as data for JSON."""
        return asdict(self)
