"""The hooks: everything that a plugin can provide, on one page.

A plugin is a module (or object) whose functions carry `@hookimpl`, named by an entry point in the group
`flagcore.plugins`. Each hook is optional. Hooks are called once a chip, task or trial, never
once a candidate; they return plain data or an object that the hot loop calls directly. Unless a docstring states
otherwise, a hook may raise anything: the failure is shown by `flag plugins list` and costs only this plugin's
answer. Of hooks with one answer, the first that is not None counts; plugins are called in the order of their
names, the one that has the chip last, so that an add-on can override it. Each plugin is called on its own, so
pluggy's wrappers, tryfirst and trylast have no effect.

`engine` is the name of an installed engine, `kind` what that engine does: "train" or "serve". A plugin that answers by
`kind` needs no change for an engine that it does not know. An implementation may leave out any argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pluggy

from flagcore.contracts import CollectiveCosts, KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport, TaskAdvice
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.maturity import Maturity
from flagcore.domain.spec import Task
from flagcore.physics.collectives.curves import CollectiveTable

HOOKS_API = 1
"""The number of the hooks on this page. A plugin's module may say `HOOKS_API = 1` for those that it was written for:
one that was written for later hooks is left out, with the reason. It grows when a hook is removed, or asks for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """What a hook is called `now`. Its old name works, with a warning, before the release `until`."""

    now: str
    until: str


RENAMED: Mapping[str, Renamed] = {}
"""Hooks by their old names. An implementation under an old name takes any part of the arguments of the new one."""

hookspec = pluggy.HookspecMarker("flagcore")
hookimpl = pluggy.HookimplMarker("flagcore")


class ChipHooks:
    """Chips and devices."""

    @hookspec
    def flagcore_devices(self) -> Sequence[Device] | None:
        """Return the devices of this vendor on this machine, in the order of their indices; None or empty if none.

        Memory in bytes. Called once per command; must not take longer than a few seconds, import a framework
        or create a context on a device. A missing tool or driver means no devices, not an error.
        """

    @hookspec
    def flagcore_chips(self) -> Sequence[Chip] | None:
        """Return the chips of this plugin, whether devices of them are here or not. Called once per command.

        SI units, each figure with its source; what was neither published nor measured is left out.
        """

    @hookspec
    def flagcore_vendor(self, environment: Mapping[str, str]) -> str | None:
        """Return the vendor whose chips the variables of a job ask for, or None if they do not say.

        A variable may name a vendor, also one without a plugin, or be read by one vendor's software only. The first
        answer counts. Called once per task that names no chip.
        """

    @hookspec
    def flagcore_maturity(self) -> Maturity | None:
        """Return the maturity of the plugin's data: run on devices, checked on transcripts, or from documents.

        Shown by `flag plugins list`, in full as JSON. Called once per command that lists plugins.
        """

    @hookspec
    def flagcore_health(self, chip: Chip) -> Sequence[str] | None:
        """Return what of this machine's stack prevents trials on `chip` or slows them down, one sentence each.

        None or empty: no problem is known. May take a minute and run frameworks in other processes. Called by
        `flag doctor` once per kind of chip that is on this machine.
        """

    @hookspec(firstresult=True)
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        """Return the levels over which the devices of `group` communicate, or None to derive them from the chip.

        Bytes per second in one direction, seconds. Called once per task.
        """


class CostHooks:
    """Memory and time."""

    @hookspec(firstresult=True)
    def flagcore_memory_model(self, group: NodeGroup, engine: str, kind: str) -> MemoryModel | None:
        """Return how a device of `group` spends memory under `engine`, or None if the chip is not yours.

        Bytes per device. Called once per task, never per candidate. Without an answer the core assumes the
        device's memory, 1.2 GB of context and 1% of fragmentation.
        """

    @hookspec(firstresult=True)
    def flagcore_kernel_costs(self, chip: Chip, engine: str, kind: str) -> KernelCosts | None:
        """Return measured or modelled kernel times, or None for a roofline from the chip's facts.

        Seconds; NaN for an unknown shape, for which the roofline is used. Called once per task; the object is
        called with columns.
        """

    @hookspec(firstresult=True)
    def flagcore_collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | CollectiveTable | None:
        """Return measured curves, or an object with its own times, or None for the topology's latency and bandwidth.

        Seconds; NaN for what is unknown, for which the topology is used. Curves hold among neighbouring devices;
        the core puts them on the topology. Called once per task; an object is called with columns.
        """


class EngineHooks:
    """Engines."""

    @hookspec(firstresult=True)
    def flagcore_engine_support(
        self, chip: Chip, engine: str, engine_version: str | None, kind: str
    ) -> EngineSupport | None:
        """Return whether and how `engine` runs on `chip`: torch device, backend, quirks; None if the chip is not yours.

        `engine_version` is that of the spec, else the installed one; None if unknown. Called once per task. If all
        plugins return None, support is unknown: the engine can be predicted, but not run.
        """

    @hookspec
    def flagcore_check_task(self, task: Task, engine_version: str | None) -> TaskAdvice | None:
        """Return why `task` cannot run, what of it to warn of, and values for settings that it leaves open.

        For what depends on several of its keys, as on nodes and precision; `flagcore_engine_support` knows the chip
        alone. Settings that chips force are already in the spec. None: nothing to say. All answers are joined; of two
        values for one setting that of the plugin called first wins. Called once per task.
        """

    @hookspec
    def flagcore_knobs(self, chip: Chip, engine: str, engine_version: str | None) -> Sequence[Knob] | None:
        """Return additional knobs of `engine` on `chip`, or None.

        A spec's space may name them. All answers are joined; of two knobs of one name the first counts, and a name of
        the engine's own knobs is refused. Called once per task.
        """

    @hookspec
    def flagcore_environment(
        self, chip: Chip, engine: str, engine_version: str | None, task: Task | None, kind: str
    ) -> Mapping[str, str] | None:
        """Return environment variables that trials on `chip` need, or None if the chip is not yours.

        `task` has the number of nodes; None: the question is about the chip alone.

        All answers are joined. Of two values for one variable that of the plugin called first wins, so an add-on
        overrides the chip's own plugin; the spec's `envs` override both. Called once per task.
        """

    @hookspec
    def flagcore_pruning_rules(self, task: Task) -> Sequence[PruningRule] | None:
        """Return rules for candidates of `task` that are not worth a trial, or None. Called once per task.

        A rule receives the candidates in blocks, and decides on each independently. A rule that raises is dropped for
        the run, with a warning.
        """

    @hookspec
    def flagcore_prepare_launch(self, launch: Launch, task: Task) -> Launch | None:
        """Return `launch` changed (a wrapper before argv, a variable, a limit), or None. Called once per trial.

        Each plugin receives the result of the previous one. The chip's own plugin is called first, so that an
        add-on has the last word. An exception fails this trial only.
        """


class TrialHooks:
    """Running and finished trials."""

    @hookspec
    def flagcore_failure_patterns(
        self, chip: Chip, engine: str, engine_version: str | None
    ) -> Sequence[FailurePattern] | None:
        """Return log patterns of failures, or None if the chip is not yours. Called once per task.

        Patterns for out of memory are tried first, then the others in order, the engine's own last; the
        first that matches any line decides.
        """

    @hookspec(firstresult=True)
    def flagcore_telemetry(self, device: Device) -> Telemetry | None:
        """Return something that reads `device` about once a second during a trial, or None. Called once per device.

        Names end in their units: `memory_used_bytes`, `power_watts`. A reading that raises ends the telemetry of
        that device, not the trial.
        """
