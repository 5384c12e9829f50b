"""Checks of the answers of hooks: types, values, and no answer for chips of other vendors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

from flagcore_vendorkit import machine

from flagcore.domain.chip import Chip, Device
from flagcore.errors import SpecError
from flagcore.loading.entry_points import one_line
from flagcore.plugins import kind_of
from flagcore_testing.examples import FOREIGN_CHIP, example_calls
from flagcore_testing.kit import Check, Problem, Problems, Subject, check


@check("return None for chips of other vendors")
def foreign_chips_get_no_answer(plugin: Subject) -> Problems:
    for hook, arguments in example_calls(FOREIGN_CHIP):
        try:
            answer = plugin.ask(hook, arguments)
        except SpecError:
            raise  # an error in a file, which another check may have reported
        except Exception as error:
            yield f"{hook} raises {one_line(error)} for a chip of another vendor"
            continue
        yield answer is not None and answer not in ((), [], {}), f"{hook} answers for a chip of another vendor"


@check("return None if `kind` is neither train nor serve")
def unknown_engines_get_no_answer(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        about: dict[str, Chip | str | None] = {"chip": chip, "engine": "none", "engine_version": None, "kind": ""}
        if plugin.ask("flagcore_engine_support", about) is not None:
            yield f"flagcore_engine_support answers for an unknown engine on {chip.name}"


@check("return the vendor of the chips only if a variable selects it, else None", hook="vendor")
def vendor_is_not_guessed(plugin: Subject) -> Problems:
    vendors = {chip.vendor for chip in plugin.own_chips()}
    for name, value in (("", ""), ("PATH", "/bin"), ("CUDA_VISIBLE_DEVICES", "0")):
        answer = plugin.ask("flagcore_vendor", {"environment": {name: value} if name else {}})
        shown = f"{name}={value}" if name else "no variables"
        yield answer in vendors, f"flagcore_vendor returns {answer!r} with {shown}"
    if detector := plugin.detector:
        selecting = {name: detector.vendor.upper() for name in detector.vendor_variables[:1]}
        for variables in (selecting, *({f"{prefix}X": "1"} for prefix in detector.own_variables)):
            answer = plugin.ask("flagcore_vendor", {"environment": variables}) if variables else detector.vendor
            text = f"flagcore_vendor returns {answer!r} with {variables}, expected {detector.vendor!r}"
            yield answer != detector.vendor, text


@check("return a sentence for each problem, and None or an empty list if there is none", hook="health")
def health_is_of_problems(plugin: Subject) -> Problems:
    if plugin.failed("flagcore_health"):
        return  # another check reports it
    with mock.patch.object(machine, "query_torch", return_value=None):
        sentences = [each for chip in plugin.own_chips()[:1] for each in plugin.loaded.health(chip)]
        of_detector = plugin.detector.problems() if plugin.detector else ()
    for each in sentences if not plugin.loaded.devices() else ():
        if of_detector and each not in of_detector:
            text = f"flagcore_health returns {each[:80]!r} on a machine without devices"
            yield Problem(text, "return nothing if there is no device: look for the device file first")
    for each in sentences:
        yield len(each.split()) < 3, f"flagcore_health returns {each!r}, which is no problem"


@check(
    "return the given chip with other figures: dataclasses.replace(chip, memory_bytes=...); another one is ignored",
    hook="measured_chip",
)
def measured_chips_keep_their_names(plugin: Subject) -> Problems:
    for chip in plugin.own_chips()[:1]:
        answer = plugin.ask("flagcore_measured_chip", {"chip": chip})
        if isinstance(answer, Chip) and answer.name != chip.name:
            yield f"flagcore_measured_chip returns {answer.name!r} for {chip.name}"


def _of_groups(plugin: Subject) -> Iterable[tuple[Any, ...]]:
    """Return each group with one engine of each kind."""
    engines = {kind_of(each): each for each in reversed(plugin.engines)}.values()
    return [(group, each) for group in plugin.groups() for each in engines]


BY_GROUP = ("memory_model_is_valid", "collective_costs_are_valid")
BY_ENGINE = ("kernel_costs_are_valid", "engine_support_is_valid", "knobs_are_valid", "environment_is_valid")
ARGUMENTS: Mapping[str, Callable[[Subject], Iterable[tuple[Any, ...]]]] = {
    "topology_is_valid": lambda plugin: [(group,) for group in plugin.groups()],
    **dict.fromkeys(BY_GROUP, _of_groups),
    **dict.fromkeys(BY_ENGINE, Subject.pairs),
    "telemetry_is_valid": lambda plugin: [(Device(index=0, chip=chip.name),) for chip in plugin.own_chips()],
    "check_task_is_valid": lambda plugin: [(task,) for task in plugin.tasks()],
    **dict.fromkeys(("health_is_valid", "measured_chip_is_valid"), lambda plugin: [*zip(plugin.own_chips()[:1])]),
}
"""Maps each check to a function that returns the arguments of its calls."""


def _made(name: str) -> Check:
    hook = name.removesuffix("_is_valid").removesuffix("_are_valid")

    def valid(plugin: Subject) -> Problems:
        with mock.patch.object(machine, "query_torch", return_value=None):  # health imports the real torch
            for arguments in ARGUMENTS[name](plugin):
                getattr(plugin.loaded, hook)(*arguments)
        yield from plugin.problems_of(f"flagcore_{hook}")

    valid.__name__ = name
    return check(hook=hook)(valid)


CHECKS = tuple(map(_made, ARGUMENTS))
