"""Checks that a release of Megatron-LM supports the knobs and settings that a spec sets."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import Knob, in_versions
from flagcore.domain.spec import SettingValue, Spec
from flagcore.engines.megatron.command.arguments import known_releases, release_table
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.errors import SpecError, SpecErrors


def check_release(spec: Spec) -> None:
    """Raise SpecErrors with each value of a knob or setting that `train.engine_version` does not support."""
    if problems := release_problems(spec, spec.train.engine_version):
        raise SpecErrors(problems)


def release_problems(spec: Spec, release: str | None) -> list[SpecError]:
    """Return an error for each value of a knob or setting that `release` does not support; none without a release."""
    if release is None:
        return []
    return [
        SpecError(key=key, value=value, problem=found[0], fix=found[1])
        for key, value in _set_values(spec)
        if (found := release_problem(BY_NAME[key.rpartition(".")[2]], value, release))
    ]


def _set_values(spec: Spec) -> Iterator[tuple[str, KnobValue | SettingValue]]:
    """Yield the key and the value of each Megatron knob that the spec sets."""
    sections = {"train.settings": spec.train.settings, "auto_tuner.baseline": spec.baseline or {}}
    for section, values in sections.items():
        yield from ((f"{section}.{name}", value) for name, value in values.items() if name in BY_NAME)
    for name, choices in spec.space.items():
        if name in BY_NAME and not isinstance(choices, str):
            yield from ((f"auto_tuner.space.{name}", value) for value in choices)


def release_problem(knob: Knob, value: KnobValue | SettingValue, release: str) -> tuple[str, str] | None:
    """Return the problem and the fix for a value that a release does not support, None if it does."""
    spellings = [flag for flag in knob.flags if flag.sets(value)]
    if value is None or value == knob.neutral or not spellings:
        return None
    if words := knob.arguments(value, release):
        table = release_table(release)
        parse_problems = table.parse(words)[1]
        if not parse_problems:
            return None
        choices = ", ".join(map(str, table.by_flag[words[0]].choices)) if words[0] in table.by_flag else ""
        fix = f"use {choices}" if choices else parse_problems[0].fix
        return f"is not a valid value of {words[0]} in Megatron-LM {release}", fix
    releases = [each for each in known_releases() if any(in_versions(flag.versions, each) for flag in spellings)]
    return f"is not supported by Megatron-LM {release}", f"remove it, or use a release among {', '.join(releases)}"
