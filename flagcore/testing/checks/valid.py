"""Answers of hooks: whether each has the type and the values that its hook promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flagcore.domain.chip import Device
from flagcore.testing.kit import Check, Problems, check
from flagcore.testing.subject import Subject

BY_GROUP = ("memory_model_is_valid", "collective_costs_are_valid")
BY_ENGINE = (
    *("kernel_costs_are_valid", "engine_support_is_valid", "knobs_are_valid"),
    *("environment_is_valid", "failure_patterns_are_valid"),
)
ARGUMENTS: Mapping[str, Callable[[Subject], Iterable[tuple[Any, ...]]]] = {
    "topology_is_valid": lambda plugin: [(group,) for group in plugin.groups()],
    **dict.fromkeys(BY_GROUP, lambda plugin: [(group, "megatron") for group in plugin.groups()]),
    **dict.fromkeys(BY_ENGINE, Subject.pairs),
    "telemetry_is_valid": lambda plugin: [(Device(index=0, chip=chip.name),) for chip in plugin.own_chips()],
    "pruning_rules_are_valid": lambda plugin: [(task,) for task in plugin.tasks()],
}
"""The arguments with which each check asks its hook."""


def _made(name: str) -> Check:
    hook = name.removesuffix("_is_valid").removesuffix("_are_valid")

    def valid(plugin: Subject) -> Problems:
        plugin.implements(f"flagcore_{hook}")
        for arguments in ARGUMENTS[name](plugin):
            getattr(plugin.loaded, hook)(*arguments)
        yield from plugin.problems_of(f"flagcore_{hook}")

    valid.__name__ = name
    return check()(valid)


CHECKS = tuple(map(_made, ARGUMENTS))
