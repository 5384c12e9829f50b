"""Checks of the environment of trials, and of `environment.yaml`."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from unittest import mock

from flagcore_vendorkit.engines import Variable
from flagcore_vendorkit.fields import applicable

from flagcore.domain.chip import Chip
from flagcore.plugins import kind_of
from flagcore_testing import fakes
from flagcore_testing.kit import Problems, Skip, Subject, check, need, once

USERS = {"PATH", "HOME", "USER", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR"}
"""Variables that belong to the user's shell."""
OF_LAUNCHERS = {
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("NNODES", "NPROC_PER_NODE", "GROUP_WORLD_SIZE"),
}
"""Variables that a launcher sets in each process."""
Set = tuple[Chip, str, Mapping[str, str]]


def _environments(plugin: Subject) -> Iterator[Set]:
    plugin.implements("flagcore_environment")
    return ((chip, engine, plugin.loaded.environment(chip, engine)) for chip, engine in plugin.pairs())


@check("keep one, or restrict each by engines, chips or versions")
def variables_are_listed_once(plugin: Subject) -> Problems:
    for chip, engine in plugin.pairs():
        for name, times in Counter(each.name for each in _variables_on_chip(plugin, chip, engine)).items():
            if times > 1:
                yield f"environment.yaml: {name} has {times} values for {engine}"
        listed = applicable(plugin.variables, chip, engine, None, kind_of(engine))
        for name in sorted({each.name for each in listed if each.value} & {each.name for each in listed if each.used}):
            yield f"environment.yaml: {name} has value and used for {engine} on {chip.name}"


@check("use `used` instead of `value`: it documents the value without setting it", each=_environments)
def system_variables_are_not_set(chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    for name in sorted(OF_LAUNCHERS & {*variables}):
        yield f"flagcore_environment: {name} of {engine} on {chip.name} is set by the launcher of each job"
    for name in sorted(USERS & {*variables}):
        yield f"flagcore_environment: {name} of {engine} on {chip.name} replaces the user's value"


DEBUGGING = re.compile(r"LAUNCH_BLOCKING|_DEBUG(_|$)|_TRACE|PROFIL|NO_\w*MEMORY_CACHING|LOG_LEVEL|VERBOS")
QUIET = {"0", "false", "off", "warn", "warning", "error", "none"}


@check("use `used` instead of `value`: it is for debugging, and slows runs", each=_environments)
def variables_do_not_debug(chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    for name, value in variables.items():
        if DEBUGGING.search(name) and value.casefold() not in QUIET:
            yield f"flagcore_environment: {name} = {value!r} of {engine} on {chip.name}"


@check("write the name that the software has for this vendor, and handle it in discover.py")
def variables_do_not_select_another_vendor(plugin: Subject) -> Problems:
    other_vendors = {name for chip in plugin.others.chips() for name in _accelerator(plugin, chip)}
    for chip, _, variables in _environments(plugin):
        wrong_names = [name for name, value in variables.items() if value.casefold() in other_vendors - {chip.vendor}]
        for name in dict.fromkeys([*wrong_names, *_device_variables(plugin, variables)]):
            reason = "another vendor" if name in wrong_names else "its own devices are then not found"
            yield f"flagcore_environment sets {name} = {variables[name]!r} on {chip.name} of {chip.vendor}: {reason}"


@check("add it with value, meaning and source")
def variables_are_documented(plugin: Subject) -> Problems:
    documented = {each.name for each in plugin.variables if each.value}
    for _, engine, variables in _environments(plugin):
        for name in sorted(set(variables) - documented):
            yield f"flagcore_environment sets {name} for {engine}, which is missing in environment.yaml"


@check("return the variables of environment.yaml there, as VendorPlugin does")
def documented_variables_are_set(plugin: Subject) -> Problems:
    need(not plugin.failed("flagcore_environment"), "flagcore_environment has no valid answer")
    for chip, engine, variables in _environments(plugin):
        for each in _variables_on_chip(plugin, chip, engine):
            is_unconditional = each.applies_to(None) and not each.condition and "{" not in str(each.value)
            if is_unconditional and each.name not in variables:
                yield f"environment.yaml: {each.name} is for {engine} on {chip.name}, but is not set"


@check("return what trials need: the core keeps the user's values and reports conflicts")
def variables_do_not_depend_on_the_shell(plugin: Subject) -> Problems:
    for chip, engine, variables in _environments(plugin):
        with mock.patch.dict(os.environ, dict.fromkeys(variables, "the user's own")), fakes.quiet():
            second_answer = plugin.loaded.environment(chip, engine)
        for name in sorted(name for name in variables if second_answer.get(name) != variables[name]):
            yield f"flagcore_environment returns {second_answer.get(name)!r} for {name} if the shell sets it"


def _accelerator(plugin: Subject, chip: Chip) -> tuple[str, ...]:
    """Return the names of the vendor of a chip of another plugin. The result is empty if the devices are plain CPUs."""
    is_cpu = plugin.others.engine_support(chip, "megatron").device_type == "cpu"
    return () if is_cpu else (chip.vendor.casefold(), plugin.others.owner(chip.name) or chip.vendor)


def _device_variables(plugin: Subject, variables: Mapping[str, str]) -> list[str]:
    """Return the variables that hide the devices of the plugin's own transcript."""
    pairs = tuple(pair for pair in sorted(variables.items()) if pair[0] not in USERS)
    try:
        is_hidden = _has_devices(plugin) and not _has_devices(plugin, *pairs)
    except Skip:
        return []
    names = [name for name, value in pairs if is_hidden and not _has_devices(plugin, (name, value))]
    return [name for name in variables if name in names]


@once
def _has_devices(plugin: Subject, *variables: tuple[str, str]) -> bool:
    """Return whether the devices of the plugin's own transcript are found if `variables` are set."""
    tools = fakes.printing(plugin.listings[0])
    with suppress(Exception):  # another check reports it
        return bool(fakes.devices(plugin, tools, **dict(variables)))
    return True


def _variables_on_chip(plugin: Subject, chip: Chip, engine: str) -> list[Variable]:
    """Return the variables with a value for an engine on a chip."""
    return [each for each in applicable(plugin.variables, chip, engine, None, kind_of(engine)) if each.value]
