"""A task that is understood, before anything has run: where `flag tune`, `estimate` and `explain` all begin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from packaging.requirements import Requirement

from flagcore.contracts import Installed, Packaged, Planned, Platform, Plugins, PruningRule, ReleaseCheck, Workload
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.effects import engine_task, has_own_command, plugin_columns
from flagcore.domain.knob import Knob, Knobs
from flagcore.domain.prediction import Predictions
from flagcore.domain.search_state import Pruned
from flagcore.domain.space import IntArray, Legality, Space
from flagcore.domain.spec import AUTO, Spec, Task, TrainSpec
from flagcore.domain.trial import ESTIMATE
from flagcore.errors import FlagError, NothingFits, SpecError, joined
from flagcore.i18n import _
from flagcore.stages.build import build, check
from flagcore.stages.discover import discover, present
from flagcore.stages.legality import legality
from flagcore.stages.predict import predict
from flagcore.stages.prune import LEARNED, prune
from flagcore.stages.scale_down import pruning_of_trials, rules_of_trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A task that is understood, before anything has run.

    `rules` are the pruning rules of engine and plugins, `knobs` the knobs of both by name.
    """

    platform: Platform
    legality: Legality
    space: Space
    predictions: Predictions
    pruned: Pruned
    baseline: Candidate
    rules: tuple[PruningRule, ...] = ()
    knobs: Knobs = field(default_factory=dict)

    @property
    def messages(self) -> dict[str, str]:
        """The message of each rule by name: of legality, of pruning, and of those that trials teach."""
        legality = {rule.name: rule.message for rule in self.legality.rules}
        return legality | {rule.name: rule.message for rule in self.rules} | LEARNED


def build_problem(spec: Spec, plugins: Plugins, workload: Workload, *, plan: bool = False) -> Problem:
    """Discover, build, predict, prune. Raises NothingFits if no combination is legal, with the counts of each rule.

    A `plan`, as one of fidelity `estimate`, runs nothing; where nothing could run, it is of what production runs.
    """
    if isinstance(workload, ReleaseCheck):
        workload.check_release(spec)
    found = discover(spec, plugins, engine_version(spec, workload))
    if isinstance(workload, Planned) and (plan or spec.control.fidelity == ESTIMATE):
        found = found if _runs_here(found, plugins, workload) else workload.as_in_production(found)
    if isinstance(workload, Installed):
        found = workload.as_installed(found)
    platform = with_plugin_knobs(found, workload)
    legal = legality(platform.task, workload, platform.support)
    legal = replace(legal, rules=(*legal.rules, *rules_of_trials(platform.task, workload)))
    baseline = _baseline(platform, workload, legal)
    values = baseline.as_dict()
    axes = tuple(replace(axis, also=(values[axis.knob],)) for axis in legal.axes)
    space = build(axes, legal.rules, legal.merges)
    if not len(space):
        raise NothingFits(_nothing_legal(space, legal))
    space = space.with_candidate(baseline)
    predictions = predict(platform.task, workload, space, platform.costs)
    rules = (*workload.pruning_rules(platform.task), *platform.pruning_rules)
    rules = (*rules, *pruning_of_trials(platform.task, workload, platform.costs))
    return Problem(
        platform=platform,
        legality=legal,
        space=space,
        predictions=predictions,
        pruned=prune(space, predictions, workload, rules, ()),
        baseline=baseline,
        rules=rules,
        knobs={knob.name: knob for knob in (*workload.knobs, *platform.task.knobs)},
    )


def _runs_here(platform: Platform, plugins: Plugins, workload: Workload) -> bool:
    """Return whether trials of the platform's task could run on this machine."""
    try:
        workload.ready(platform.task.spec)
        present(platform, plugins.devices())
    except FlagError:
        return False
    return True


