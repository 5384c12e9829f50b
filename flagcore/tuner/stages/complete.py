"""complete: fill in everything that a spec leaves open, from hardware, plugins and engine."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from flagcore.contracts import Engine, HostSetup, Platform
from flagcore.domain.chip import TRAINED, Chip, slowness, usual_precision
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import (
    UNKNOWN,
    EngineSupport,
    ForcedSetting,
    PreferredSetting,
    RefusedValues,
    TaskAdvice,
    Unmodelled,
    ValueRule,
)
from flagcore.domain.knob import Effect, Knob
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.errors import FlagError, NoDevice, SpecError
from flagcore.i18n import _
from flagcore.plugins import LoadedPlugins
from flagcore.tuner.devices import require_devices
from flagcore.tuner.effects import environment_of
from flagcore.tuner.stages.discover import discover


def complete(spec: Spec, plugins: LoadedPlugins, engine: Engine, *, plan: bool = False) -> Platform:
    """Return the platform of `spec`: the completed task, and what plugins provide for it.

    Each step uses the values of the steps before it. No step replaces a value of the spec.

    1. Chips and node groups: those that the spec names, or the best chip of this machine.
    2. Precision: `train.precision: auto` becomes the fastest precision that all chips support.
    3. Forced settings, without which the engine does not run on the chips.
    4. Advice of the plugins on this task: faster settings, and the warm-up of its trials.
    5. Knobs of plugins, and settings that the space compares. Their effects are applied outside the engine.
    6. What the engine completes: defaults of production jobs on these chips, if the job is only planned and cannot run
       on this machine; defaults of the software that is installed here; and values that it derives from the costs of
       the completed task, such as splits over node groups.

    Steps 1 to 4 are those of `complete_by_plugins`. `plan`: whether the job is only planned, so that no trial runs.

    Raises SpecError for values that the engine or its release does not support. Raises NoDevice if no device is found,
    if a chip is unknown, or if the engine cannot run on it.
    """
    engine.check_values(spec)
    platform = complete_by_plugins(spec, plugins, engine, engine_version(spec, engine))
    runs_here = not plan or _runs_here(platform, plugins)
    return engine.complete(with_plugin_knobs(platform), runs_here=runs_here, plan=plan)  # steps 5 and 6


def complete_by_plugins(spec: Spec, plugins: LoadedPlugins, engine: Engine, version: str | None = None) -> Platform:
    """Return the platform of `spec` after the steps 1 to 4 of `complete`, which ask only plugins.

    `version`: the engine release, None if unknown. If the cluster has several kinds of chips, the platform has only the
    knobs that all of them support.
    """
    hardware = discover(spec, plugins, version)  # step 1
    advice = plugins.check_task(Task(spec=spec, cluster=hardware.cluster), version)
    spec, precision_reason = _with_precision(spec, hardware.cluster.groups, hardware.supports, advice.rules)  # step 2
    forced = [rule for rule in advice.rules if isinstance(rule, ForcedSetting)]
    requested = Task(spec=_with_settings(spec, forced), cluster=hardware.cluster)  # step 3
    task, support = _advised(requested, hardware.support, advice)  # step 4
    name, groups, spec = task.spec.work.engine, hardware.cluster.groups, task.spec
    chips = [group.chip for group in groups]
    usable = (device for group in groups for device in group.usable(hardware.devices, task.devices_on(group)))
    own_devices = tuple(dict.fromkeys(usable))
    environments = [plugins.environment(chip, name, version, task) for chip in chips]
    environment = {name: value for variables in reversed(environments) for name, value in variables.items()}
    first_chip_knobs, *other_chips_knobs = (plugins.knobs(chip, name, version) for chip in chips)
    return Platform(
        task=task,
        engine=engine,
        costs=plugins.costs(task.cluster, name, version),
        support=support,
        environment=_of_shell(environment),
        failure_patterns=advice.failures,
        telemetry={device: reader for device in own_devices if (reader := plugins.telemetry(device)) is not None},
        devices=own_devices,
        knobs=tuple(knob for knob in first_chip_knobs if all(knob in each for each in other_chips_knobs)),
        engine_version=version,
        conflicts=tuple(_conflicts(environment, spec)),
        setups=_setups(spec, groups, hardware.supports, environments),
        value_rules=advice.rules,
        precision_reason=precision_reason,
        unmodelled=unmodelled(requested, engine, plugins, advice),
    )


def _setups(
    spec: Spec,
    groups: Sequence[NodeGroup],
    supports: Sequence[EngineSupport],
    environments: Sequence[Mapping[str, str]],
) -> tuple[HostSetup, ...]:
    """Return how the ranks of each kind of hosts start. Empty if all hosts are identical."""
    return tuple(
        HostSetup(
            kind=requested.kind,
            nodes=group.nodes,
            devices=group.devices_per_node,
            support=support,
            environment=_of_shell(variables),
            envs=requested.envs,
        )
        for requested, group, support, variables in zip(
            spec.cluster.groups, groups, supports, environments, strict=False
        )
    )


def unmodelled(task: Task, engine: Engine, plugins: LoadedPlugins, advice: TaskAdvice) -> tuple[Unmodelled, ...]:
    """Return the settings of a task that change its cost and that predictions do not include.

    What is known about a setting replaces that its effect is not known to others. The engine's word replaces that for
    all engines, and the word of the chip's plugin replaces both.
    """
    found = [*plugins.unmodelled(task), *engine.unmodelled(task), *advice.unmodelled]
    by_name = {each.name: each for each in sorted(found, key=lambda each: not each.why.startswith(UNKNOWN))}
    return tuple(each for each in by_name.values() if each.why and each.name not in advice.harmless)


def _with_precision(
    spec: Spec, groups: Sequence[NodeGroup], supports: Sequence[EngineSupport], value_rules: Sequence[ValueRule]
) -> tuple[Spec, str]:
    """Return `spec` with a concrete precision instead of `auto`, and the reason for it.

    The precision is the first of bf16, fp16 and fp32 in which all chips compute at least as fast as in fp32. A chip
    without known rates is assumed to do so in all three. fp16 is excluded on shared devices, which are CPU cores.
    """
    if spec.work.precision != AUTO:
        return spec, ""
    chips = [group.chip for group in groups]
    usable = _usable_precisions(chips, supports, value_rules)
    precision = usable[0] if usable else TRAINED[-1]
    names = {"precision": precision, "chips": " and ".join(dict.fromkeys(chip.name for chip in chips))}
    slow = [
        _("{precision} is {ratio} times slower than fp32", precision=name, ratio=f"{slowness(chip, name):.3g}")
        for chip in {chip.name: chip for chip in chips}.values()
        for name in TRAINED[: TRAINED.index(precision)]
        if slowness(chip, name) > 1.0
    ]
    reason = _("train.precision = {precision}: the fastest on {chips}", **names)
    return replace(spec, work=replace(spec.work, precision=precision)), "; ".join([reason, *slow])


def _usable_precisions(
    chips: Sequence[Chip], supports: Sequence[EngineSupport], value_rules: Sequence[ValueRule]
) -> list[str]:
    """Return the precisions in which all chips compute at least as fast as in fp32, and that no plugin refuses."""
    about = [rule for rule in value_rules if isinstance(rule, RefusedValues) and rule.knob == "precision"]
    refused = {value for rule in about for value in rule.values}
    refused |= {"fp16"} if any(support.shared_devices for support in supports) else set()
    return [
        name
        for name in TRAINED
        if name not in refused
        and all(not chip.dense_flops_per_second or usual_precision(chip, [name]) for chip in chips)
    ]


def _advised(task: Task, support: EngineSupport, advice: TaskAdvice) -> tuple[Task, EngineSupport]:
    """Apply the plugins' advice to the task and the support. Raises NoDevice if one reports that it cannot run."""
    if advice.impossible:
        arguments = {"engine": task.spec.work.engine, "chip": task.cluster.chips, "why": advice.impossible}
        raise NoDevice(_("{engine} does not run on {chip}: {why}", **arguments))
    spec, notes = task.spec, list[str]()
    for preferred in advice.preferred:
        if (more := _with_preferred(spec, preferred)) != spec:
            spec = more
            notes.append(f"{preferred.setting} = {preferred.value}: {_(preferred.reason)}")
    support = replace(support, notes=(*support.notes, *notes, *advice.notes))
    return replace(task, spec=_with_warmup(spec, advice.warmup)), support


