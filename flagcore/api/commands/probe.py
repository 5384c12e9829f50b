"""Probes candidates: one device of this machine runs single ranks of a job of any size."""

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.candidate_parser import parse_candidate
from flagcore.api.inputs import LoadedSpec, loaded_plugins, read_spec
from flagcore.api.notes import warn_about_problem
from flagcore.contracts import Engine, Problem, probes_of
from flagcore.domain.knob import Knobs
from flagcore.domain.probe import Probe, RankProbe
from flagcore.domain.records import in_gib, prediction_record, rank_record
from flagcore.domain.space import Candidate, as_candidate
from flagcore.domain.spec import Spec
from flagcore.domain.trial import PROBE, Role
from flagcore.errors import EveryTrialFailed, Interrupted, UsageError
from flagcore.i18n import _
from flagcore.plugins import LoadedPlugins
from flagcore.report.formats import Notebook
from flagcore.report.text import candidate_text, state_name
from flagcore.tuner.budget import time_limit
from flagcore.tuner.devices import parallel_probe_ranks, require_devices
from flagcore.tuner.feasibility import require_candidate
from flagcore.tuner.planner import predicted_trial
from flagcore.tuner.probe import combine
from flagcore.tuner.probe import probe as probe_candidate
from flagcore.tuner.problem import build_problem, require_launchable, rows_by_time
from flagcore.tuner.stages.predict import with_figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Notebook):
    """A probed candidate as plain data: the prediction, the probed ranks, and the combination of both."""

    candidate: Mapping[str, Any]
    predicted: Mapping[str, Any]
    combined: Mapping[str, Any]
    ranks: tuple[Mapping[str, Any], ...]
    chip: str
    devices: int
    knobs: Knobs = field(default_factory=dict)


def probe(
    spec_file: Path | str | LoadedSpec,
    *,
    candidate: str | None = None,
    top: int = 1,
    ranks: Sequence[int] = (),
    chip: str | None = None,
    seconds: float | None = None,
    folder: Path | str | None = None,
    without: Collection[str] = (),
    on_rank: Callable[[str], object] = lambda line: None,
) -> list[Probed]:
    """Probe candidates of `spec_file` on one device of this machine, rank by rank.

    `candidate`: a position in the list of the fastest predicted candidates (from 1), `baseline`, or knobs as
    `name=value,...`. By default, the `top` fastest predicted candidates are probed. `ranks`: global ranks; by default,
    the most informative ones. `seconds`: the maximum time of all probes of a candidate; by default,
    `control.max_time_per_task` or a time derived from the prediction. `folder`: where jobs and logs are saved; by
    default, they are not. Raises the errors of `flagcore.errors`; EveryTrialFailed if no rank has a result.
    """
    spec = read_spec(spec_file, chip, without)
    if spec.cluster.groups:
        raise UsageError(_("{file} has cluster.groups: a probe needs one kind of chip", file=os.fspath(spec_file)))
    engine = plugins.engine_of(spec.work)
    probes_of(engine).ready(spec)
    if seconds is not None:
        spec = replace(spec, control=replace(spec.control, max_time_per_task=seconds))
    with loaded_plugins(without) as loaded, ExitStack() as stack:
        problem, candidate = _problem(spec, loaded, engine, candidate)
        local_devices, world = loaded.devices(spec.envs), problem.task.cluster.devices
        require_devices(problem.platform, local_devices, needed=1)
        if wrong := [rank for rank in ranks if not 0 <= rank < world]:
            raise UsageError(_("--rank {rank}: the last rank is {last}", rank=wrong[0], last=world - 1))
        place = Path(folder) if folder else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flagcore-")))
        devices, probed = parallel_probe_ranks(problem.platform), []
        for number, each in enumerate(_choose_candidates(problem, candidate, top)):
            job_folder = str((place / f"candidate-{number}").resolve())
            probed.append(_probe(problem, each, job_folder, ranks, devices, on_rank))
    if not any(each.measured or each.out_of_memory for each in probed):
        last_rank = probed[-1].ranks[-1]
        failure = f"{state_name(last_rank.state.value)}: {last_rank.reason}"
        raise EveryTrialFailed(_("no rank has a result; the last one: {reason}", reason=failure))
    return [_probed_record(problem, each) for each in probed]


def _problem(spec: Spec, loaded: LoadedPlugins, engine: Engine, candidate: str | None) -> tuple[Problem, str | None]:
    """Return the problem of a spec, and the name of the candidate in it. Knobs with values become the baseline."""
    problem = build_problem(spec, loaded, engine)
    if candidate is not None and candidate != "baseline" and not candidate.isdecimal():
        columns, _named = parse_candidate(candidate, problem)
        given_values = as_candidate(problem.space.axes, columns).as_dict()
        problem, candidate = build_problem(spec, loaded, engine, completed=given_values), "baseline"
    require_launchable(problem)
    warn_about_problem(problem)
    return problem, candidate


def _probe(
    problem: Problem,
    candidate: Candidate,
    folder: str,
    ranks: Sequence[int],
    devices: int,
    on_rank: Callable[[str], object],
) -> Probe:
    """Probe ranks of a candidate on this machine, and report each rank to `on_rank`. Raises Interrupted."""
    world, text = problem.task.cluster.devices, candidate_text(candidate, problem.knobs)

    def report(rank: int) -> None:
        on_rank(_("probing rank {rank} of {world}: {candidate}", rank=rank, world=world, candidate=text))

    trial = predicted_trial(problem, candidate, Role.SEARCH, PROBE)
    limit, launcher = time_limit(problem.platform, trial, (), len(ranks)), plugins.launcher("local")
    try:
        return probe_candidate(problem.platform, launcher, candidate, folder, limit, ranks, report, devices=devices)
    except KeyboardInterrupt:
        raise Interrupted(_("interrupted")) from None


def _choose_candidates(problem: Problem, candidate: str | None, top: int) -> list[Candidate]:
    """Return the candidate with the given position or `baseline`, or else the `top` fastest predicted ones."""
    if candidate == "baseline":
        return [problem.baseline]
    require_candidate(problem)
    order = rows_by_time(problem)
    if candidate is not None:
        number = int(candidate)
        if not 1 <= number <= order.size:
            raise UsageError(_("--candidate {id}: there are {count} candidates", id=candidate, count=order.size))
        order = order[number - 1 : number]
    return [problem.space.candidate(int(row)) for row in order[:top]]


def _probed_record(problem: Problem, probed: Probe) -> Probed:
    """Return a probed candidate as plain data."""
    task = problem.task
    row = problem.space.find(probed.candidate)
    assert row is not None, "every candidate that is probed is in the space"
    prediction = problem.predictions.row(row)
    return Probed(
        candidate=probed.candidate.as_dict(),
        predicted=prediction_record(with_figures(task, prediction)),
        combined=prediction_record(with_figures(task, combine(prediction, probed, problem.platform))),
        ranks=tuple(rank_probe_record(rank) for rank in probed.ranks),
        chip=task.cluster.groups[0].chip.name,
        devices=task.cluster.devices,
        knobs=problem.knobs,
    )


def rank_probe_record(probed: RankProbe) -> dict[str, Any]:
    """Return the probe of a rank as plain data, in GiB and seconds."""
    data: dict[str, Any] = {"rank": probed.rank, "state": probed.state.value, "reason": probed.reason}
    if probed.measured is not None:
        figures = asdict(probed.measured)
        data["stage"] = figures.pop("stage")
        data["measured"] = in_gib(figures)
    return {**data, "predicted": rank_record(probed.predicted), "duration_s": probed.duration_s}
