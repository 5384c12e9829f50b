"""The hooks that a plugin can implement.

A plugin is a module or object with functions that are decorated with `@hookimpl`. An entry point in the group
`flagcore.plugins` names it. Every hook is optional, and an implementation may leave out any argument.

Hooks are called once per chip, task or trial, never per candidate. They return plain data, or an object that is called
with columns of candidates. A hook may raise any exception unless its docstring states otherwise: flagcore ignores the
result of this plugin, and `flag plugins list` shows the error.

Plugins are called in the order of their names, and the plugin of the chip last. Hooks with `firstresult` use the first
result that is not None, so an add-on can override the plugin of the chip. Each plugin is called separately, so pluggy's
wrappers, tryfirst and trylast have no effect.

`engine` is the name of an installed engine. `kind` is "train" or "serve"; a plugin that depends on `kind` alone also
works with engines that it does not know.
"""

from collections.abc import Mapping, Sequence

import pluggy

from flagcore.contracts import CollectiveCosts, KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.domain.chip import Chip, Device, Maturity
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport, TaskAdvice, ValueRule
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern
from flagcore.domain.spec import Task
from flagcore.domain.trial import RunEvent
from flagcore.physics.collective_curves import CollectiveTable

HOOKS_API = 1
"""The version of this interface. It increases when a hook is removed or requires more. A plugin may set `HOOKS_API` to
the version that it was written for; a plugin for a later version is not loaded, and `flag plugins list` shows why."""

hookspec = pluggy.HookspecMarker("flagcore")
hookimpl = pluggy.HookimplMarker("flagcore")


class ChipHooks:
    """Chips and devices."""

    @hookspec
    def flagcore_devices(self, environment: Mapping[str, str]) -> Sequence[Device] | None:
        """Return the devices of this vendor that processes with the variables `environment` can use, in their order
        there; None or empty if none.

        The variables are those of this shell and of the spec. Memory is in bytes. Called once per command without a
        spec, and once per spec with variables. It must return within a few seconds, and must not import a
        framework or create a context on a device. A missing tool or driver means no devices, not an error.
        """

    @hookspec
    def flagcore_chips(self) -> Sequence[Chip] | None:
        """Return all chips of this plugin, also those that this machine does not have. Called once per command.

        Figures are in SI units, each with its source. Figures that were neither published nor measured are left out.
        """

    @hookspec(firstresult=True)
    def flagcore_measured_chip(self, chip: Chip) -> Chip | None:
        """Return `chip` with figures that were measured on this machine, or None for the published ones.

        May take some seconds the first time, so the plugin should store the result. Called where figures of a chip are
        used or shown: once per task on the chip, and by `flag devices` and `flag doctor`.
        """

    @hookspec
    def flagcore_vendor(self, environment: Mapping[str, str]) -> str | None:
        """Return the vendor of the chips that the environment variables of a job select, or None.

        A variable may name a vendor, also one without a plugin, or be specific to the software of one vendor. The first
        result that is not None is used. Called once per task that names no chip.
        """

    @hookspec
    def flagcore_maturity(self) -> Maturity | None:
        """Return the evidence for the plugin's data: runs on devices, transcripts, or documents.

        Shown by `flag plugins list`, in full as JSON. Called once per command that lists plugins.
        """

    @hookspec
    def flagcore_health(self, chip: Chip) -> Sequence[str] | None:
        """Return the problems of this machine's software that prevent trials on `chip` or slow them down, one sentence
        each.

        None or empty: no problem is known. May take a minute and run frameworks in other processes. Called by
        `flag doctor` once per kind of chip that is on this machine.
        """

    @hookspec(firstresult=True)
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        """Return the levels over which the devices of `group` communicate, or None to derive them from the chip.

        Rates are in bytes per second in one direction, latencies in seconds. Called once per task.
        """


