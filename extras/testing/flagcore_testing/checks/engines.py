"""Checks of what the plugin states about engines: support, rejected values, and knobs."""

import re
from contextlib import suppress

from flagcore.domain.chip import Chip, Support
from flagcore.domain.engine import JOB_KEYS, SHARED_PREFIXES, EngineSupport, ForcedSetting, RefusedValues, ValueRule
from flagcore.domain.knob import WHOLE_STEP, Factor, Knob
from flagcore.domain.prediction import PART_NAMES
from flagcore.domain.spec import PRECISIONS
from flagcore.errors import SpecError
from flagcore.plugins import find_engine, kind_of
from flagcore_testing.examples import task_on
from flagcore_testing.kit import Problem, Problems, Subject, check, need, once

IMPLEMENTATIONS = ("local", "transformer_engine")
"""Implementations of the layers that a spec may name."""
MOST = 5.0
"""Maximum factor of a knob on time or memory."""
PREFIXES = ", ".join(SHARED_PREFIXES)
Supported = tuple[str, Chip, str, EngineSupport]


def _supports(plugin: Subject) -> list[Supported]:
    """Return, for each chip and engine: the prefix of messages, the chip, the engine and the answer."""
    plugin.implements("flagcore_engine_support")
    supports = [(chip, engine, plugin.loaded.engine_support(chip, engine)) for chip, engine in plugin.pairs()]
    answers = [
        (f"flagcore_engine_support: {engine} on {chip.name}", chip, engine, answer)
        for chip, engine, answer in supports
        if not answer.reason.startswith("no plugin supports")
    ]
    return need(answers, "the plugin supports no engine")


@check(each=_supports)
def engine_support_is_complete(where: str, chip: Chip, engine: str, answer: EngineSupport) -> Problems:
    if answer.support is not Support.IMPOSSIBLE and not (answer.device_type and answer.distributed_backend):
        yield Problem(f"{where} lacks device_type or distributed_backend", "give torch's names: both are needed to run")
    if answer.support is not Support.YES and not answer.reason.strip():
        text = f"{where} is {answer.support.value!r} without a reason"
        yield Problem(text, "give a reason for `flag doctor` and `flag explain`")
    if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in answer.visible_devices):
        text = f"{where}: visible_devices = {answer.visible_devices!r}"
        yield Problem(text, "give the names of environment variables, such as ACME_VISIBLE_DEVICES")
    if answer.stack and kind_of(engine) == "train" and answer.stack.implementation not in IMPLEMENTATIONS:
        text = f"{where}: stack.implementation = {answer.stack.implementation!r}"
        yield Problem(text, f"use one of {', '.join(IMPLEMENTATIONS)}")
    for name, value in answer.stack.settings.items() if answer.stack else ():
        words = answer.stack.source.detail.replace("-", "_") if answer.stack else ""
        if value is True and "overlap" in name and name not in words:
            text = f"{where}: stack.settings has {name}: true, which its source does not name"
            yield Problem(text, "name the flag with the script that sets it, or write false")
        if not _is_known(engine, f"settings.{name}", () if value is None else (value,)):
            text = f"{where}: stack.settings has {name}: {value!r}"
            yield Problem(text, "name a setting of the engine and a valid value (docs/spec.md)")


@once
def _rules(plugin: Subject) -> list[tuple[str, Chip, str, ValueRule]]:
    """Return, for each rule about values: the prefix of messages, the chip, the engine and the rule."""
    plugin.implements("flagcore_check_task")
    rules = [
        (f"flagcore_check_task: {engine} on {chip.name}", chip, engine, rule)
        for chip, engine in plugin.pairs()
        for rule in plugin.loaded.check_task(task_on(chip, engine)).rules
    ]
    return need(rules, "the plugin has no rules about values")


@check("give a name of letters and underscores, a reason for `flag explain`, and what the rule is about", each=_rules)
def rules_of_engines_are_complete(where: str, chip: Chip, engine: str, rule: ValueRule) -> Problems:
    is_named = rule.name.isidentifier() and bool(rule.reason.strip())
    if isinstance(rule, ForcedSetting):
        if not (is_named and rule.setting.startswith(SHARED_PREFIXES)):
            yield f"{where}: {rule.name!r} forces {rule.setting!r}, which begins with none of {PREFIXES}"
    elif not (is_named and (rule.values or rule.above is not None)):
        yield f"{where}: {rule.name!r} is incomplete"


@check("name a knob or a setting of the engine and valid values (docs/spec.md, docs/spec-serve.md)", each=_rules)
def rules_of_engines_name_known_values(where: str, chip: Chip, engine: str, rule: ValueRule) -> Problems:
    if isinstance(rule, ForcedSetting):
        if rule.setting.startswith(SHARED_PREFIXES) and not _is_known(engine, rule.setting, (rule.value,)):
            yield f"{where}: {rule.name} forces {rule.setting} = {rule.value!r}, which is not a valid setting"
    elif not _is_known(engine, rule.knob, rule.values):
        yield f"{where}: unknown knob {rule.knob!r} with {rule.values}"


