"""Knobs that the plugin brings to an engine."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.domain.chip import Chip
from flagcore.domain.plugin_knob import Factor, PluginKnob
from flagcore.plugins import workload
from flagcore.testing.examples import task_on
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject
from flagcore.vendorkit.knobs import all_knobs


def knobs_are_answered_as_their_hook_promises(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_knobs")
    for chip in plugin.chips:
        for engine in plugin.engines:
            plugin.loaded.knobs(chip, engine)
    yield from plugin.told("flagcore_knobs")


def a_knob_says_what_it_is(plugin: Subject) -> Iterator[Problem]:
    for _, engine, knob in _knobs(plugin):
        if not knob.message.strip():
            yield Problem(
                message=f"flagcore_knobs: {knob.name} of {engine} says nothing",
                fix="give says: a sentence that `flag explain` prints",
            )


def a_knob_is_none_that_the_engine_has_everywhere(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, knob in _knobs(plugin):
        own = {axis.knob for axis in workload(engine).axes(task_on(chip))} if engine == "megatron" else set()
        if knob.name in own:
            yield Problem(
                message=f"flagcore_knobs: {knob.name} is a knob of {engine} on all chips",
                fix="give it another name, such as one that begins with the vendor's",
            )


def a_knob_with_a_gain_says_how_sure_it_is(plugin: Subject) -> Iterator[Problem]:
    for _, engine, knob in _knobs(plugin):
        for choice in knob.choices:
            for what, factor in (("time", choice.time), ("memory", choice.memory)):
                if factor.value != 1.0 and factor.low == factor.high:
                    yield Problem(
                        message=f"flagcore_knobs: {knob.name} of {engine} scales {what} by {factor.value:g} for sure",
                        fix="give low and high, the ends of an 80% interval: what others published is a guess here",
                    )


def the_effect_of_a_knob_is_estimated_or_has_a_source(plugin: Subject) -> Iterator[Problem]:
    for _, engine, knob in _knobs(plugin):
        factors = [factor for choice in knob.choices for factor in (choice.time, choice.memory)]
        if knob.effect is None and knob.source.kind != "estimated" and any(each != Factor() for each in factors):
            yield Problem(
                message=f"flagcore_knobs: {knob.name} of {engine} does not say where its factors are from",
                fix="give effect: {kind: estimated, method: WHY}, or the source that published these very figures",
            )


def knobs_are_for_known_engines_and_chips(plugin: Subject) -> Iterator[Problem]:
    plugin.shipped("knobs.yaml")
    chips = {chip.name for chip in plugin.chips}
    for each in all_knobs(plugin.package):
        for word in (*({each.engine} - set(plugin.engines)), *sorted(set(each.chips) - chips)):
            yield Problem(
                message=f"knobs.yaml: {each.knob.name} is of {word!r}",
                fix=f"engines are {', '.join(plugin.engines)}; chips are those of chips/*.yaml",
            )


def _knobs(plugin: Subject) -> list[tuple[Chip, str, PluginKnob]]:
    plugin.implements("flagcore_knobs")
    pairs = [(chip, engine) for chip in plugin.own_chips() for engine in plugin.engines]
    found = [(chip, engine, knob) for chip, engine in pairs for knob in plugin.loaded.knobs(chip, engine)]
    if not found:
        raise Skip("the plugin brings no knob to an engine")
    return found