class CostHooks:
    """Memory and time."""

    @hookspec(firstresult=True)
    def flagcore_memory_model(self, group: NodeGroup, engine: str, kind: str) -> MemoryModel | None:
        """Return the memory model of a device of `group` under `engine`, or None if the chip is not yours.

        Called once per task. If all plugins return None, the core assumes the memory of the chip, 1.2 GB of context and
        1% of fragmentation.
        """

    @hookspec(firstresult=True)
    def flagcore_kernel_costs(self, chip: Chip, engine: str, kind: str) -> KernelCosts | None:
        """Return measured or modelled kernel times, or None for a roofline from the chip's facts.

        Times are in seconds. NaN means an unknown shape; the roofline is used for it. Called once per task; the object
        is called with columns.
        """

    @hookspec(firstresult=True)
    def flagcore_collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | CollectiveTable | None:
        """Return measured curves, an object that computes times, or None for the topology's latency and bandwidth.

        Times are in seconds. NaN means an unknown time; the topology is used for it. Curves were measured among
        neighbouring devices, and the core applies them to the topology. Called once per task; an object is called with
        columns.
        """


class EngineHooks:
    """Engines."""

    @hookspec(firstresult=True)
    def flagcore_engine_support(
        self, chip: Chip, engine: str, engine_version: str | None, kind: str
    ) -> EngineSupport | None:
        """Return whether and how `engine` runs on `chip`: torch device, backend, notes; None if the chip is not yours.

        `engine_version` is the release in the spec, else the installed one; None if unknown. Called once per task. If
        all plugins return None, candidates can be predicted, but trials cannot run.
        """

    @hookspec
    def flagcore_check_task(self, task: Task, engine_version: str | None) -> TaskAdvice | None:
        """Return advice on `task`: why it cannot run, warnings, and values for settings that it does not set; or None.

        It may depend on several keys, such as nodes and precision; `flagcore_engine_support` depends on the chip only.
        Forced settings are already in the spec. The results of all plugins are joined. If two plugins set one setting,
        the value of the plugin called first is used. Called once per task.
        """

    @hookspec
    def flagcore_knobs(self, chip: Chip, engine: str, engine_version: str | None) -> Sequence[Knob] | None:
        """Return additional knobs of `engine` on `chip`, or None.

        A spec's space may name them. The results of all plugins are joined. If two knobs have the same name, the
        first is used. A knob must not have the name of a knob of the engine. Called once per task.
        """

    @hookspec
    def flagcore_environment(
        self, chip: Chip, engine: str, engine_version: str | None, task: Task | None, kind: str
    ) -> Mapping[str, str] | None:
        """Return environment variables that trials on `chip` need, or None if the chip is not yours.

        `task` is None if the variables do not depend on a task. The results of all plugins are joined. An add-on
        overrides the plugin of the chip, and the `envs` of the spec override both. Called once per task.
        """

    @hookspec
    def flagcore_pruning_rules(
        self, task: Task, engine_version: str | None
    ) -> Sequence[ValueRule | PruningRule] | None:
        """Return the values that do not work for `task` and the candidates that are not worth a trial, or None.

        `RefusedValues` and `ForcedSetting` state values that do not work: candidates with others are not legal. A
        `PruningRule` is called with blocks of legal candidates and their predictions, and must decide on each candidate
        independently. If it raises, it is disabled for the run, with a warning. The precision of `task` may be `auto`.
        The results of all plugins are joined. Called once per task; `flag estimate --jobs` calls it once per chip,
        engine and size of the cluster, and uses values only.
        """


class TrialHooks:
    """Running and finished trials."""

    @hookspec
    def flagcore_failure_patterns(
        self, chip: Chip, engine: str, engine_version: str | None
    ) -> Sequence[FailurePattern] | None:
        """Return log patterns of failures, or None if the chip is not yours. Called once per task.

        Patterns for out of memory are tried first, then the others in order, the engine's last. The first pattern that
        matches a line determines the failure.
        """

    @hookspec(firstresult=True)
    def flagcore_telemetry(self, device: Device) -> Telemetry | None:
        """Return a reader that is called about once per second during a trial, or None. Called once per device.

        The names of figures end in their units: `memory_used_bytes`, `power_watts`. If a reading raises, the telemetry
        of this device ends, but not the trial.
        """

    @hookspec
    def flagcore_on_event(self, event: RunEvent) -> None:
        """Receive an event of a run: its start, the start and the end of each trial, and its end.

        Called only for the plugins of the group `flagcore.watchers` that `flag tune --watch` names, in a thread for
        each plugin, one event after the other. Trials do not wait for it. A plugin that raises is reported and gets the
        next event. A plugin that takes more than 30 seconds for an event gets no more events.
        """
