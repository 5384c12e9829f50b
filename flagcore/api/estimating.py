"""Predict without running: the candidates of a spec, and where they went."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flagcore import plugins
from flagcore.api.telling import loaded_plugins, parsed, tell_of_problem
from flagcore.contracts import Platform, Workload
from flagcore.domain.knowledge import Lessons
from flagcore.domain.plan import Counts, count
from flagcore.domain.plugin_knob import PluginChoice, PluginKnob
from flagcore.domain.prediction import of_row
from flagcore.domain.serving import ServeSpec
from flagcore.domain.space import IntArray
from flagcore.domain.spec import Task
from flagcore.errors import NothingFits, RunError, UsageError
from flagcore.problem import Problem, fastest, must_fit, pose, why_not_launched
from flagcore.spec import spec_as_data
from flagcore.stages.build import refusals
from flagcore.stages.missing import no_time
from flagcore.stages.predict import model_table, record
from flagcore.stages.prune import LEARNED


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The best predicted candidates of a spec, and where all others went.

    A candidate's `number` is its place, from 1. `model` are the weights of the model by its parts. `untimed` counts
    the candidates whose time nobody can tell, and `no_time` says why; `runs` says what would run them, `notes` what
    plugins say of engine and chip.
    """

    chip: str
    devices: int
    counts: Counts
    baseline: Mapping[str, Any]
    candidates: tuple[Mapping[str, Any], ...]
    model: tuple[Mapping[str, Any], ...]
    untimed: int = 0
    no_time: str = ""
    runs: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where all combinations went, what each rule that can remove one says, by its name, and why a run ended.

    `nothing_fits` says, if no candidate is left before any trial, how close the closest came. `knobs` are those that
    plugins bring to the engine here, named by the spec or not, and `notes` what they say of engine and chip.
    """

    counts: Counts
    says: Mapping[str, str]
    ended_because: str | None = None
    nothing_fits: str | None = None
    knobs: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def estimate(
    spec_file: Path | str,
    *,
    chip: str | None = None,
    top: int = 10,
    without: Collection[str] = (),
    data: Mapping[str, Any] | None = None,
) -> Estimate:
    """Predict all candidates of `spec_file` and return the `top` fastest. Nothing runs, no hardware is needed.

    `chip` names a chip to plan for instead of the spec's, `data` is what the file says if it was imported. Raises the
    errors of `flagcore.errors`.
    """
    problem, workload = _pose(Path(spec_file), chip, without, data)
    must_fit(problem)
    order = fastest(problem)
    untimed = np.isnan(problem.predictions.step_time_s[order])
    baseline = problem.space.find(problem.baseline)
    assert baseline is not None
    task = problem.platform.task
    return Estimate(
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        counts=_before_trials(problem),
        baseline=_records(problem, workload, np.array([baseline]))[0],
        candidates=tuple(
            {"number": n, **each} for n, each in enumerate(_records(problem, workload, order[:top]), start=1)
        ),
        model=tuple(model_table(workload.parts(task))),
        untimed=int(untimed.sum()),
        no_time=no_time(task, problem.platform.costs) if untimed.any() else "",
        runs=_runs(task),
        notes=_notes(problem.platform),
    )


def _runs(task: Task) -> str:
    """Return what a prediction of a spec is of: the user's own command, or what stands in for one."""
    if isinstance(task.spec.work, ServeSpec):
        return f"as {task.spec.work.engine} serves the load of serve.profile"
    train = task.spec.train
    if train.command is not None:
        return "as train.command runs it"
    if train.implementation == "transformer_engine":
        if train.settings:
            return "with train.settings, for the rest as Megatron-LM runs it with transformer-engine's layers"
        return "as Megatron-LM runs it with transformer-engine's layers; train.settings plan another run"
    if train.settings:
        return (
            "with train.settings, for the rest as flagcore's own trial program runs it: megatron-core's own layers, "
            "nothing else overlaps; train.implementation plans another run"
        )
    return (
        "as flagcore's own trial program runs it: megatron-core's own layers, nothing overlaps; "
        "train.implementation and train.settings plan another run"
    )


