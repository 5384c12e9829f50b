"""Warnings about settings and knobs that have no effect, or that were completed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from packaging.version import Version

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import unknown_release
from flagcore.domain.spec import AUTO, SettingValue, Spec, Task
from flagcore.engines.megatron.command.arguments import known_releases
from flagcore.engines.megatron.command.checks import command_warnings
from flagcore.engines.megatron.stages import EMBEDDING, LAYOUT, LOSS

SELECTIVE_SETTINGS = ("recompute_modules", "moe_recompute_level")
"""Settings that only selective recompute uses."""

RECOMPUTE_KNOBS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""Knobs that only apply with `use_recompute`."""

MAX_VALUE_LENGTH = 80
"""Maximum number of characters of a value in a warning."""


def spec_warnings(spec: Spec) -> list[str]:
    """Return a line for each setting that has no effect on any candidate, one for an unknown release, and the warnings
    about a user's command.
    """
    known = [Version(each) for each in known_releases()]
    releases = f">={known[0].major}.{known[0].minor},<{known[-1].major}.{known[-1].minor + 1}"
    unknown = unknown_release("train.engine_version", spec.train.engine, spec.train.engine_version, releases)
    return [*_unused_settings(spec), *unknown, *command_warnings(spec)]


def _unused_settings(spec: Spec) -> list[str]:
    kinds, switch = (spec.space.get(knob, AUTO) for knob in ("recompute_granularity", "use_recompute"))
    if (kinds == AUTO or "selective" in kinds) and (switch == AUTO or True in switch):
        return []
    settings, fix = (
        spec.train.settings,
        "add selective to auto_tuner.space.recompute_granularity and true to use_recompute",
    )
    keys = [key for key in SELECTIVE_SETTINGS if key in settings]
    return [_without_selective(f"train.settings.{key}", settings[key], "no candidate has", fix) for key in keys]


def job_warnings(
    task: Task, values: Mapping[str, KnobValue], settings: Mapping[str, SettingValue], noted: Collection[str]
) -> list[str]:
    """Return a line for each key of a job record that has no effect, and one for a split that was completed."""
    lines, recompute_is_off = [], values.get("use_recompute") is False
    if values.get("recompute_granularity") != "selective" or recompute_is_off:
        fix = "add recompute_granularity: selective"
        unused = [key for key in SELECTIVE_SETTINGS if key in settings]
        lines += [_without_selective(key, settings[key], "its candidate does not have", fix) for key in unused]
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        lines.append("sequence_parallel = True does nothing: tensor_model_parallel_size is 1")
    unused = [key for key in RECOMPUTE_KNOBS if values.get(key) is not None] if recompute_is_off else []
    lines += [f"{key} = {values[key]!r} does nothing: use_recompute is False" for key in unused]
    split_settings = {key: str(task.spec.train.settings.get(key) or "") for key in (LAYOUT, EMBEDDING, LOSS)}
    completed_settings = [
        f"{key} = {text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + '...'}"
        for key, text in split_settings.items()
        if text and key not in {*settings, *noted}
    ]
    if completed_settings:
        lines.append(
            "the layers do not divide over the (virtual) pipeline stages: predicted as published runs split them, with "
            f"{' and '.join(completed_settings)}; give that or another split"
        )
    return lines


def _without_selective(key: str, value: SettingValue, subject: str, fix: str) -> str:
    return f"{key} = {value!r} does nothing: {subject} recompute_granularity: selective; {fix}, or remove this key"
