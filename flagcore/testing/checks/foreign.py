"""What is not the plugin's: a foreign chip, an engine that nobody has."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.domain.chip import Device, Support
from flagcore.domain.launch import Launch
from flagcore.testing.examples import FOREIGN_CHIP, group_of, task_on
from flagcore.testing.kit import Problem
from flagcore.testing.subject import Subject

FIX = "answer None unless chip.vendor is yours"


def it_plans_no_topology_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    if plugin.loaded.topology(group_of(FOREIGN_CHIP)) is not None:
        yield Problem(message="flagcore_topology answers for a chip of another vendor", fix=FIX)


def it_has_no_memory_model_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    if plugin.loaded.memory_model(group_of(FOREIGN_CHIP), "megatron") is not None:
        yield Problem(message="flagcore_memory_model answers for a chip of another vendor", fix=FIX)


def it_prices_no_kernel_and_no_collective_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    if plugin.loaded.kernel_costs(FOREIGN_CHIP, "megatron") is not None:
        yield Problem(message="flagcore_kernel_costs answers for a chip of another vendor", fix=FIX)
    if plugin.loaded.collective_costs(group_of(FOREIGN_CHIP), "megatron") is not None:
        yield Problem(message="flagcore_collective_costs answers for a chip of another vendor", fix=FIX)


def it_supports_no_engine_on_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    for engine in plugin.engines:
        if plugin.loaded.engine_support(FOREIGN_CHIP, engine).support is not Support.UNKNOWN:
            yield Problem(
                message=f"flagcore_engine_support says of {engine} how it runs on another vendor's chip", fix=FIX
            )


def it_brings_no_knob_to_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    for engine in plugin.engines:
        for knob in plugin.loaded.knobs(FOREIGN_CHIP, engine):
            yield Problem(message=f"flagcore_knobs brings {knob.name} to {engine} on another vendor's chip", fix=FIX)


def it_sets_no_variable_on_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    for engine in plugin.engines:
        for name in plugin.loaded.environment(FOREIGN_CHIP, engine):
            yield Problem(message=f"flagcore_environment sets {name} for {engine} on another vendor's chip", fix=FIX)


def it_reads_no_log_of_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    if plugin.loaded.failure_patterns(FOREIGN_CHIP, "megatron"):
        yield Problem(message="flagcore_failure_patterns answers for a chip of another vendor", fix=FIX)


def it_prunes_nothing_on_a_foreign_chip(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()  # an add-on may have rules for all chips
    for rule in plugin.loaded.pruning_rules(task_on(FOREIGN_CHIP)):
        yield Problem(
            message=f"flagcore_pruning_rules has {rule.name} for a task on another vendor's chip",
            fix="answer None unless the chip of a group in task.cluster.groups is yours",
        )


def it_leaves_the_launch_on_a_foreign_chip_alone(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()
    launch = Launch(argv=("echo",), folder="/tmp", environment={"KEEP": "me"})
    if plugin.loaded.prepare_launch(launch, task_on(FOREIGN_CHIP)) != launch:
        yield Problem(
            message="flagcore_prepare_launch changes a launch on another vendor's chip",
            fix="answer None unless the chip of a group in task.cluster.groups is yours",
        )


def it_reads_no_foreign_device(plugin: Subject) -> Iterator[Problem]:
    if plugin.loaded.telemetry(Device(index=0, chip=FOREIGN_CHIP.name)) is not None:
        yield Problem(
            message="flagcore_telemetry answers for a device of another vendor",
            fix="answer None unless device.chip is a name of one of your chips",
        )


def it_says_nothing_of_an_unknown_engine(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        if plugin.loaded.engine_support(chip, "no such engine").support is not Support.UNKNOWN:
            yield Problem(
                message=f"flagcore_engine_support says how 'no such engine' runs on {chip.name}",
                fix="answer None for an engine that you have not looked at",
            )
