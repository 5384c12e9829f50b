"""Warnings about settings and knobs that have no effect in combination with others, or that were filled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import AUTO, SettingValue, Spec, Task
from flagcore.engines.megatron.command.checks import command_warnings
from flagcore.engines.megatron.stages import EMBEDDING, LAYOUT, LOSS

SELECTIVE = ("recompute_modules", "moe_recompute_level")
"""Settings that only selective recompute looks at."""

RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""The knobs of how to recompute."""

LONGEST = 80
"""Characters of a value in a warning."""


def spec_warnings(spec: Spec) -> list[str]:
    """Return a line for each setting that has no effect on any candidate of the space, and those of a command."""
    return [*_useless_settings(spec), *command_warnings(spec)]


def _useless_settings(spec: Spec) -> list[str]:
    kinds, switch = (spec.space.get(knob, AUTO) for knob in ("recompute_granularity", "use_recompute"))
    if (kinds == AUTO or "selective" in kinds) and (switch == AUTO or True in switch):
        return []
    settings = {f"train.settings.{key}": spec.train.settings[key] for key in SELECTIVE if key in spec.train.settings}
    fix = "add selective to auto_tuner.space.recompute_granularity and true to use_recompute"
    return [_without_selective(key, value, "no candidate has", fix) for key, value in settings.items()]


def job_warnings(
    task: Task, values: Mapping[str, KnobValue], settings: Mapping[str, SettingValue], noted: Collection[str]
) -> list[str]:
    """Return a line for each key of a job record that has no effect, and one for a split that was filled in."""
    lines, off = [], values.get("use_recompute") is False
    if values.get("recompute_granularity") != "selective" or off:
        fix = "add recompute_granularity: selective"
        given = {key: settings[key] for key in SELECTIVE if key in settings}
        lines += [_without_selective(key, value, "its candidate does not have", fix) for key, value in given.items()]
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        lines.append("sequence_parallel = True does nothing: tensor_model_parallel_size is 1")
    unused = {key: values[key] for key in RECOMPUTE if values.get(key) is not None} if off else {}
    lines += [f"{key} = {value!r} does nothing: use_recompute is False" for key, value in unused.items()]
    used = {key: str(task.spec.train.settings.get(key) or "") for key in (LAYOUT, EMBEDDING, LOSS)}
    filled = [
        f"{key} = {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'}"
        for key, text in used.items()
        if text and key not in {*settings, *noted}
    ]
    if filled:
        lines.append(
            "the layers do not divide over the (virtual) pipeline stages: predicted as published runs split them, with "
            f"{' and '.join(filled)}; give that or another split"
        )
    return lines


def _without_selective(key: str, value: SettingValue, who: str, fix: str) -> str:
    return f"{key} = {value!r} does nothing: {who} recompute_granularity: selective; {fix}, or remove this key"
