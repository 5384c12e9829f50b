"""Tests that every plugin passes. It needs no chip; tests that do are marked `device`. A skip gives its reason."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import numpy as np
import pytest

from flagcore.contracts import AttentionShape, KernelCosts
from flagcore.domain.chip import Chip, Fact, Support
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.launch import Launch
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Task
from flagcore.domain.trial import TrialState
from flagcore.physics.collectives.model import KINDS
from flagcore.plugins import LoadedPlugins, answers, launcher, workload
from flagcore.stages.build import build, refusals
from flagcore.stages.discover import costs as costs_of
from flagcore.stages.predict import predict
from flagcore.stages.prune import prune
from flagcore.testing.examples import FOREIGN_CHIP, group_of, task_on
from flagcore.vendorkit.parts import SOURCE_SAYS

T = TypeVar("T")

RANGES = {
    "memory_bytes": (2**27, 2**40),
    "memory_bandwidth_bytes_per_second": (1e9, 1e14),
    "dense_flops_per_second": (1e9, 1e17),
    "link.bytes_per_second": (1e8, 1e13),
    "nic_bytes_per_second": (1e8, 1e12),
}
"""Plausible figures of one device in base units. A figure in GB, TFLOP/s or Gb/s falls far outside.

The lower ends leave room for one core of a small CPU; an accelerator is far above them.
"""

DRIVERS = ("torch", "torch_mlu", "pynvml", "pymxsml", "pyixml", "pycndev", "tensorflow", "jax", "cupy", "vllm")
DISCOVERY_SECONDS = 15.0


class PluginConformance:
    """Subclass it, override `plugin`, and override what else says so. Each test asks one thing of one hook."""

    name = "plugin_under_test"
    engines: Sequence[str] = ("megatron",)

    @pytest.fixture
    def plugin(self) -> object:
        """Override: the module (or object) that the entry point names."""
        raise NotImplementedError("override the fixture `plugin` of PluginConformance")

    @pytest.fixture
    def failure_examples(self) -> Sequence[tuple[str, TrialState]]:
        """Override: log lines, and how a trial that wrote each one failed."""
        return ()

    @pytest.fixture
    def loaded(self, plugin: object) -> LoadedPlugins:
        """The plugin as the core would ask it, every answer checked."""
        return LoadedPlugins.of({self.name: plugin})

    @pytest.fixture
    def chips(self, loaded: LoadedPlugins) -> tuple[Chip, ...]:
        """The plugin's own chips. A plugin without any (an add-on) is tested with none."""
        return loaded.chips()

    def test_hooks_and_their_arguments_are_known(self, loaded: LoadedPlugins) -> None:
        assert not loaded.failures, told(loaded)
        assert loaded.plugins[0].hooks

    def test_importing_it_loads_no_driver_and_no_framework(self, plugin: object) -> None:
        if not isinstance(plugin, ModuleType):
            pytest.skip("the plugin is an object, not a module that can be imported by name")
        seen = f"import sys, {plugin.__name__}; print(*(m for m in {DRIVERS!r} if m in sys.modules))"
        path = [entry for entry in sys.path if entry]
        code = f"import sys; sys.path[:0] = {path!r}; {seen}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [], "import these inside the hook that needs them, or not at all"

    def test_every_fact_has_a_source_of_a_known_kind(self, chips: tuple[Chip, ...]) -> None:
        for chip in chips:
            for key, fact in facts_of(chip):
                assert fact.source.kind in SOURCE_SAYS, f"{chip.name}: {key}"
                assert fact.source.detail.strip(), f"{chip.name}: {key}"

    def test_facts_are_plausible_in_base_units(self, chips: tuple[Chip, ...]) -> None:
        for chip in chips:
            for key, fact in facts_of(chip):
                low, high = next(limits for start, limits in RANGES.items() if key.startswith(start))
                assert low <= fact.value <= high, f"{chip.name}: {key} = {fact.value:g} is not in {low:g} to {high:g}"

    def test_names_and_aliases_are_unique(self, chips: tuple[Chip, ...]) -> None:
        names = [name.casefold() for chip in chips for name in {chip.name, *chip.aliases}]
        assert len(names) == len(set(names))

    def test_a_chip_is_found_by_each_of_its_names(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        for chip in chips:
            assert {found.name for name in (chip.name, *chip.aliases) if (found := loaded.find_chip(name.upper()))} == {
                chip.name
            }

    @pytest.mark.parametrize(
        "hook", ["topology", "memory_model", "kernel_costs", "collective_costs", "environment", "failure_patterns"]
    )
    def test_it_says_nothing_of_a_foreign_chip(self, loaded: LoadedPlugins, hook: str) -> None:
        about: dict[str, tuple[object, ...]] = {
            "topology": (group_of(FOREIGN_CHIP),),
            "memory_model": (group_of(FOREIGN_CHIP), "megatron"),
            "collective_costs": (group_of(FOREIGN_CHIP), "megatron"),
        }
        assert not getattr(loaded, hook)(*about.get(hook, (FOREIGN_CHIP, "megatron")))
        assert not loaded.failures, told(loaded)

    def test_it_does_not_support_engines_on_a_foreign_chip(self, loaded: LoadedPlugins) -> None:
        for engine in self.engines:
            assert loaded.engine_support(FOREIGN_CHIP, engine).support is Support.UNKNOWN

    def test_it_says_nothing_of_an_unknown_engine(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        for chip in chips:
            assert loaded.engine_support(chip, "no such engine").support is Support.UNKNOWN

    def test_engine_support_tells_device_and_backend(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        for chip in chips:
            for engine in self.engines:
                said = loaded.engine_support(chip, engine)
                assert said.device_type
                assert said.distributed_backend
                assert said.reason or said.support is Support.YES, "tell why"
                assert all(refused.reason and refused.values for refused in said.refused)
        assert not loaded.failures, told(loaded)

    def test_environment_is_variables(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        for chip in chips:
            for engine in self.engines:
                variables = loaded.environment(chip, engine)
                assert all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in variables)
        assert not loaded.failures, told(loaded)

    def test_failure_patterns_match_their_examples(
        self,
        loaded: LoadedPlugins,
        chips: tuple[Chip, ...],
        failure_examples: Sequence[tuple[str, TrialState]],
    ) -> None:
        for chip in chips:
            patterns = loaded.failure_patterns(chip, "megatron")
            if patterns and not failure_examples:
                pytest.fail("override the fixture failure_examples: log lines that the patterns are for")
            for line, state in failure_examples:
                first = next((pattern for pattern in patterns if re.search(pattern.pattern, line)), None)
                assert first is not None, line
                assert first.state is state, line
        assert not loaded.failures, told(loaded)

    def test_more_allocated_never_means_less_used(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        allocated = np.linspace(0, 2.0**37, 200)
        for model in self.each(chips, lambda chip: loaded.memory_model(group_of(chip), "megatron")):
            reserved = model.reserved_bytes(allocated)
            used = model.device_used_bytes(reserved)
            assert (reserved >= allocated).all()
            assert (used >= reserved).all()
            assert (np.diff(reserved) >= 0).all()
            assert (np.diff(used) >= 0).all()

    def test_memory_budget_of_the_user_counts(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        for chip in chips:
            model = loaded.memory_model(replace(group_of(chip), memory_bytes=10**9), "megatron")
            if model is not None:
                assert model.capacity_bytes() is not None
                assert (model.capacity_bytes() or 0) <= 10**9

    def test_kernel_times_are_positive_and_grow_with_size(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        sizes = powers_of_two(8, 14)
        for costs in self.each(chips, lambda chip: own_kernel_costs(loaded, chip)):
            assert np.isnan(costs.in_runs()) or 1 <= costs.in_runs() < 3
            assert np.isnan(costs.launch_seconds()) or 1e-7 < costs.launch_seconds() < 1e-3
            ones = np.ones_like(sizes)
            trained = AttentionShape(
                batch=ones, heads=8 * ones, groups=8 * ones, queries=sizes, keys=sizes, head_dim=128 * ones
            )
            for seconds in (
                costs.gemm_seconds(sizes, sizes, sizes, "bf16"),
                costs.attention_seconds(trained, "bf16"),
                costs.attention_seconds(replace(trained, batch=16 * ones, groups=ones, queries=ones), "bf16"),
                costs.attention_backward_seconds(trained, "bf16"),
                costs.memory_seconds(sizes**2),
                costs.host_copy_seconds(sizes**2),
            ):
                known = seconds[~np.isnan(seconds)]
                assert (known > 0).all()
                assert (np.diff(known) >= 0).all()

    def test_no_kernel_is_faster_than_the_chips_peaks(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        side, much = np.array([8192.0]), np.array([2.0**33])
        for chip, costs in self.each(chips, lambda chip: (chip, own_kernel_costs(loaded, chip))):
            if costs is None:
                continue
            for precision, peak in chip.dense_flops_per_second.items():
                assert not (2.0 * side**3 / costs.gemm_seconds(side, side, side, precision) > 1.05 * peak.value).any()
            rate = chip.memory_bandwidth_bytes_per_second
            assert rate is None or not (much / costs.memory_seconds(much) > 1.05 * rate.value).any()

    def test_shipped_costs_are_those_of_its_chips(self, plugin: object, chips: tuple[Chip, ...]) -> None:
        package = getattr(plugin, "__package__", None)
        folder = files(package).joinpath("costs") if package else None
        if folder is None or not folder.is_dir():
            pytest.skip("the plugin ships no folder of costs")
        names = {chip.name.casefold() for chip in chips}
        assert {entry.name for entry in folder.iterdir() if entry.is_dir()} <= names

    def test_collective_times_grow_with_payload_and_a_group_of_one_is_free(
        self, loaded: LoadedPlugins, chips: tuple[Chip, ...]
    ) -> None:
        payload, ones = powers_of_two(10, 30), np.ones(20, dtype=np.int64)
        for costs in self.each(chips, lambda chip: loaded.collective_costs(group_of(chip), "megatron")):
            for kind in KINDS:
                assert (np.diff(costs.seconds(kind, payload, 2 * ones, ones)) >= 0).all()
            assert (costs.seconds("all_reduce", payload, ones, ones) == 0).all()
            assert (costs.compute_taken(ones, ones) == 0).all()
            taken = costs.compute_taken(2 * ones, ones)
            assert ((taken >= 0) & (taken <= 1)).all()
        assert not loaded.failures, told(loaded)

    @pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 2), (1, 8), (4, 8)])
    def test_topology_grows_and_ends_at_all_devices(
        self, loaded: LoadedPlugins, chips: tuple[Chip, ...], nodes: int, devices: int
    ) -> None:
        for chip in chips:
            loaded.topology(NodeGroup(chip=chip, nodes=nodes, devices_per_node=devices))
        assert not loaded.failures, told(loaded)  # the levels were checked when they were answered

    def test_prepared_launch_still_runs_the_command(
        self, loaded: LoadedPlugins, chips: tuple[Chip, ...], tmp_path: Path
    ) -> None:
        launch = Launch(argv=("echo", "the command"), folder=str(tmp_path), environment={"KEEP": "me"})
        for task in self.tasks(chips or (FOREIGN_CHIP,)):
            prepared = loaded.prepare_launch(launch, task)
            assert " ".join(prepared.argv).endswith("echo the command")
            assert prepared.environment["KEEP"] == "me"
            assert prepared.folder == launch.folder

    def test_prepared_launch_can_be_stopped(
        self, loaded: LoadedPlugins, chips: tuple[Chip, ...], tmp_path: Path
    ) -> None:
        sleeper = Launch(argv=(sys.executable, "-c", "import time; time.sleep(60)"), folder=str(tmp_path))
        for task in itertools.islice(self.tasks(chips), 1):
            prepared = loaded.prepare_launch(sleeper, task)
            running = launcher("local").start(prepared)
            assert running.poll() is None
            assert running.stop().ended_by == "request"

    def test_a_larger_micro_batch_never_needs_less(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        engine = workload("megatron")
        for task in self.tasks(chips):
            made = costs_of(task.cluster, loaded, "megatron")
            sizes = [2**power for power in range(4)]
            rows = [engine.columns(task, {"micro_batch_size": size}) for size in sizes]
            columns = {knob: np.concatenate([row[knob] for row in rows]) for knob in rows[0]}
            assert (np.diff(engine.predict(task, columns, made).device_used_bytes) >= 0).all()

    def test_refused_values_are_those_of_known_knobs(self, loaded: LoadedPlugins, chips: tuple[Chip, ...]) -> None:
        for task in self.tasks(chips):
            for engine in self.engines:
                support = loaded.engine_support(task.cluster.groups[0].chip, engine)
                assert len(refusals(workload(engine).axes(task), support)) == len(support.refused) + len(support.forced)

    def test_pruning_rules_have_a_name_and_leave_something(
        self, loaded: LoadedPlugins, chips: tuple[Chip, ...]
    ) -> None:
        engine = workload("megatron")
        for task in self.tasks(chips or (FOREIGN_CHIP,)):
            space = build(engine.axes(task), engine.rules(task), engine.merges(task))
            predictions = predict(task, engine, space, costs_of(task.cluster, loaded, "megatron"))
            for rule in loaded.pruning_rules(task):
                assert rule.name.isidentifier()
                assert rule.says
                pruned = prune(space, predictions, engine, (rule,), ())
                assert not pruned.broken_rules, pruned.broken_rules
                assert pruned.open_rows.size, f"{rule.name} leaves no candidate of a small model on 8 devices"
        assert not loaded.failures, told(loaded)

    def test_devices_are_found_quickly_or_not_at_all(self, loaded: LoadedPlugins) -> None:
        start = time.monotonic()
        devices = loaded.devices()
        assert time.monotonic() - start < DISCOVERY_SECONDS
        assert not loaded.failures, told(loaded)
        assert len({device.index for device in devices}) == len(devices)

    @pytest.mark.device
    def test_found_devices_are_of_known_chips_and_can_be_read(self, loaded: LoadedPlugins) -> None:
        if not loaded.devices():
            pytest.skip("no device of this vendor on this machine")
        for device in loaded.devices():
            assert loaded.find_chip(device.chip) is not None, f"no chip answers to {device.chip!r}"
            reading = loaded.telemetry(device)
            assert reading is None or all(isinstance(value, (int, float)) for value in reading.sample().values())

    def each(self, chips: tuple[Chip, ...], answer: Callable[[Chip], T | None]) -> list[T]:
        """Return what the plugin answers for its chips; skip the test if that is nothing."""
        found = [said for chip in chips if (said := answer(chip)) is not None]
        if not found:
            pytest.skip("the plugin leaves this to the core: it answers None for each of its chips")
        return found

    def tasks(self, chips: tuple[Chip, ...]) -> Iterator[Task]:
        """Yield a small training task for each chip."""
        return (task_on(chip) for chip in chips)


def own_kernel_costs(loaded: LoadedPlugins, chip: Chip) -> KernelCosts | None:
    """Return what the plugin itself says, without the roofline with which the core fills its gaps."""
    (plugin,) = loaded.plugins
    answer = plugin.ask("flagcore_kernel_costs", {"chip": chip, "engine": "megatron"})
    return None if answer is None else answers.kernel_costs(answer)


def told(loaded: LoadedPlugins) -> str:
    """Return what went wrong with the plugin, a line a failure."""
    return "\n".join(str(failure) for failure in loaded.failures)


def powers_of_two(first: int, end: int) -> FloatArray:
    """Return 2**first up to, without, 2**end."""
    return np.exp2(np.arange(first, end)).astype(np.float64)


def facts_of(chip: Chip) -> Iterator[tuple[str, Fact]]:
    """Yield the key and the fact of every figure of `chip`."""
    single = {
        "memory_bytes": chip.memory_bytes,
        "memory_bandwidth_bytes_per_second": chip.memory_bandwidth_bytes_per_second,
        "link.bytes_per_second": chip.link.bytes_per_second if chip.link else None,
        "nic_bytes_per_second": chip.nic_bytes_per_second,
    }
    yield from ((key, fact) for key, fact in single.items() if fact is not None)
    yield from ((f"dense_flops_per_second.{name}", fact) for name, fact in chip.dense_flops_per_second.items())
