"""Knobs that the plugin adds to an engine."""

from __future__ import annotations

from flagcore.domain.chip import Chip
from flagcore.domain.knob import Factor, Knob
from flagcore.plugins import workload
from flagcore.testing.examples import task_on
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Skip, Subject
from flagcore.vendorkit.knobs import all_knobs


def _knobs(plugin: Subject) -> list[tuple[Chip, str, Knob]]:
    plugin.implements("flagcore_knobs")
    found = [(*pair, knob) for pair in plugin.pairs() for knob in plugin.loaded.knobs(*pair)]
    if not found:
        raise Skip("the plugin adds no knobs")
    return found


@check("add a sentence for `flag explain`", each=_knobs)
def knobs_have_help(chip: Chip, engine: str, knob: Knob) -> Problems:
    if not knob.help.strip():
        yield f"flagcore_knobs: {knob.name} of {engine} has no help"


@check("rename it, for example with the vendor as prefix", each=_knobs)
def knob_names_differ_from_engine_knobs(chip: Chip, engine: str, knob: Knob) -> Problems:
    if engine == "megatron" and knob.name in {axis.knob for axis in workload(engine).axes(task_on(chip))}:
        yield f"flagcore_knobs: {knob.name} is already a knob of {engine}"


@check("give low and high, the ends of an 80% interval", each=_knobs)
def knob_effects_have_intervals(chip: Chip, engine: str, knob: Knob) -> Problems:
    for effect in knob.effects.values():
        for what, factor in (("time", effect.time), ("memory", effect.memory)):
            if factor.value != 1.0 and factor.low == factor.high:
                yield f"flagcore_knobs: {knob.name} of {engine} scales {what} without an interval"


@check("add effect: {kind: estimated, method: WHY}, or the source of these figures", each=_knobs)
def knob_effects_have_sources(chip: Chip, engine: str, knob: Knob) -> Problems:
    factors = [factor for effect in knob.effects.values() for factor in (effect.time, effect.memory)]
    estimated = knob.source is not None and knob.source.kind == "estimated"
    if knob.effect_source is None and not estimated and any(each != Factor() for each in factors):
        yield f"flagcore_knobs: {knob.name} of {engine} has factors without a source"


@check()
def knobs_name_known_engines_and_chips(plugin: Subject) -> Problems:
    for each in plugin.shipped("knobs.yaml", all_knobs):
        yield from plugin.unknown(f"knobs.yaml: {each.knob.name}", each.scope)