def candidate_columns(task: Task, workload: Workload, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Return columns of one row from knob values, the engine's and the plugins'. Raises SpecError for a wrong value."""
    plugin = plugin_columns(task, values)
    own = {name: value for name, value in values.items() if name not in plugin}
    return {**workload.columns(engine_task(task), own), **plugin}


def engine_version(spec: Spec, workload: Workload) -> str | None:
    """Return the release of the engine that trials of `spec` run: the given one, or what is installed here.

    None for the user's own command without a given release, and where nothing is installed.
    """
    work = spec.work
    if work.engine_version or work.command is not None:
        return work.engine_version
    if isinstance(workload, Packaged) and workload.distribution:
        names = [workload.distribution]
    else:
        packages = (Requirement(each).name for each in workload.modules.values())
        names = [name for name in packages if workload.name in name.replace("-", "")]
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def with_plugin_knobs(platform: Platform, workload: Workload) -> Platform:
    """Return `platform` with those knobs with effects in its task that the spec names: of plugins, and settings of the
    engine that the space compares. Raises SpecError for wrong ones.

    A plugin's knob that has the name of one of the engine's own is left out.
    """
    task, spec = platform.task, platform.task.spec
    own = {name for knob in workload.knobs if knob.searchable or knob.comparable for name in knob.names}
    known = tuple(knob for knob in platform.knobs if knob.name not in own)
    named = {**(spec.baseline or {}), **spec.space}
    settings = [_compared(task, knob) for knob in workload.knobs if knob.comparable and knob.name in named]
    chosen = (*settings, *(knob for knob in known if knob.name in named))
    if isinstance(spec.work, TrainSpec):
        for name in named.keys() - own - {knob.name for knob in chosen}:
            section = "space" if name in spec.space else "baseline"
            problem = f"is not a knob of {spec.work.engine} on {task.cluster.chips}"
            fix = f"knobs of plugins there: {', '.join(knob.name for knob in known) or 'none'}"
            raise SpecError(key=f"auto_tuner.{section}.{name}", value=named[name], problem=problem, fix=fix)
    for knob in chosen:
        _check_knob(spec, knob)
    task = replace(task, knobs=chosen)
    try:
        workload.axes(engine_task(task))
    except SpecError as error:
        more = f"; knobs of plugins: {', '.join(knob.name for knob in known)}" if known else ""
        raise joined(
            [SpecError(key=e.key, value=e.value, problem=e.problem, fix=e.fix + more) for e in error.problems]
        ) from None
    searched = {name for knob in chosen for effect in knob.effects.values() for name in effect.environment}
    environment = {name: value for name, value in platform.environment.items() if name not in searched}
    return replace(platform, task=task, knobs=known, environment=environment)


def _compared(task: Task, knob: Knob) -> Knob:
    """Return a setting as a knob of the values that a spec compares. Raises SpecError for an `auto` without meaning."""
    asked, baseline = task.spec.space.get(knob.name, ()), task.spec.baseline or {}
    if isinstance(asked, str) and knob.auto is None:
        problem, fix = "cannot be auto", "list the values to compare"
        raise SpecError(key=f"auto_tuner.space.{knob.name}", value=asked, problem=problem, fix=fix)
    values = knob.auto(task) if isinstance(asked, str) and knob.auto else asked
    own = (baseline[knob.name],) if knob.name in baseline else ()
    return knob.compared([*values, *own])


def require_launchable(problem: Problem, workload: Workload) -> None:
    """Raise SpecError if no trial can use a value of a knob with effects, or if this shell sets a variable of one."""
    task = problem.platform.task
    for knob in task.knobs:
        key = f"auto_tuner.space.{knob.name}"
        for value, effect in knob.effects.items():
            if effect.passed:
                try:
                    workload.ready(engine_task(task, [effect]).spec)
                except SpecError as error:
                    if error.key == f"train.settings.{knob.name}":
                        raise SpecError(key=key, value=value, problem=error.problem, fix=error.fix) from None
        for name in {name for effect in knob.effects.values() for name in effect.environment} & os.environ.keys():
            conflict = f"sets the variable {name}, which this shell sets, too"
            raise SpecError(key=key, value=os.environ[name], problem=conflict, fix=f"unset {name}")
        asked, baseline = task.spec.space.get(knob.name, ()), problem.baseline.as_dict().get(knob.name, knob.neutral)
        for value in (*(() if isinstance(asked, str) else asked), baseline):
            if reason := no_launch_reason(task, knob, value):
                fix = "remove it; `flag estimate` can predict it"
                raise SpecError(key=key, value=value, problem=f"cannot run in a trial: {reason}", fix=fix)


def no_launch_reason(task: Task, knob: Knob, value: KnobValue) -> str:
    """Return why trials of `task` cannot use a value of a plugin's knob; empty if they can."""
    effect = knob.effect(value)
    return effect.no_launch_reason(own_command=has_own_command(task.spec)) if effect else ""


def _check_knob(spec: Spec, knob: Knob) -> None:
    asked, baseline = spec.space.get(knob.name, ()), spec.baseline or {}
    for value in () if isinstance(asked, str) else asked:
        knob.parse(value, f"auto_tuner.space.{knob.name}")
    if knob.name in baseline:
        knob.parse(baseline[knob.name], f"auto_tuner.baseline.{knob.name}")
    settings = spec.work.settings if isinstance(spec.work, TrainSpec) else {}
    for effect in knob.effects.values():
        for section, given, names in (
            ("train.settings", settings, effect.settings),
            ("envs", spec.envs, effect.environment),
        ):
            if twice := [name for name in names if name in given]:
                key, problem = f"{section}.{twice[0]}", f"is also set by auto_tuner.space.{knob.name}"
                raise SpecError(key=key, value=given[twice[0]], problem=problem, fix="give one of the two")
        if twice := [flag for flag in effect.flags if flag.startswith("--") and flag in (spec.work.command or ())]:
            problem = f"has {twice[0]}, which auto_tuner.space.{knob.name} adds or leaves out"
            raise SpecError(key="train.command", problem=problem, fix="give one of the two")


def sizes_fixed_at_one(problem: Problem) -> list[str]:
    """Return a line for each size whose values above 1 are all illegal by one rule with no other choice."""
    axes = {axis.knob: axis for axis in problem.legality.axes}
    lines = []
    for rule in problem.legality.rules:
        axis, *others = (axes.get(knob) for knob in rule.knobs)
        fixed = [each for each in others if each is not None and len(each.values) == 1]
        if len(fixed) < len(others) or axis is None or axis.is_flag or axis.words:
            continue
        greater = np.array([code for value in axis.values if (code := axis.encode(value)) > 1], dtype=np.int64)
        columns = {each.knob: np.full_like(greater, each.encode(each.values[0])) for each in fixed}
        if greater.size and rule.broken({axis.knob: greater, **columns}).all():
            lines.append(f"no candidate has {axis.knob} > 1: {rule.message}")
    return lines


def require_candidate(problem: Problem) -> None:
    """Raise NothingFits if no candidate is left, with what each rule took and how close the closest came."""
    if not problem.pruned.open_rows.size:
        raise NothingFits(_why_nothing_fits(problem))


def fastest(problem: Problem) -> IntArray:
    """Return the rows that are left, the fastest predicted first; those without a time are the last.

    Candidates that are predicted to break a limit come last.
    """
    rows, predictions = problem.pruned.open_rows, problem.predictions
    time = np.nan_to_num(predictions.step_time_s[rows], nan=np.inf)
    breaks = ~predictions.keeps(problem.platform.task.spec.limits)[rows]
    order: IntArray = rows[np.lexsort((predictions.device_used_bytes[rows], time, breaks))]
    return order


def _baseline(platform: Platform, workload: Workload, legal: Legality) -> Candidate:
    """Return the user's own configuration, or the one that an expert would choose.

    An expert does not choose what the chip's pruning rules remove, unless they remove everything.
    """
    task, given = platform.task, platform.task.spec.baseline
    if given is None:
        usual = replace(task, spec=replace(task.spec, space=workload.usual_space(engine_task(task))))
        for wanted in (legality(usual, workload, platform.support), legal):
            space = build(wanted.axes, wanted.rules, wanted.merges)
            if len(space):
                break
        else:
            raise NothingFits(_nothing_legal(space, legal))
        predictions = predict(task, workload, space, platform.costs)
        left = prune(space, predictions, workload, platform.pruning_rules, ()).open_rows
        rows = left if left.size else np.arange(len(space))
        return space.candidate(int(rows[workload.rule_of_thumb(space.columns(rows), predictions.take(rows))]))
    columns, broken = check(candidate_columns(task, workload, given), legal.rules, legal.merges)
    if broken:
        problem = f"is not legal: {'; '.join(rule.message for rule in broken)}"
        raise SpecError(key="auto_tuner.baseline", value=dict(given), problem=problem)
    return Candidate(tuple((axis.knob, axis.decode(int(columns[axis.knob][0]))) for axis in legal.axes))


def _nothing_legal(space: Space, legal: Legality) -> str:
    messages = {rule.name: rule.message for rule in legal.rules}
    removed = sorted(space.illegal.items(), key=lambda pair: -pair[1])
    counts = ", ".join(f"{name} {number:,} ({_(messages[name])})" for name, number in removed)
    why = counts or _("the space is empty")
    return _("no legal candidate among {count:,} combinations: {why}", count=space.combinations, why=why)


def _why_nothing_fits(problem: Problem) -> str:
    """Return one line: what each rule took, how close the closest candidate came, and who chose the hardware."""
    space, predictions, pruned = problem.space, problem.predictions, problem.pruned
    counts = ", ".join(f"{name} {int((pruned.rule == place + 1).sum()):,}" for place, name in enumerate(pruned.rules))
    if limits := _limits_broken(problem):
        return _("none of {count:,} candidates is left: {counts}; {why}", count=len(space), counts=counts, why=limits)
    capacity = 1.0 if predictions.capacity_bytes is None else predictions.capacity_bytes
    row = int(np.argmin(np.nan_to_num(predictions.device_used_bytes / capacity, nan=np.inf)))
    need, have = predictions.device_used_bytes[row] / 2**30, (predictions.row(row).capacity_bytes or 0) / 2**30
    given = Candidate(tuple(each for each in space.candidate(row).items if each[1] is not None))
    smallest = _(
        "the smallest needs ~{need:.2f} GiB a device of {have:.2f} GiB ({budget}): {candidate}; {fix}",
        need=need,
        have=have,
        budget=_budget_from(problem.platform.task),
        candidate=given,
        fix=_other_hardware(problem.platform.task),
    )
    return _("none of {count:,} candidates is left: {counts}; {why}", count=len(space), counts=counts, why=smallest)


def _limits_broken(problem: Problem) -> str:
    """Return which limits nothing that fits is predicted to keep, and what comes nearest; nothing if some does."""
    space, predictions = problem.space, problem.predictions
    limits = {name: most for name, most in problem.platform.task.spec.limits.items() if name in predictions.figures}
    rows = np.flatnonzero(predictions.fits)
    if not limits or not rows.size or predictions.keeps(limits)[rows].any():
        return ""
    missed = np.max([predictions.figures[name][rows] / most for name, most in limits.items()], axis=0)
    row = int(rows[np.argmin(np.nan_to_num(missed, nan=np.inf))])
    given = Candidate(tuple(each for each in space.candidate(row).items if each[1] is not None))
    figures = [f"{name} ~{predictions.figures[name][row]:.4g} s of {most:g} s" for name, most in limits.items()]
    return _(
        "nothing is predicted to keep the limits; the nearest would have {figures}: {candidate}",
        figures=", ".join(figures),
        candidate=given,
    )


def _budget_from(task: Task) -> str:
    """Return where the memory of a device is from."""
    group = task.cluster.groups[0]
    if len(task.cluster.groups) > 1:
        return task.cluster.chips
    if task.spec.cluster.memory_bytes_per_device:
        return "cluster.memory_per_device"
    here = _("what this machine has for each of {count} {chip}", count=group.devices_per_node, chip=group.chip.name)
    return here if group.memory_bytes is not None else _("that of {chip}", chip=group.chip.name)


def _other_hardware(task: Task) -> str:
    """Return which chip was taken where the spec left that to this machine, and how to plan for other hardware."""
    if task.spec.cluster.groups or task.spec.cluster.chip != AUTO:
        return _("give cluster more devices or nodes, or a chip with more memory")
    return _(
        "cluster.chip: auto found {chip} here; `flag estimate --chip NAME` plans for other hardware",
        chip=task.cluster.chips,
    )
