"""What plugins add to an engine on a chip, as plain data: knobs, settings that they force, and what they say."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flagcore.contracts import Platform
from flagcore.domain.plugin_knob import PluginChoice, PluginKnob
from flagcore.domain.spec import Task
from flagcore.problem import why_not_launched


def plugin_notes(platform: Platform) -> tuple[str, ...]:
    """Return what plugins set for all candidates, and what they say of engine and chip."""
    forced = (f"{each.setting} = {each.value} (rule {each.name}): {each.reason}" for each in platform.support.forced)
    return (*forced, *platform.support.notes)


def knob_record(task: Task, knob: PluginKnob) -> dict[str, Any]:
    """Return a plugin's knob as plain data. `not_launched` says by value why no trial can have it."""
    why = {choice.value: why_not_launched(task, knob, choice.value) for choice in knob.choices}
    return {
        "knob": knob.name,
        "values": list(knob.values),
        "in_space": knob in task.knobs,
        "says": knob.message,
        "claim": knob.claim,
        "effect": f"{knob.effect.kind}: {knob.effect.detail}" if knob.effect else None,
        "needs": [str(need) for need in knob.needs] + ["a mixture of experts"] * knob.of_experts,
        "effects": [_effect(choice) for choice in knob.choices],
        "not_launched": {str(value): reason for value, reason in why.items() if reason},
        "source": f"{knob.source.kind}: {knob.source.detail}",
    }


def _effect(choice: PluginChoice) -> dict[str, Any]:
    """Return what a value of a knob makes of predictions."""
    return {
        "value": choice.value,
        "part": choice.part,
        "time": asdict(choice.time),
        "memory": asdict(choice.memory),
        "settings": dict(choice.settings),
        "flags": list(choice.flags),
        "environment": dict(choice.environment),
    }
