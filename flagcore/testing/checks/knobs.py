"""Knobs that the plugin adds to an engine."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.domain.chip import Chip
from flagcore.domain.knob import Factor, Knob
from flagcore.plugins import workload
from flagcore.testing.examples import task_on
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject
from flagcore.vendorkit.knobs import all_knobs


def knobs_are_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_knobs")
    for chip in plugin.chips:
        for engine in plugin.engines:
            plugin.loaded.knobs(chip, engine)
    yield from plugin.problems_of("flagcore_knobs")


def knobs_have_help(plugin: Subject) -> Iterator[Problem]:
    for _, engine, knob in _knobs(plugin):
        if not knob.help.strip():
            yield Problem(f"flagcore_knobs: {knob.name} of {engine} has no help", "add a sentence for `flag explain`")


def knob_names_differ_from_engine_knobs(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, knob in _knobs(plugin):
        own = {axis.knob for axis in workload(engine).axes(task_on(chip))} if engine == "megatron" else set()
        if knob.name in own:
            yield Problem(
                f"flagcore_knobs: {knob.name} is already a knob of {engine}",
                "rename it, for example with the vendor as prefix",
            )


def knob_effects_have_intervals(plugin: Subject) -> Iterator[Problem]:
    for _, engine, knob in _knobs(plugin):
        for effect in knob.effects.values():
            for what, factor in (("time", effect.time), ("memory", effect.memory)):
                if factor.value != 1.0 and factor.low == factor.high:
                    yield Problem(
                        f"flagcore_knobs: {knob.name} of {engine} scales {what} without an interval",
                        "give low and high, the ends of an 80% interval",
                    )


def knob_effects_have_sources(plugin: Subject) -> Iterator[Problem]:
    for _, engine, knob in _knobs(plugin):
        factors = [factor for effect in knob.effects.values() for factor in (effect.time, effect.memory)]
        estimated = knob.source is not None and knob.source.kind == "estimated"
        if knob.effect_source is None and not estimated and any(each != Factor() for each in factors):
            yield Problem(
                f"flagcore_knobs: {knob.name} of {engine} has factors without a source",
                "add effect: {kind: estimated, method: WHY}, or the source of these figures",
            )


def knobs_name_known_engines_and_chips(plugin: Subject) -> Iterator[Problem]:
    plugin.shipped("knobs.yaml")
    chips = {chip.name for chip in plugin.chips}
    for each in all_knobs(plugin.package):
        for word in (*({each.engine} - set(plugin.engines)), *sorted(set(each.chips) - chips)):
            yield Problem(
                f"knobs.yaml: {each.knob.name} is for {word!r}, which is unknown",
                f"engines are {', '.join(plugin.engines)}; chips are those of chips/*.yaml",
            )


def _knobs(plugin: Subject) -> list[tuple[Chip, str, Knob]]:
    plugin.implements("flagcore_knobs")
    pairs = [(chip, engine) for chip in plugin.own_chips() for engine in plugin.engines]
    found = [(chip, engine, knob) for chip, engine in pairs for knob in plugin.loaded.knobs(chip, engine)]
    if not found:
        raise Skip("the plugin adds no knobs")
    return found
