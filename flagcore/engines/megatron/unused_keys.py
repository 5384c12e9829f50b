"""Settings and knobs that are legal and have no effect beside the others, and settings that were filled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import AUTO, SettingValue

SELECTIVE = ("recompute_modules", "moe_recompute_level")
"""Settings that only selective recompute looks at."""

RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""The knobs of how to recompute."""

SPLIT = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Settings that split layers which do not divide."""


def unused_in_space(
    settings: Mapping[str, SettingValue], space: Mapping[str, str | tuple[KnobValue, ...]]
) -> list[str]:
    """Return a line for each of a spec's settings that does nothing for any candidate of its space."""
    kinds, switch = space.get("recompute_granularity", AUTO), space.get("use_recompute", AUTO)
    if (kinds == AUTO or "selective" in kinds) and (switch == AUTO or True in switch):
        return []
    fix = "add selective to auto_tuner.space.recompute_granularity and true to use_recompute"
    return [
        _line(f"train.settings.{key}", settings[key], "no candidate has", fix) for key in SELECTIVE if key in settings
    ]


def unused_in_job(settings: Mapping[str, SettingValue], candidate: Mapping[str, KnobValue]) -> list[str]:
    """Return a line for each of a job record's settings and knobs that does nothing beside its other knobs."""
    return [*_settings_of_job(settings, candidate), *_knobs_of_job(candidate)]


def assumed_in_job(given: Collection[str], used: Mapping[str, SettingValue]) -> list[str]:
    """Return a line if a job record's layers do not divide and no setting given says how they are split."""
    filled = [f"{key} = {_head(str(used[key]))}" for key in SPLIT if key not in given and used.get(key)]
    if not filled:
        return []
    return [
        "the layers do not divide over the (virtual) pipeline stages: predicted as published runs split them, with "
        f"{' and '.join(filled)}; give that or another split"
    ]


def _head(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _knobs_of_job(candidate: Mapping[str, KnobValue]) -> list[str]:
    lines = []
    if candidate.get("sequence_parallel") and candidate.get("tensor_model_parallel_size", 1) == 1:
        lines.append("sequence_parallel = True does nothing: tensor_model_parallel_size is 1")
    if candidate.get("use_recompute") is False:
        lines += [
            f"{key} = {candidate[key]!r} does nothing: use_recompute is False"
            for key in RECOMPUTE
            if candidate.get(key) is not None
        ]
    return lines


def _settings_of_job(settings: Mapping[str, SettingValue], candidate: Mapping[str, KnobValue]) -> list[str]:
    if candidate.get("recompute_granularity") == "selective" and candidate.get("use_recompute") is not False:
        return []
    fix = "add recompute_granularity: selective"
    return [_line(key, settings[key], "its candidate does not have", fix) for key in SELECTIVE if key in settings]


def _line(key: str, value: SettingValue, who: str, fix: str) -> str:
    return f"{key} = {value!r} does nothing: {who} recompute_granularity: selective; {fix}, or remove this key"
