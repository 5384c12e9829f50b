"""Any engine with the knobs that plugins bring: they are crossed, predicted, launched and read beside its own.

The engine sees tasks and candidates without them. What a value does is told by `flagcore.domain.plugin_knob`: settings
of the engine that its own formulas know, or factors on what is predicted, which widen its interval.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from flagcore.contracts import Breakdown, Costs, Pipelined, Platform, Prober, Workload
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.launch import Launch
from flagcore.domain.passes import Passes
from flagcore.domain.plugin_knob import WHOLE_STEP, Factor, Need, PluginChoice, PluginKnob
from flagcore.domain.prediction import Components, Predictions, RankPrediction
from flagcore.domain.serving import LATENCIES, RATES
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Spec, Task, TrainSpec
from flagcore.domain.trial import Measurement

_Setting: TypeAlias = tuple[str, Axis, PluginChoice]
"""A knob's name, its axis, and one of its choices that changes the engine's settings."""


def with_knobs(workload: Workload) -> Workload:
    """Return `workload` with the knobs of `Task.knobs`."""
    return cast(Workload, (_ProberWithKnobs if isinstance(workload, Prober) else _WithKnobs)(workload))


def own_command(spec: Spec) -> bool:
    """Return whether trials of `spec` run a training command of the user's, to which flags can be added."""
    return isinstance(spec.work, TrainSpec) and spec.work.command is not None


def axis_of(task: Task, knob: PluginKnob) -> Axis:
    """Return the axis of a knob: the values that the spec names, those that can be launched for auto, else off."""
    asked = task.spec.space.get(knob.name, (knob.off,))
    values = knob.launched(own_command=own_command(task.spec)) if isinstance(asked, str) else asked
    words = tuple(value for value in knob.values if isinstance(value, str))
    return Axis(
        knob=knob.name,
        values=tuple(values),
        neutral=knob.off,
        words=(None, *words) if words else (),
        is_flag=isinstance(knob.off, bool),
        also=tuple(value for value in knob.values if value not in values),
        apart=True,
    )


def rules_of(task: Task, knob: PluginKnob, known: Sequence[Axis]) -> tuple[Rule, ...]:
    """Return what must hold where a knob is on. A need of a knob that this engine does not have never holds."""
    axis, by_name = axis_of(task, knob), {each.knob: each for each in known}
    off = axis.encode(knob.off)
    rules = []
    if knob.of_experts and task.spec.model.num_moe_experts is None:
        says = f"{knob.name} is of mixtures of experts, and the model is none"
        name = f"{knob.name}_without_experts"
        rules.append(Rule(name=name, knobs=(knob.name,), message=says, broken=lambda c: c[knob.name] != off))
    for need in knob.needs:
        wanted = by_name.get(need.knob)
        broken = partial(_lacks, knob.name, off, need, wanted)
        says = f"{knob.name} needs {need}: {knob.message}"
        knobs = (knob.name, need.knob) if wanted else (knob.name,)
        rules.append(Rule(name=f"{knob.name}_needs_{need.knob}", knobs=knobs, message=says, broken=broken))
    return tuple(rules)


def _but_where_set(rule: Rule, setting: Sequence[_Setting]) -> Rule:
    """Return a rule of the engine that does not hold where a choice sets anew what it is of."""
    over = [(knob, axis.encode(choice.value)) for knob, axis, choice in setting if rule.name in choice.settings]
    if not over:
        return rule
    knobs = tuple(dict.fromkeys([*rule.knobs, *(knob for knob, _ in over)]))
    return replace(rule, knobs=knobs, broken=partial(_broken_but, over, rule))


def _broken_but(over: Sequence[tuple[str, int]], rule: Rule, columns: Columns) -> BoolArray:
    broken: BoolArray = rule.broken(columns) & ~np.any([columns[knob] == code for knob, code in over], axis=0)
    return broken


def _broken_where(knob: str, code: int, rule: Rule, columns: Columns) -> BoolArray:
    broken: BoolArray = (columns[knob] == code) & rule.broken(columns)
    return broken


def _lacks(knob: str, off: int, need: Need, wanted: Axis | None, columns: Columns) -> BoolArray:
    on: BoolArray = columns[knob] != off
    if wanted is None:
        return on
    values, holds = columns[need.knob], np.ones(on.shape, dtype=np.bool_)
    if need.at_least is not None:
        holds &= values >= need.at_least
    if need.at_most is not None:
        holds &= values <= need.at_most
    if need.one_of:
        holds &= np.isin(values, [wanted.encode(each) for each in need.one_of])
    return on & ~holds


class _Engine(Workload, Prober, Breakdown, Pipelined, Protocol):
    """An engine with all capabilities that are wrapped."""