def _with_preferred(spec: Spec, preferred: PreferredSetting) -> Spec:
    """Return `spec` with the setting `preferred`, unless the user sets it. In a space, its value replaces `auto`."""
    knob = preferred.setting.partition(".")[2].replace("-", "_")
    if knob not in spec.space:
        return _with_settings(spec, [preferred])
    if spec.space[knob] != AUTO:
        return spec
    return replace(spec, space={**spec.space, knob: (preferred.value,)})


def _with_warmup(spec: Spec, warmup: int) -> Spec:
    """Return `spec` with at least `warmup` unmeasured training steps, or unmeasured requests for each load."""
    if not spec.work.has_steps:
        return replace(spec, work=spec.work.with_warmup(warmup))
    more = max(warmup - spec.control.warmup_iters, 0)
    control = replace(
        spec.control, warmup_iters=spec.control.warmup_iters + more, train_iters=spec.control.train_iters + more
    )
    return replace(spec, control=control)


def _with_settings(spec: Spec, values: Iterable[ForcedSetting | PreferredSetting]) -> Spec:
    """Return `spec` with the settings of plugins that the spec does not set itself.

    They apply to servers and to the user's command, but not to flagcore's trial program.
    """
    for setting in values:
        section, _, name = setting.setting.partition(".")
        if setting.value is not None:
            spec = replace(spec, work=spec.work.with_advice(section, name, setting.value, spec.baseline or {}))
    return spec


