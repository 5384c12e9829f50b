"""Settings that are legal and do nothing beside the others: told, since a user meant something by them."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import AUTO, SettingValue

Space = Mapping[str, str | tuple[KnobValue, ...]]

SELECTIVE = ("recompute_modules", "moe_recompute_level")
"""Settings that only selective recompute looks at."""


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
    """Return a line for each of a job record's settings that does nothing beside its knobs."""
    if candidate.get("recompute_granularity") == "selective" and candidate.get("use_recompute") is not False:
        return []
    fix = "add recompute_granularity: selective"
    return [_line(key, settings[key], "its candidate does not have", fix) for key in SELECTIVE if key in settings]


def _line(key: str, value: SettingValue, who: str, fix: str) -> str:
    return f"{key} = {value!r} does nothing: {who} recompute_granularity: selective; {fix}, or remove this key"
