"""legality: collect the axes, rules and merges of a task from the engine and from plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from flagcore.contracts import Workload
from flagcore.domain.effects import engine_task, plugin_axes, plugin_axis
from flagcore.domain.engine import EngineSupport, RefusedValues
from flagcore.domain.knob import Knob, Requirement
from flagcore.domain.space import Axis, BoolArray, Columns, Legality, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.domain.variants import engine_legality
from flagcore.errors import NoDevice

JOB_KEYS = ("precision", "attention", "implementation")
"""Keys of a job whose values a plugin may reject."""
SHARED_PREFIXES = ("settings.", "engine_args.")
"""The prefixes of settings that all candidates share."""


def legality(task: Task, workload: Workload, support: EngineSupport | None = None) -> Legality:
    """Return the axes, rules and merges of `task`: those of the engine, of plugins' knobs, and of values that plugins
    reject. Raises SpecError for an invalid space."""
    engine_axes = workload.axes(engine_task(task))
    axes = (*engine_axes, *plugin_axes(task))
    rules, merges = engine_legality(task, workload.rules, workload.merges)
    required = [rule for knob in task.knobs for rule in _requirement_rules(task, knob, axes)]
    release = _release_rules(task, workload, engine_axes)
    rejected = () if support is None else rejection_rules(axes, support, task.spec)
    return Legality(axes=axes, rules=(*rules, *required, *release, *rejected), merges=merges)


def _release_rules(task: Task, workload: Workload, engine_axes: Sequence[Axis]) -> Iterator[Rule]:
    """Yield a rule for each knob that the engine release does not have: it must be neutral."""
    knobs = {knob.name: knob for knob in workload.knobs if not knob.is_available(task.spec.work.engine_version)}
    for axis in engine_axes:
        if knob := knobs.get(axis.knob):
            yield Rule(
                name=f"{knob.name}_release",
                knobs=(knob.name,),
                message=f"{knob.name} needs {workload.name} {knob.versions}",
                broken=partial(_is_set, knob.name, axis.encode(knob.neutral)),
            )


def _is_set(knob: str, neutral: int, columns: Columns) -> BoolArray:
    is_set: BoolArray = columns[knob] != neutral
    return is_set


def rejection_rules(axes: Sequence[Axis], support: EngineSupport, spec: Spec | None = None) -> tuple[Rule, ...]:
    """Return a rule for each value that does not work on the chip, of a knob or of a key of `spec`.

    Values that a knob does not have are ignored, because a plugin may support other releases of the engine. Raises
    NoDevice for a name that is neither a knob nor a key of a job.
    """
    by_knob = {axis.knob: axis for axis in axes}
    rules = []
    for refused in support.refused:
        if refused.knob in by_knob:
            rules.append(_knob_rule(by_knob[refused.knob], refused))
        elif refused.knob in JOB_KEYS or refused.knob.startswith(SHARED_PREFIXES):
            value = None if spec is None else _value_of(spec, refused.knob)
            broken = value in refused.values
            rules.append(_job_rule(axes[0], refused.name, refused.knob, value, broken, refused.reason))
        else:
            problem = f"a plugin rejects values of {refused.knob}, which is not a knob (rule {refused.name})"
            raise NoDevice(f"{problem}; knobs: {', '.join(by_knob)}; or {', '.join(JOB_KEYS)}, settings.NAME")
    for forced in support.forced:
        value = None if spec is None else _value_of(spec, forced.setting)
        reason = f"it must be {forced.value}: {forced.reason}"
        broken = value is not None and value != forced.value
        rules.append(_job_rule(axes[0], forced.name, forced.setting, value, broken, reason))
    return tuple(rules)


def _knob_rule(axis: Axis, refused: RefusedValues) -> Rule:
    valid = [value for value in refused.values if not isinstance(value, str) or value in axis.words]
    codes = np.array([axis.encode(value) for value in valid], dtype=np.int64)
    maximum = np.inf if refused.above is None else refused.above
    values = " or ".join([*map(str, refused.values), *([f"more than {maximum}"] if refused.above is not None else [])])
    return Rule(
        name=refused.name,
        knobs=(axis.knob,),
        message=f"{axis.knob} = {values}: {refused.reason}",
        broken=lambda c: np.isin(c[axis.knob], codes) | (c[axis.knob] > maximum),
    )


def _job_rule(first: Axis, name: str, key: str, value: object, broken: bool, reason: str) -> Rule:
    """Return a rule for a key that all candidates share: either all candidates break it, or none does."""
    return Rule(
        name=name,
        knobs=(first.knob,),
        message=f"{key} = {value}: {reason}" if broken else f"{key}: {reason}",
        broken=lambda c: np.full(c[first.knob].shape, broken),
    )


def _value_of(spec: Spec, key: str) -> object:
    """Return the value of a key of a job or of a shared setting; None if the spec does not have it."""
    section, _, name = key.partition(".")
    if not name:
        return getattr(spec.work, section, None)
    flag = f"--{name.replace('_', '-')}"
    words = list(spec.work.command or ())
    if flag in words:
        following = words[words.index(flag) + 1 :][:1]
        return following[0] if following and not following[0].startswith("-") else True
    settings = getattr(spec.work, section, {})
    return {each.lstrip("-").replace("-", "_"): value for each, value in settings.items()}.get(name.replace("-", "_"))


def _requirement_rules(task: Task, knob: Knob, axes: Sequence[Axis]) -> Iterator[Rule]:
    """Yield a rule for each requirement of a knob with effects that candidates can violate.

    A requirement on a missing knob is met only by the same setting of the spec.
    """
    by_name, neutral = {axis.knob: axis for axis in axes}, plugin_axis(task, knob).encode(knob.neutral)
    if knob.experts_only and task.spec.model.num_moe_experts is None:
        yield Rule(
            name=f"{knob.name}_without_experts",
            knobs=(knob.name,),
            message=f"{knob.name} is for mixture-of-experts models, and the model is dense",
            broken=partial(_is_set, knob.name, neutral),
        )
    for requirement in knob.requires:
        axis = by_name.get(requirement.knob)
        if axis is None and _value_of(task.spec, f"settings.{requirement.knob}") in requirement.one_of:
            continue
        yield Rule(
            name=f"{knob.name}_needs_{requirement.knob}",
            knobs=(knob.name, requirement.knob) if axis else (knob.name,),
            message=f"{knob.name} needs {requirement}: {knob.help}",
            broken=partial(_is_unmet, knob.name, neutral, requirement, axis),
        )


def _is_unmet(knob: str, neutral: int, requirement: Requirement, axis: Axis | None, columns: Columns) -> BoolArray:
    is_set = _is_set(knob, neutral, columns)
    if axis is None:
        return is_set
    values, holds = columns[requirement.knob], np.ones(is_set.shape, dtype=np.bool_)
    if requirement.at_least is not None:
        holds &= values >= requirement.at_least
    if requirement.at_most is not None:
        holds &= values <= requirement.at_most
    if requirement.one_of:
        holds &= np.isin(values, [axis.encode(each) for each in requirement.one_of])
    return is_set & ~holds
