"""What plugins add to an engine on a chip, as plain data: knobs, settings that they force, and notes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flagcore.contracts import Platform
from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import Effect, Knob
from flagcore.domain.spec import Task
from flagcore.problem import no_launch_reason


def plugin_notes(platform: Platform) -> tuple[str, ...]:
    """Return what plugins set for all candidates, and their notes on engine and chip."""
    forced = (f"{each.setting} = {each.value} (rule {each.name}): {each.reason}" for each in platform.support.forced)
    return (*forced, *platform.support.notes)


def knob_record(task: Task, knob: Knob) -> dict[str, Any]:
    """Return a plugin's knob as plain data. `not_launched` gives the reason for each value that no trial can have."""
    why = {value: no_launch_reason(task, knob, value) for value in knob.effects}
    source = knob.source
    return {
        "knob": knob.name,
        "values": list(knob.values),
        "in_space": knob in task.knobs,
        "says": knob.help,
        "claim": knob.claim,
        "effect": f"{knob.effect_source.kind}: {knob.effect_source.detail}" if knob.effect_source else None,
        "needs": [str(each) for each in knob.requires] + ["a mixture of experts"] * knob.experts_only,
        "effects": [_effect(value, effect) for value, effect in knob.effects.items()],
        "not_launched": {str(value): reason for value, reason in why.items() if reason},
        "source": f"{source.kind}: {source.detail}" if source else None,
    }


def _effect(value: KnobValue, effect: Effect) -> dict[str, Any]:
    """Return what a value of a knob changes."""
    return {
        "value": value,
        "part": effect.part,
        "time": asdict(effect.time),
        "memory": asdict(effect.memory),
        "settings": dict(effect.settings),
        "flags": list(effect.flags),
        "environment": dict(effect.environment),
    }
