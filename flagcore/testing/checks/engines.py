"""Engines: whether and how they run, and which values do not work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError

from flagcore.domain.chip import Chip, Support
from flagcore.domain.engine import EngineSupport
from flagcore.engines.serving.vllm import knobs
from flagcore.errors import SpecError
from flagcore.plugins import workload
from flagcore.spec.knobs import settings_of, settings_section
from flagcore.spec.limits import PRECISIONS
from flagcore.stages.legality import JOB_KEYS, SHARED
from flagcore.testing.examples import task_on
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject


def engine_support_is_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_engine_support")
    for chip in plugin.chips:
        for engine in plugin.engines:
            plugin.loaded.engine_support(chip, engine)
    yield from plugin.problems_of("flagcore_engine_support")


def supported_engines_have_device_and_backend(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        if answer.support is not Support.IMPOSSIBLE and not (answer.device_type and answer.distributed_backend):
            yield Problem(
                f"flagcore_engine_support: {engine} on {chip.name} lacks device_type or distributed_backend",
                "give torch's names: without both, nothing can run",
            )


def untested_engines_have_a_reason(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        if answer.support is not Support.YES and not answer.reason.strip():
            yield Problem(
                f"flagcore_engine_support: {engine} on {chip.name} is {answer.support.value!r} without a reason",
                "give a reason for `flag doctor` and `flag explain`",
            )


def refused_values_have_reasons(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        for refused in answer.refused:
            limits = refused.values or refused.above is not None
            if not (refused.name.isidentifier() and refused.reason.strip() and limits):
                yield Problem(
                    f"flagcore_engine_support: {engine} on {chip.name}: {refused.name!r} is incomplete",
                    "give a name of letters and underscores, the values, and a reason for `flag explain`",
                )


def refused_values_exist(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        for refused in answer.refused:
            if not _is_known(chip, engine, refused.knob, refused.values):
                yield Problem(
                    f"flagcore_engine_support: {engine} has no knob {refused.knob!r} with {refused.values}",
                    f"name a knob of {engine} and valid values (docs/spec.md, docs/spec-serve.md)",
                )


def refused_values_leave_candidates(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        if engine != "megatron":
            continue
        for axis in workload(engine).axes(task_on(chip)):
            gone = {value for refused in answer.refused if refused.knob == axis.knob for value in refused.values}
            if set(axis.values) <= gone:
                yield Problem(
                    f"flagcore_engine_support: every value of {axis.knob} is refused on {chip.name}",
                    "if the engine cannot run at all, return Support.IMPOSSIBLE with a reason",
                )


def forced_settings_have_reasons(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        for forced in answer.forced:
            if not (forced.name.isidentifier() and forced.reason.strip() and forced.setting.startswith(SHARED)):
                yield Problem(
                    f"flagcore_engine_support: {engine}, {chip.name} {forced.name!r} forces {forced.setting!r}",
                    f"give a name, a reason, and a setting that begins with {' or '.join(SHARED)}",
                )


def forced_settings_are_valid(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        for forced in answer.forced:
            if forced.setting.startswith(SHARED) and not _is_setting(forced.setting, forced.value):
                yield Problem(
                    f"flagcore_engine_support: {engine}, {chip.name}: {forced.name} forces {forced.setting} = "
                    f"{forced.value!r}, which is not a valid setting",
                    "name a key of train.settings and a valid value (docs/spec.md)",
                )


def visible_devices_is_a_variable_name(plugin: Subject) -> Iterator[Problem]:
    for chip, engine, answer in _supports(plugin):
        if answer.visible_devices is not None and not re.fullmatch(r"[A-Za-z_]\w*", answer.visible_devices):
            yield Problem(
                f"flagcore_engine_support: {engine} on {chip.name}: visible_devices = {answer.visible_devices!r}",
                "give the name of the environment variable, such as ACME_VISIBLE_DEVICES",
            )


def _supports(plugin: Subject) -> list[tuple[Chip, str, EngineSupport]]:
    plugin.implements("flagcore_engine_support")
    pairs = [(chip, engine) for chip in plugin.own_chips() for engine in plugin.engines]
    found = [(chip, engine, plugin.loaded.engine_support(chip, engine)) for chip, engine in pairs]
    known = [each for each in found if not each[2].reason.startswith("no plugin says how")]
    if not known:
        raise Skip("the plugin supports no engine")
    return known


def _is_known(chip: Chip, engine: str, knob: str, values: tuple[object, ...]) -> bool:
    if knob.startswith(SHARED):
        return all(_is_setting(knob, value) for value in values)
    if knob == "precision":
        return set(values) <= set(PRECISIONS)
    if knob in JOB_KEYS:
        return True
    if engine == "vllm":
        known = knobs.BY_NAME.get(knob)
        return known is not None and (not known.words or set(values) <= set(known.words))
    if engine != "megatron":
        return True
    axis = next((axis for axis in workload(engine).axes(task_on(chip)) if axis.knob == knob), None)
    return axis is not None and {value for value in values if isinstance(value, str)} <= set(axis.words)


def _is_setting(key: str, value: object) -> bool:
    """Return whether a task can have this value of `settings.NAME`; arguments of servers are their engine's."""
    where, _, name = key.partition(".")
    if where != "settings":
        return True
    with suppress(SpecError, ValidationError):
        rows = workload("megatron").knobs
        return name in settings_of(settings_section(rows).model_validate({name: value}), rows)
    return False