@check("if the engine cannot run at all, return Support.IMPOSSIBLE with a reason")
def refused_values_leave_candidates(plugin: Subject) -> Problems:
    engine = "megatron"
    for where, chip in {where: chip for where, chip, name, _ in _rules(plugin) if name == engine}.items():
        rules = plugin.loaded.check_task(task_on(chip, engine)).rules
        refusals = [rule for rule in rules if isinstance(rule, RefusedValues)]
        for axis in find_engine(engine).axes(task_on(chip, engine)):
            refused_values = {value for rule in refusals if rule.knob == axis.knob for value in rule.values}
            if set(axis.values) <= refused_values:
                yield f"{where}: every value of {axis.knob} is refused"


@check("advise on what this task lacks: names, reasons and known settings; a small task on one node can run")
def advice_on_tasks_is_complete(plugin: Subject) -> Problems:
    plugin.implements("flagcore_check_task")
    for task in plugin.tasks():
        location = f"flagcore_check_task: a small task on one node of {task.cluster.chips}"
        advice = plugin.loaded.check_task(task)
        if advice.impossible:
            yield f"{location} cannot run: {advice.impossible}; if nothing can, flagcore_engine_support says so"
        for preferred in advice.preferred:
            if preferred.setting.startswith("engine_args.") and "_" in preferred.setting[12:]:
                text = f"{location}: {preferred.setting} is not the name of a flag"
                yield Problem(
                    text, f"write it with dashes: {preferred.setting[:12]}{preferred.setting[12:].replace('_', '-')}"
                )
            if not (preferred.reason.strip() and preferred.setting.startswith(SHARED_PREFIXES)):
                yield f"{location}: {preferred.setting!r} lacks a reason, or begins with none of {PREFIXES}"
        if not all(note.strip() for note in advice.notes):
            yield f"{location}: a note is empty"


def _is_known(engine: str, key: str, values: tuple[object, ...]) -> bool:
    """Return whether `values` are valid for `key`: a knob, a key of the job or a setting of an engine.

    Nothing is known of an engine without such keys, such as one whose knobs each spec names: all values are valid.
    """
    where, _, name = key.rpartition(".")
    if key == "precision":
        return set(values) <= set(PRECISIONS)
    if key in JOB_KEYS or where == "engine_args":
        return True
    scope = "setting" if where == "settings" else "space"
    knobs = {name: knob for knob in find_engine(engine).knobs if scope in knob.scope for name in knob.names}
    with suppress(SpecError, KeyError):
        for value in values:
            knobs[name].parse(value, key)
        return name in knobs or not knobs
    return not knobs


def _knobs(plugin: Subject) -> list[tuple[Chip, str, Knob]]:
    plugin.implements("flagcore_knobs")
    knobs = [(*pair, knob) for pair in plugin.pairs() for knob in plugin.loaded.knobs(*pair)]
    return need(knobs, "the plugin adds no knobs")


@check(each=_knobs)
def knobs_are_complete(chip: Chip, engine: str, knob: Knob) -> Problems:
    name, factors = f"flagcore_knobs: {knob.name}", [each for e in knob.effects.values() for each in (e.time, e.memory)]
    if not knob.help.strip():
        yield Problem(f"{name} of {engine} has no help", "add a sentence for `flag explain`")
    if engine == "megatron" and knob.name in {axis.knob for axis in find_engine(engine).axes(task_on(chip))}:
        yield Problem(f"{name} is already a knob of {engine}", "rename it, for example with the vendor as prefix")
    if any(factor.value != 1.0 and factor.low == factor.high for factor in factors):
        text = f"{name} of {engine} scales the time or the memory without an interval"
        yield Problem(text, "give low and high, the ends of an 80% interval")
    is_estimated = knob.source is not None and knob.source.kind == "estimated"
    for effect in knob.effects.values():
        if effect.flags and not effect.flags[0].startswith("-"):
            yield Problem(f"{name} of {engine} has the flag {effect.flags[0]!r}", "write it with its dashes")
        if blank := next((flag for flag in effect.flags if re.search(r"^-.*\s", flag)), ""):
            text = f"{name} of {engine} has the flag {blank!r}, which is passed as one argument"
            yield Problem(text, "write the flag and its value as two entries of the list")
        if kind_of(engine) == "train" and {*effect.part.split()} - {WHOLE_STEP, *PART_NAMES}:
            parts = ", ".join((WHOLE_STEP, *PART_NAMES))
            yield Problem(f"{name} of {engine} scales the unknown part {effect.part!r}", f"the parts are {parts}")
    if wide := [factor.value for factor in factors if not 1 / MOST <= factor.value <= MOST]:
        yield Problem(f"{name} of {engine} has the factor {wide[0]:g}", "give a ratio: 8% less time are 0.92")
    if knob.effect_source is None and not is_estimated and any(each != Factor() for each in factors):
        text = f"{name} of {engine} has factors without a source"
        yield Problem(text, "add effect: {kind: estimated, method: WHY}, or the source of these figures")
