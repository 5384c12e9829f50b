"""What is not the plugin's: a foreign chip, an engine that nobody has."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.domain.chip import Chip, Device
from flagcore.domain.launch import Launch
from flagcore.plugins import kind_of
from flagcore.plugins.installed import one_line
from flagcore.testing.examples import FOREIGN_CHIP, group_of, task_on
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject

FIX = "answer None unless chip.vendor is yours"
TRAINS = {"engine": "megatron", "kind": "train"}


def it_plans_no_topology_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    yield from _silent(plugin, "flagcore_topology", {"group": group_of(FOREIGN_CHIP)})


def it_has_no_memory_model_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    yield from _silent(plugin, "flagcore_memory_model", {"group": group_of(FOREIGN_CHIP), **TRAINS})


def it_prices_no_kernel_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    yield from _silent(plugin, "flagcore_kernel_costs", {"chip": FOREIGN_CHIP, **TRAINS})


def it_prices_no_collective_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    yield from _silent(plugin, "flagcore_collective_costs", {"group": group_of(FOREIGN_CHIP), "engine": "megatron"})


def it_supports_no_engine_on_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    for engine in plugin.engines:
        yield from _silent(plugin, "flagcore_engine_support", {**_about(FOREIGN_CHIP, engine), "kind": kind_of(engine)})


def it_brings_no_knob_to_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    for engine in plugin.engines:
        yield from _silent(plugin, "flagcore_knobs", _about(FOREIGN_CHIP, engine))


def it_sets_no_variable_on_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    for engine in plugin.engines:
        yield from _silent(
            plugin, "flagcore_environment", {**_about(FOREIGN_CHIP, engine), "task": None, "kind": kind_of(engine)}
        )


def it_reads_no_log_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    yield from _silent(plugin, "flagcore_failure_patterns", _about(FOREIGN_CHIP, "megatron"))


def it_prunes_nothing_on_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()  # an add-on may have rules for all chips
    yield from _silent(plugin, "flagcore_pruning_rules", {"task": task_on(FOREIGN_CHIP)})


def it_leaves_the_launch_on_a_foreign_chip_alone(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()
    launch = Launch(argv=("echo",), folder="/tmp", environment={"KEEP": "me"})
    yield from _silent(plugin, "flagcore_prepare_launch", {"launch": launch, "task": task_on(FOREIGN_CHIP)}, launch)


def it_reads_no_foreign_device(plugin: Subject) -> Iterator[Problem]:
    if plugin.chips == () and plugin.failed("flagcore_chips"):
        raise Skip("flagcore_chips gives no answer that can be used")
    yield from _silent(plugin, "flagcore_telemetry", {"device": Device(index=0, chip=FOREIGN_CHIP.name)})


def it_says_nothing_of_an_unknown_engine(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        if plugin.ask("flagcore_engine_support", {**_about(chip, "no such engine"), "kind": ""}) is not None:
            yield Problem(
                message=f"flagcore_engine_support says how 'no such engine' runs on {chip.name}",
                fix="answer None for an engine that you have not looked at",
            )


def _about(chip: Chip, engine: str) -> dict[str, object]:
    return {"chip": chip, "engine": engine, "engine_version": None}


def _silent(plugin: Subject, hook: str, about: dict[str, object], same: object = None) -> Iterator[Problem]:
    """Yield a problem if `hook` answers, or raises; an answer that is empty, or the `same` as was given, is none."""
    try:
        answer = plugin.ask(hook, about)
    except Exception as error:
        yield Problem(message=f"{hook} raises for a chip of another vendor: {one_line(error)}", fix=FIX)
        return
    if answer is not None and answer != same and not (isinstance(answer, (dict, list, tuple)) and not answer):
        yield Problem(message=f"{hook} answers for a chip of another vendor", fix=FIX)