class _WithKnobs:
    """`flagcore.contracts.Workload` of an engine and of the knobs that a task names beside its own."""

    def __init__(self, workload: Workload) -> None:
        self._engine = cast(_Engine, workload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the engine's axes, then the plugins'."""
        return (*self._engine.axes(_bare(task)), *(axis_of(task, knob) for knob in task.knobs))

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return the engine's rules, then what the plugins' knobs need, and what their settings do."""
        own = self._engine.rules(_bare(task))
        if not task.knobs:
            return own
        known = self._engine.axes(_bare(task))
        needed = [rule for knob in task.knobs for rule in rules_of(task, knob, known)]
        setting = [
            (knob.name, axis_of(task, knob), each) for knob in task.knobs for each in knob.choices if each.settings
        ]
        mine = [_but_where_set(rule, setting) for rule in own]
        return (*mine, *needed, *self._rules_of_settings(task, setting, {(rule.name, rule.message) for rule in own}))

    def _rules_of_settings(
        self, task: Task, setting: Sequence[_Setting], own: Container[tuple[str, str]]
    ) -> Iterator[Rule]:
        """Yield the rules that the engine has only with the settings of a choice; they hold where it is chosen.

        The rule of a setting has its name.
        """
        for knob, axis, choice in setting:
            for rule in self._engine.rules(_set(task, [choice])):
                if rule.name in choice.settings or (rule.name, rule.message) not in own:
                    broken = partial(_broken_where, knob, axis.encode(choice.value), rule)
                    knobs, says = (knob, *rule.knobs), f"{knob} = {choice.value}: {rule.message}"
                    yield Rule(name=f"{knob}_{rule.name}", knobs=knobs, message=says, broken=broken)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what is the same to the engine."""
        return self._engine.merges(_bare(task))

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return what the speed of kernels depends on."""
        return self._engine.sizes(_bare(task), columns)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the few values among which an expert would choose: no plugin's knob is on."""
        return self._engine.usual_space(_bare(task))

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return what a trial measured, the values that the engine printed of plugins' knobs included."""
        return self._engine.read(_bare(task), candidate, folder, partial=partial)

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return columns of one row."""
        names = {knob.name for knob in task.knobs}
        columns = self._engine.columns(_bare(task), {name: each for name, each in values.items() if name not in names})
        for axis in (axis_of(task, knob) for knob in task.knobs):
            columns[axis.knob] = np.array([axis.encode(values.get(axis.knob, axis.neutral))], dtype=np.int64)
        return columns

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return what the engine predicts with the settings of each combination of knobs, and their factors."""
        if not task.knobs:
            return self._engine.predict(task, columns, costs)
        parts, order = [], []
        for chosen, some, rows in _by_choices(task, columns):
            parts.append(_scaled(self._engine.predict(_set(task, chosen), some, costs), chosen))
            order.append(rows)
        if not parts:
            return self._engine.predict(_bare(task), columns, costs)
        joined = Predictions.join(parts)
        back: IntArray = np.argsort(np.concatenate(order), kind="stable").astype(np.int64)
        return joined.take(back)

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return the engine's figures by component with the settings of each row's knobs; factors are not split."""
        if not task.knobs:
            return self._engine.components(task, columns, stages, costs)
        found: dict[str, dict[str, FloatArray]] = {}
        for chosen, some, rows in _by_choices(task, columns):
            for component, figures in self._engine.components(_set(task, chosen), some, stages[rows], costs).items():
                for name, values in figures.items():
                    found.setdefault(component, {}).setdefault(name, np.zeros(stages.size))[rows] = values
        return found

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Return how to start a candidate, with the flags and variables of its knobs."""
        task, values = platform.task, candidate.as_dict()
        chosen = _choices(task, [values.get(knob.name, knob.off) for knob in task.knobs])
        bare = replace(platform, task=_with_flags(_bare(task), [flag for each in chosen for flag in each.flags]))
        planned = self._engine.launch(bare, _without(task, candidate), folder, for_real=for_real)
        return replace(planned, environment={**planned.environment, **_variables(chosen)})


class _ProberWithKnobs(_WithKnobs):
    """Adds the capabilities of an engine that trains."""

    def passes(self, task: Task, columns: Columns, costs: Costs) -> Passes | None:
        """Return the passes of the candidate in the first row with its knobs' settings; plugins' factors are of the
        whole."""
        return self._engine.passes(_set(task, _of_row(task, columns)), columns, costs)

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the engine's figures of one rank with its knobs' settings; plugins' factors are of the whole."""
        return self._engine.rank(_set(task, _of_row(task, columns)), columns, rank, costs)

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the ranks that tell most of a candidate."""
        return self._engine.probe_ranks(_bare(task), _without(task, candidate), costs)

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Return how to start the probe of one rank, with the variables of the candidate's knobs."""
        task, values = platform.task, candidate.as_dict()
        chosen = _choices(task, [values.get(knob.name, knob.off) for knob in task.knobs])
        bare = replace(platform, task=_bare(task))
        planned = self._engine.probe_launch(bare, _without(task, candidate), rank, folder, device)
        return replace(planned, environment={**planned.environment, **_variables(chosen)})


def _bare(task: Task) -> Task:
    """Return `task` as the engine sees it: without the plugins' knobs in its space and baseline."""
    names = {knob.name for knob in task.knobs}
    if not names:
        return task
    spec = task.spec
    space = {name: values for name, values in spec.space.items() if name not in names}
    baseline = spec.baseline and {name: value for name, value in spec.baseline.items() if name not in names}
    return replace(task, spec=replace(spec, space=space, baseline=baseline), knobs=())


def _without(task: Task, candidate: Candidate) -> Candidate:
    names = {knob.name for knob in task.knobs}
    return Candidate(tuple(item for item in candidate.items if item[0] not in names))


def _choices(task: Task, values: Sequence[KnobValue]) -> list[PluginChoice]:
    """Return the choices of the knobs of `task` that are on."""
    found = (knob.choice(value) for knob, value in zip(task.knobs, values, strict=True))
    return [choice for choice in found if choice is not None]


def _by_choices(task: Task, columns: Columns) -> Iterator[tuple[list[PluginChoice], Columns, IntArray]]:
    """Yield each combination of the knobs' values: choices that are on, its rows, and which they are."""
    axes = [axis_of(task, knob) for knob in task.knobs]
    kinds, which = np.unique(np.stack([columns[axis.knob] for axis in axes]), axis=1, return_inverse=True)
    for place in range(kinds.shape[1]):
        rows = np.flatnonzero(which.reshape(-1) == place)
        values = [axis.decode(int(code)) for axis, code in zip(axes, kinds[:, place], strict=True)]
        yield _choices(task, values), {name: column[rows] for name, column in columns.items()}, rows


def _of_row(task: Task, columns: Columns) -> list[PluginChoice]:
    """Return the choices of the first row's knobs that are on."""
    axes = [axis_of(task, knob) for knob in task.knobs]
    return _choices(task, [axis.decode(int(columns[axis.knob][0])) for axis in axes])


def _variables(chosen: Sequence[PluginChoice]) -> dict[str, str]:
    return {name: value for each in chosen for name, value in each.environment.items()}


def _set(task: Task, chosen: Sequence[PluginChoice]) -> Task:
    """Return the task that predicts some choices."""
    bare, settings = _bare(task), {key: value for each in chosen for key, value in each.settings.items()}
    if not settings or not isinstance(bare.spec.work, TrainSpec):
        return bare
    work = replace(bare.spec.work, settings={**bare.spec.work.settings, **settings})
    return replace(bare, spec=replace(bare.spec, work=work))


def _with_flags(task: Task, flags: Sequence[str]) -> Task:
    """Return `task` with `flags` in the user's own command, before the engine's own."""
    work = task.spec.work
    if not flags or not isinstance(work, TrainSpec) or work.command is None:
        return task
    command = [word for each in work.command for word in ((*flags, each) if each == "{flags}" else (each,))]
    command = command if "{flags}" in command else [*command, *flags]
    return replace(task, spec=replace(task.spec, work=replace(work, command=tuple(command))))


def _scaled(found: Predictions, chosen: Sequence[PluginChoice]) -> Predictions:
    """Return predictions with the factors of some choices.

    The interval grows as that of a product of independent figures: logarithms' widths add as squares.
    """
    for choice in chosen:
        found = _with_memory(_with_time(found, choice.part, choice.time), choice.memory)
    return found


def _with_time(found: Predictions, part: str, factor: Factor) -> Predictions:
    if factor == Factor():
        return found
    before = found.step_time_s
    if part == WHOLE_STEP:
        time_s = {name: seconds * factor.value for name, seconds in found.time_s.items()}
        after, ends = before * factor.value, (factor.low / factor.value, factor.high / factor.value)
        shares: tuple[FloatArray | float, FloatArray | float] = ends
        found = replace(found, figures={name: _figure(name, each, factor) for name, each in found.figures.items()})
    else:
        own = found.time_s.get(part, np.zeros_like(before))
        time_s = {**found.time_s, part: own * factor.value} if part in found.time_s else dict(found.time_s)
        after = before + own * (factor.value - 1.0)
        shares = ((before + own * (factor.low - 1.0)) / after, (before + own * (factor.high - 1.0)) / after)
    low, high = found.low_s / before, found.high_s / before
    return replace(
        found,
        step_time_s=after,
        low_s=after * np.exp(-np.hypot(np.log(low), np.log(shares[0]))),
        high_s=after * np.exp(np.hypot(np.log(high), np.log(shares[1]))),
        time_s=time_s,
    )


def _figure(name: str, values: FloatArray, factor: Factor) -> FloatArray:
    """Return a figure of a server whose iterations all take `factor` as long."""
    if name in RATES:
        return values / factor.value
    return values * factor.value if name.partition(".")[0] in LATENCIES else values


def _with_memory(found: Predictions, factor: Factor) -> Predictions:
    """Scale the peak of what is allocated; what is saved or added is of activations."""
    if factor == Factor():
        return found
    more = found.peak_allocated_bytes * (factor.value - 1.0)
    return replace(
        found,
        activation_bytes=np.maximum(found.activation_bytes + more, 0.0),
        peak_allocated_bytes=found.peak_allocated_bytes + more,
        reserved_bytes=found.reserved_bytes + more,
        device_used_bytes=found.device_used_bytes + more,
    )
