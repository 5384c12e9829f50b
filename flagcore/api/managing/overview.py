"""The runs below a folder in a few figures each, without writing to them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flagcore.api.inputs import knobs_of_spec
from flagcore.api.runs import (
    FINISHED,
    INTERRUPTED,
    RESULT,
    RUNNING,
    UNMEASURED,
    count_trials,
    state_of_ended,
)
from flagcore.domain.knob import Knobs
from flagcore.domain.objective import CHEAPEST, COST, SERVING, TOKENS_PER_SECOND_PER_DEVICE, objective_value
from flagcore.domain.spec import Control
from flagcore.domain.trial import FIDELITIES, RUN, Role, Trial, TrialState
from flagcore.errors import RunError
from flagcore.i18n import N_, _
from flagcore.report.formats import lookup, shown
from flagcore.report.page.run import RunData, json_file
from flagcore.report.page.summary import no_best
from flagcore.report.text import candidate_text, heading
from flagcore.tuner.stages.rank import learn
from flagcore.tuner.store.directory import RunDirectory
from flagcore.tuner.store.studies import Studies
from flagcore.tuner.store.trials import JOURNAL

ELSEWHERE = N_("running or lost on {host}")
ENDED = (FINISHED, UNMEASURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A trial that runs: its number, its candidate in words, and when it began, in seconds since the epoch."""

    number: int
    text: str
    began: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A run in the overview. `study` is its number in Optuna's dashboard, None if its trials are stored elsewhere.

    `ended` are the trials that have ended, of at most `limit` (None: unknown), without `repeats`. `best` is the best
    value with the number of its trial, and `candidate` its configuration. `changed` is the time of the last change in
    seconds since the epoch. `note` is why it stopped, or why it cannot be read.
    """

    name: str
    state: str
    note: str = ""
    study: int | None = None
    ended: int = 0
    limit: int | None = None
    repeats: int = 0
    failed: int = 0
    running: tuple[Running, ...] = ()
    best: str = ""
    candidate: str = ""
    changed: float = 0.0


def overview(studies: Studies) -> list[RunLine]:
    """Return a line per run, those changed last first."""
    lines = [_line(studies, name, folder) for name, folder in studies.folders().items()]
    return sorted(lines, key=lambda line: (not line.running, -line.changed, line.name))


def links_out(folder: Path, root: Path) -> list[str]:
    """Return the links in a run's folder that lead out of `root`; its trials' logs are checked by the report."""
    trials = folder / "trials"
    places = (folder, folder / "best", trials, *(Path(each) for each in _entries(trials) if each.is_dir()))
    links = [Path(each) for place in places for each in _entries(place) if each.is_symlink()]
    return [link.name for link in links if not _is_inside(link, root)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _is_inside(link: Path, root: Path) -> bool:
    try:
        return link.resolve().is_relative_to(root)
    except (OSError, RuntimeError):
        return False


def _line(studies: Studies, name: str, folder: Path) -> RunLine:
    try:
        study = studies.study(name, folder)
        pairs = study.trials() if study else []
        result, holder = _result(folder), RunDirectory(folder).holder()
    except (RunError, ValueError, LookupError, TypeError, AttributeError) as error:
        return RunLine(name=name, state=_("cannot be read"), note=str(error), changed=_changed(folder))
    ended = [trial for trial, _public in pairs if trial.state is not TrialState.RUNNING and not trial.source]
    running = [pair for pair in pairs if pair[0].state is TrialState.RUNNING] if holder else []
    spec = study.spec if study else {}
    knobs = knobs_of_spec(spec)
    objective = result.objective or str(lookup(spec, "auto_tuner.objective") or "")
    state = _state(result, len(ended), holder)
    repeats = sum(trial.role is Role.REPEAT for trial in ended)
    limit = lookup(spec, "auto_tuner.control.max_trials") or Control().max_trials
    best, candidate = _best(ended, objective, knobs)
    return RunLine(
        name=name,
        state=_(state, host=holder[1] if holder else ""),
        note=result.note if state in ENDED else "",
        study=study.identifier if study else None,
        ended=len(ended) - repeats if study else result.ended,
        limit=limit if study and isinstance(limit, int) and state not in ENDED else None,
        repeats=repeats,
        failed=sum(trial.state.failed for trial in ended),
        running=tuple(
            Running(
                number=trial.number,
                text=candidate_text(trial.candidate, knobs),
                began=public.datetime_start.timestamp() if public.datetime_start else None,
            )
            for trial, public in running
        ),
        best=best,
        candidate=candidate,
        changed=_changed(folder),
    )


def _state(result: _Result, ended: int, holder: tuple[int, str] | None) -> str:
    """Return the state of a run. Whether a process of another host still runs is unknown."""
    if holder and holder[1] == os.uname().nodename:
        return RUNNING
    if result.state in ENDED and result.ended >= ended:
        return result.state
    return ELSEWHERE if holder else INTERRUPTED


def _best(ended: list[Trial], objective: str, knobs: Knobs) -> tuple[str, str]:
    """Return the value with the number of the best trial, as in result.json, and its configuration."""
    fidelity = max((each.fidelity for each in ended), key=FIDELITIES.index, default=RUN)
    state = learn(ended, fidelity)
    best = state.reported_trial(state.best)
    if best is None or best.measurement is None:
        return "", ""
    serves = bool(best.measurement.figures)
    if objective == COST:
        objective = CHEAPEST["serve" if serves else "train"]
    objective = objective or (SERVING[0] if serves else TOKENS_PER_SECOND_PER_DEVICE)
    value = objective_value(objective, 1.0 / state.speed_of(best.candidate), best.measurement)
    text = _("{value} (trial {number})", value=f"{shown(value)} {heading(objective)}", number=best.number)
    return text, candidate_text(best.candidate, knobs)


def _changed(folder: Path) -> float:
    times = [os.lstat(file).st_mtime for name in (RESULT, JOURNAL) if os.path.lexists(file := folder / name)]
    return max(times, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The figures of result.json that the overview shows."""

    state: str = INTERRUPTED
    note: str = ""
    objective: str = ""
    ended: int = 0


def _result(folder: Path) -> _Result:
    file = folder / RESULT
    try:
        status = os.lstat(file)
    except OSError:
        return _Result()
    return _Result() if stat.S_ISLNK(status.st_mode) else _read_result(file, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=1024)
def _read_result(file: Path, changed: int, inode: int) -> _Result:
    """Return the figures of result.json; `changed` and `inode` identify its content."""
    data = json_file(file)
    parts = [each for each in (data.get("engines") or {}).values() if "error" not in each] or [data]
    if not data:
        return _Result()
    run = RunData.from_json(data, file.parent, called=str(file.parent))
    state = state_of_ended(run)
    return _Result(
        state=state,
        note=no_best(run) if state == UNMEASURED else run.stop_reason,
        objective=run.objective,
        ended=sum(map(count_trials, parts)),
    )
