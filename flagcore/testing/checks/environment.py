"""The environment of trials, and `environment.yaml`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from unittest import mock

from flagcore.domain.chip import Chip
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.plugins import kind_of
from flagcore.testing import fakes
from flagcore.testing.examples import task_on
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject
from flagcore.vendorkit.fields import SOURCE_KEYS
from flagcore.vendorkit.variables import Variable

EVERYONES = {"PATH", "HOME", "USER", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR"}
"""Variables that belong to the user's shell."""


def environment_is_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_environment")
    for chip in plugin.chips:
        for engine in plugin.engines:
            for name in plugin.loaded.environment(chip, engine):
                if not re.fullmatch(r"[A-Za-z_]\w*", name):
                    yield Problem(f"flagcore_environment: {name!r} is not a valid name", "correct the name")
    yield from plugin.problems_of("flagcore_environment")


def variables_have_meanings_and_sources(plugin: Subject) -> Iterator[Problem]:
    for each in plugin.variables:
        if not each.meaning.strip() or each.source.kind not in SOURCE_KEYS or not each.source.detail.strip():
            yield Problem(
                f"environment.yaml: {each.name} has no meaning or an empty source",
                "say what the variable does and where that is documented",
            )


def variables_are_listed_once(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for engine in plugin.engines:
            names = Counter(each.name for each in _set_on(plugin, chip, engine))
            for name, times in names.items():
                if times > 1:
                    yield Problem(
                        f"environment.yaml: {name} has {times} values for {engine}",
                        "keep one, or restrict each by engines, chips or versions",
                    )


def system_variables_are_not_set(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for engine in plugin.engines:
            for name in sorted(EVERYONES & {*plugin.loaded.environment(chip, engine)}):
                yield Problem(
                    f"flagcore_environment: {name} of {engine} on {chip.name} replaces the user's value",
                    "use `used` instead of `value`: it documents the value without setting it",
                )


def variables_are_upper_case(plugin: Subject) -> Iterator[Problem]:
    for each in plugin.variables:
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", each.name):
            yield Problem(
                f"environment.yaml: the name {each.name!r} is not upper case",
                "write it as the vendor's software reads it",
            )


def variables_name_known_engines_and_chips(plugin: Subject) -> Iterator[Problem]:
    for each in plugin.variables:
        for word in plugin.unknown(each.scope):
            yield Problem(f"environment.yaml: {each.name} is for {word!r}, which is unknown", fix=plugin.known_names)


def variables_do_not_select_another_vendor(plugin: Subject) -> Iterator[Problem]:
    others = {name: chip.vendor for chip in plugin.others.chips() for name in _accelerator(plugin, chip)}
    for chip in plugin.own_chips():
        for engine in plugin.engines:
            variables = plugin.loaded.environment(chip, engine)
            wrong = [name for name, value in variables.items() if value.casefold() in {*others} - {chip.vendor}]
            for name in dict.fromkeys([*wrong, *_hiding(plugin, variables)]):
                yield Problem(
                    f"flagcore_environment sets {name} = {variables[name]!r} on {chip.name} of "
                    f"{chip.vendor}: " + ("another vendor" if name in wrong else "its own devices are then not found"),
                    f"write the name that the software has for {chip.vendor}, and handle it in discover.py",
                )


def variables_are_documented(plugin: Subject) -> Iterator[Problem]:
    known = {each.name for each in plugin.variables if each.value}
    for chip in plugin.own_chips():
        for engine in plugin.engines:
            for name in sorted(set(plugin.loaded.environment(chip, engine)) - known):
                yield Problem(
                    f"flagcore_environment sets {name} for {engine}, which is missing in environment.yaml",
                    "add it with value, meaning and source",
                )


def documented_variables_are_set(plugin: Subject) -> Iterator[Problem]:
    if plugin.failed("flagcore_environment"):
        raise Skip("flagcore_environment gives no usable answer")
    for chip in plugin.own_chips():
        for engine in plugin.engines:
            variables = plugin.loaded.environment(chip, engine)
            for each in _set_on(plugin, chip, engine):
                if (
                    each.suits(None)
                    and not each.condition
                    and "{" not in str(each.value)
                    and each.name not in variables
                ):
                    yield Problem(
                        f"environment.yaml: {each.name} is for {engine} on {chip.name}, but is not set",
                        "return the variables of environment.yaml there, as VendorPlugin does",
                    )


def variables_do_not_depend_on_the_shell(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_environment")
    for chip in plugin.own_chips():
        for engine in plugin.engines:
            variables = plugin.loaded.environment(chip, engine)
            with mock.patch.dict(os.environ, dict.fromkeys(variables, "the user's own")), fakes.quiet():
                again = plugin.loaded.environment(chip, engine)
            for name in sorted(name for name in variables if again.get(name) != variables[name]):
                yield Problem(
                    f"flagcore_environment returns {again.get(name)!r} for {name} if the shell sets it",
                    "return what trials need: the core keeps the user's values and reports conflicts",
                )


def several_nodes_keep_single_node_variables(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_environment")
    for chip in plugin.own_chips():
        nodes = NodeGroup(chip=chip, nodes=2, devices_per_node=chip.devices_per_node)
        task = replace(task_on(chip), cluster=Cluster(groups=(nodes,)))
        one = plugin.loaded.environment(chip, "megatron", None, task_on(chip))
        two = plugin.loaded.environment(chip, "megatron", None, task)
        for name in sorted(set(one) - set(two)):
            yield Problem(
                f"flagcore_environment sets {name} on one node of {chip.name}, but not on two nodes",
                "add variables for several nodes to those of one",
            )


def _accelerator(plugin: Subject, chip: Chip) -> tuple[str, ...]:
    """Return the names of another plugin's vendor; none if its devices are plain CPUs."""
    plain = plugin.others.engine_support(chip, "megatron").device_type == "cpu"
    return () if plain else (chip.vendor.casefold(), plugin.others.owner(chip.name) or chip.vendor)


def _hiding(plugin: Subject, variables: Mapping[str, str]) -> list[str]:
    """Return the variables that hide the devices of the plugin's own transcript."""
    try:
        first = plugin.listings[0]
    except Skip:
        return []
    tools, known = {first.tool: fakes.prints(first.text)}, plugin.memory.setdefault("found with", {})

    def found(more: Mapping[str, str]) -> bool:
        key = tuple(sorted(more.items()))
        if key not in known:
            known[key] = True
            with suppress(Exception):  # another check reports it
                known[key] = bool(fakes.devices(plugin, tools, **more))
        return bool(known[key])

    suspects = {name: value for name, value in variables.items() if name not in EVERYONES}
    return [name for name in suspects if not found({name: suspects[name]})] if found({}) and not found(suspects) else []


def _set_on(plugin: Subject, chip: Chip, engine: str) -> list[Variable]:
    """Return the variables with a value for an engine on a chip."""
    about = (chip, engine, None, kind_of(engine))
    return [each for each in plugin.variables if each.value and each.scope.includes(*about)]