def explain(where: Path | str, *, chip: str | None = None, without: Collection[str] = ()) -> Explanation:
    """Tell where every combination of a spec file went, or of a run's folder with what its trials taught.

    Raises the errors of `flagcore.errors`.
    """
    path = Path(where)
    problem, workload = _pose(path / "spec.yaml" if path.is_dir() else path, chip, without)
    counts, because = _before_trials(problem), None
    if path.is_dir():
        try:
            known = json.loads((path / "result.json").read_text(encoding="utf-8"))
            counts, because = Counts(**known["counts"]), str(known["stopped_because"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path / 'result.json'} cannot be read ({error}); `flag tune` writes it") from None
    platform, task = problem.platform, problem.platform.task
    legality = (*workload.rules(task), *refusals(workload.axes(task), platform.support, task.spec))
    pruning = (*workload.pruning_rules(task), *platform.pruning_rules)
    says = {rule.name: rule.says for rule in legality} | {rule.name: rule.says for rule in pruning}
    nothing_fits = None
    try:
        must_fit(problem)
    except NothingFits as error:
        nothing_fits = str(error)
    return Explanation(
        counts=counts,
        says=says | LEARNED,
        ended_because=because,
        nothing_fits=nothing_fits,
        knobs=tuple(_knob(task, knob) for knob in platform.knobs),
        notes=_notes(platform),
    )


def _notes(platform: Platform) -> tuple[str, ...]:
    """Return what plugins set for all candidates, and what they say of engine and chip."""
    forced = (f"{each.setting} = {each.value} (rule {each.name}): {each.reason}" for each in platform.support.forced)
    return (*forced, *platform.support.notes)


def _knob(task: Task, knob: PluginKnob) -> dict[str, Any]:
    """Return a plugin's knob as plain data. `not_launched` says by value why no trial can have it."""
    why = {choice.value: why_not_launched(task, knob, choice.value) for choice in knob.choices}
    return {
        "knob": knob.name,
        "values": list(knob.values),
        "in_space": knob in task.knobs,
        "says": knob.says,
        "claim": knob.claim,
        "needs": [str(need) for need in knob.needs] + ["a mixture of experts"] * knob.of_experts,
        "effects": [_effect(choice) for choice in knob.choices],
        "not_launched": {str(value): reason for value, reason in why.items() if reason},
        "source": f"{knob.source.kind}: {knob.source.detail}",
    }


def _effect(choice: PluginChoice) -> dict[str, Any]:
    """Return what a value of a knob makes of predictions."""
    return {
        "value": choice.value,
        "part": choice.part,
        "time": asdict(choice.time),
        "memory": asdict(choice.memory),
        "settings": dict(choice.settings),
        "flags": list(choice.flags),
        "environment": dict(choice.environment),
    }


def _pose(
    spec_file: Path, chip: str | None, without: Collection[str], data: Mapping[str, Any] | None = None
) -> tuple[Problem, Workload]:
    given = spec_as_data(spec_file) if data is None else data
    spec = parsed(given, file=str(spec_file), base=spec_file.parent, without=without)
    if chip is not None and spec.cluster.groups:
        raise UsageError(f"--chip {chip} goes with a spec of one chip, but {spec_file} gives cluster.groups")
    if chip is not None:
        spec = replace(spec, cluster=replace(spec.cluster, chip=chip))
    workload = plugins.workload_of(spec.work)
    with loaded_plugins(without) as loaded:
        problem = pose(spec, loaded, workload)
    tell_of_problem(problem, workload)
    return problem, workload


def _before_trials(problem: Problem) -> Counts:
    nothing = Lessons(by_candidate={}, repeats=(), baseline=None, best=None)
    return count(problem.space, problem.pruned, nothing)


def _records(problem: Problem, workload: Workload, rows: IntArray) -> list[dict[str, Any]]:
    """Return candidates with their predictions and, by component, what their worst stages hold."""
    task, space, columns = problem.platform.task, problem.space, problem.space.columns(rows)
    stages = problem.predictions.worst_stage[rows]
    components = workload.components(task, columns, stages, problem.platform.costs)
    records = []
    for place, row in enumerate(rows):
        figures = replace(problem.predictions.row(int(row)), components=of_row(components, place))
        why = {} if figures.step_time_s is not None else {"reason": f"no time: {no_time(task, problem.platform.costs)}"}
        records.append({"candidate": space.candidate(int(row)).as_dict(), **why, **record(task, figures)})
    return records