def _of_shell(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment`, but with this shell's value of each variable that the shell also sets."""
    return {name: os.environ.get(name, value) for name, value in environment.items()}


def _conflicts(environment: Mapping[str, str], spec: Spec) -> Iterator[str]:
    for name, value in environment.items():
        for user_value, source in ((spec.envs.get(name), "envs of the spec"), (os.environ.get(name), "this shell")):
            if user_value is not None:
                if user_value != value:
                    yield f"{name}: {user_value} from {source} overrides {value.strip('{}')} from a plugin"
                break


def with_plugin_knobs(platform: Platform) -> Platform:
    """Return `platform` with the task's knobs whose values have an `Effect`.

    These are the plugins' knobs and the compared engine settings that the spec names. A plugin's knob is left out if
    the engine has a knob with the same name. Raises SpecError for an unknown knob or an invalid value.
    """
    task, spec, engine = platform.task, platform.task.spec, platform.engine
    engine_names = {name for knob in engine.knobs if knob.choosable for name in knob.names}
    plugin_knobs = tuple(knob for knob in platform.knobs if knob.name not in engine_names)
    named = {*(spec.baseline or {}), *spec.space}
    settings = [_compared_setting(task, knob) for knob in engine.knobs if knob.comparable and knob.name in named]
    chosen = (*settings, *(knob for knob in plugin_knobs if knob.name in named))
    unknown = named - engine_names - {knob.name for knob in chosen}
    if unknown and not spec.work.takes_any_flag:
        raise _unknown_knob(task, next(iter(unknown)), plugin_knobs)
    for knob in chosen:
        _check_knob(spec, knob)
    searched = environment_of([effect for knob in chosen for effect in knob.effects.values()])
    environment = {name: value for name, value in platform.environment.items() if name not in searched}
    return replace(platform, task=replace(task, knobs=chosen), knobs=plugin_knobs, environment=environment)


def _unknown_knob(task: Task, name: str, plugin_knobs: Sequence[Knob]) -> SpecError:
    """Return the error of a name in the space or the baseline that neither the engine nor a plugin knows."""
    spec = task.spec
    section, values = ("space", spec.space) if name in spec.space else ("baseline", spec.baseline or {})
    problem = f"is not a knob of {spec.work.engine} on {task.cluster.chips}"
    fix = f"knobs of plugins on these chips: {', '.join(knob.name for knob in plugin_knobs) or 'none'}"
    return SpecError(key=f"auto_tuner.{section}.{name}", value=values[name], problem=problem, fix=fix)


def _compared_setting(task: Task, knob: Knob) -> Knob:
    """Return the knob of an engine setting with the values that the spec compares.

    Raises SpecError if the value is `auto` and the knob does not define it.
    """
    listed, baseline = task.spec.space.get(knob.name, ()), task.spec.baseline or {}
    if isinstance(listed, str) and knob.auto is None:
        problem, fix = "cannot be auto", "list the values to compare"
        raise SpecError(key=f"auto_tuner.space.{knob.name}", value=listed, problem=problem, fix=fix)
    values = knob.auto(task) if isinstance(listed, str) and knob.auto else listed
    baseline_values = (baseline[knob.name],) if knob.name in baseline else ()
    return knob.with_compared_values([*values, *baseline_values])


def _check_knob(spec: Spec, knob: Knob) -> None:
    """Raise SpecError if a value of a plugin's knob is invalid, or if the spec also sets what the knob changes."""
    listed, baseline = spec.space.get(knob.name, ()), spec.baseline or {}
    for value in () if isinstance(listed, str) else listed:
        knob.parse(value, f"auto_tuner.space.{knob.name}")
    if knob.name in baseline:
        knob.parse(baseline[knob.name], f"auto_tuner.baseline.{knob.name}")
    for effect in knob.effects.values():
        _check_effect(spec, knob.name, effect)


def _check_effect(spec: Spec, knob: str, effect: Effect) -> None:
    """Raise SpecError if the spec also sets what an effect of the knob changes: a setting, a variable or a flag."""
    kind, variables = spec.work.kind, {name: each[name] for each in spec.variables for name in each}
    for section, values, names in (
        (f"{kind}.settings", spec.work.settings, effect.settings),
        ("envs", variables, effect.environment),
    ):
        if duplicates := [name for name in names if name in values]:
            key, problem = f"{section}.{duplicates[0]}", f"is also set by auto_tuner.space.{knob}"
            raise SpecError(key=key, value=values[duplicates[0]], problem=problem, fix="remove one of the two")
    if duplicates := [flag for flag in effect.flags if flag.startswith("--") and flag in (spec.work.command or ())]:
        problem = f"has {duplicates[0]}, which auto_tuner.space.{knob} adds or leaves out"
        raise SpecError(key=f"{kind}.command", problem=problem, fix="remove one of the two")


def engine_version(spec: Spec, engine: Engine) -> str | None:
    """Return the engine release that trials of `spec` run: the one in the spec, or else the installed one.

    Returns None if the engine is not installed, or if trials run the user's command and the spec names no release.
    """
    work = spec.work
    if work.engine_version or work.command is not None:
        return work.engine_version
    packages = (re.split(r"[^\w.-]", each.strip())[0] for each in engine.modules.values())
    own = (name for name in packages if engine.name in name.replace("-", ""))
    for name in (engine.distribution,) if engine.distribution else own:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def _runs_here(platform: Platform, plugins: LoadedPlugins) -> bool:
    """Return whether trials of `platform` can run on this machine."""
    try:
        platform.engine.ready(platform.task.spec)
        require_devices(platform, plugins.devices(platform.task.spec.envs))
    except FlagError:
        return False
    return True
