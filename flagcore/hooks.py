"""The hooks that a plugin can implement.

A plugin is a module or object with functions that are decorated with `@hookimpl`. An entry point in the group
`flagcore.plugins` names it. Every hook is optional, and an implementation may leave out any argument.

Hooks are called once per chip, task or trial, never per candidate. They return plain data, or an object whose methods
are called with arrays that have one element per candidate. A hook may raise any exception unless its docstring states
otherwise. flagcore then ignores this plugin's result, and `flag plugins list` shows the error.

Plugins are called in the order of their names, but the plugin of the chip is called last. For hooks with
`firstresult`, the first result that is not None is used, so an add-on can override the plugin of the chip. Each plugin
is called separately, so pluggy's wrappers, tryfirst and trylast have no effect.

`engine` is the name of an installed engine. `kind` is the kind of its jobs: train, serve, or
one that a distribution adds. A plugin that depends only on `kind` also
works with engines that it does not know.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from flagcore.contracts import CollectiveCosts, KernelCosts, MemoryModel, Telemetry
from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport, TaskAdvice
from flagcore.domain.knob import Knob
from flagcore.domain.spec import Task
from flagcore.physics.collective_curves import CollectiveTable

hookspec = pluggy.HookspecMarker("flagcore")
hookimpl = pluggy.HookimplMarker("flagcore")


class ChipHooks:
    """Hooks about chips and devices."""

    @hookspec
    def flagcore_devices(self, environment: Mapping[str, str]) -> Sequence[Device] | None:
        """Return this vendor's devices that processes with the variables `environment` can use.

        The order is the one in which such processes see the devices. Memory is in bytes. `environment` contains the
        variables of this shell and of the spec. None or an empty sequence means that there are no devices. If a tool or
        driver is missing, return no devices; do not raise an exception. The hook is called once per command without a
        spec, and once per spec that sets variables; a spec that names its chips asks only their plugins. It must return
        within a few seconds, and must not import a framework or create a context on a device.
        """

    @hookspec
    def flagcore_chips(self, name: str) -> Sequence[Chip] | None:
        """Return all chips that this plugin supports, including chips that are not in this machine.

        Figures are in SI units, each with its source. Figures that were neither published nor measured are left out.
        Called once per command and `name`: then only chips that may have this name are needed. Empty: all are.
        """

    @hookspec
    def flagcore_published_runs(self) -> Sequence[Mapping[str, Any]] | None:
        """Return published runs on this vendor's chips as job records with `measured`.

        `source` is the address of the publication. Plans show the runs that are nearest to the job.
        """

    @hookspec(firstresult=True)
    def flagcore_measured_chip(self, chip: Chip) -> Chip | None:
        """Return `chip` with figures that were measured on this machine, or None to use the published ones.

        The first call may take some seconds, so the plugin should store the result. Called once per task on the chip,
        and by `flag devices` and `flag doctor`.
        """

    @hookspec
    def flagcore_vendor(self, environment: Mapping[str, str]) -> str | None:
        """Return the vendor of the chips that the environment variables of a job select, or None if it is unknown.

        A variable may name a vendor, even one without a plugin, or it may belong to the software of one vendor. The
        first result that is not None is used. Called once per task that names no chip.
        """

    @hookspec
    def flagcore_health(self, chip: Chip) -> Sequence[str] | None:
        """Return a sentence for each problem of this machine's software that prevents or slows down trials on `chip`.

        None or empty means that no problem is known. The hook may take a minute, and may run frameworks in other
        processes. `flag doctor` calls it once per kind of chip in this machine.
        """

    @hookspec(firstresult=True)
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        """Return the network levels that connect the devices of `group`, or None to derive them from the chip.

        Rates are in bytes per second in one direction, latencies in seconds. Called once per task.
        """


class CostHooks:
    """Hooks about memory and time."""

    @hookspec(firstresult=True)
    def flagcore_memory_model(self, group: NodeGroup, engine: str, kind: str) -> MemoryModel | None:
        """Return the memory model of one device of `group` with `engine`, or None if the chip is not yours.

        Called once per task. If all plugins return None, the core assumes the memory of the chip, 1.2 GB of context and
        1% of fragmentation.
        """

    @hookspec(firstresult=True)
    def flagcore_kernel_costs(self, chip: Chip, engine: str, kind: str) -> KernelCosts | None:
        """Return measured or modelled kernel times, or None to use a roofline that is computed from the chip's facts.

        Times are in seconds. For NaN, which means an unknown shape, the roofline is used. The hook is called once per
        task. The methods of the returned object are called with arrays.
        """

    @hookspec(firstresult=True)
    def flagcore_collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | CollectiveTable | None:
        """Return measured curves or an object that computes times, or None to compute times from the topology.

        Times are in seconds. For NaN, which means an unknown time, the topology's latency and bandwidth are used.
        Curves are measured among neighbouring devices, and the core applies them to the topology. The hook is called
        once per task. The methods of a returned object are called with arrays.
        """


class EngineHooks:
    """Hooks about engines."""

    @hookspec(firstresult=True)
    def flagcore_engine_support(
        self, chip: Chip, engine: str, engine_version: str | None, kind: str
    ) -> EngineSupport | None:
        """Return whether and how `engine` runs on `chip`, or None if the chip is not yours.

        The result includes the torch device, the backend and notes. `engine_version` is the release in the spec, or
        else the installed one. It is None if unknown. Called once per task. If all plugins return None, candidates can
        be predicted, but trials cannot run.
        """

    @hookspec
    def flagcore_check_task(self, task: Task, engine_version: str | None) -> TaskAdvice | None:
        """Return advice on how to run `task` on this vendor's chips, or None without advice.

        The advice contains the values to prune, because they do not work, settings that are forced or preferred, why
        the task cannot run, patterns of log lines that show failures, and warnings. It may depend on several keys,
        such as nodes and precision, whereas `flagcore_engine_support` depends only on the chip. The precision of `task`
        may be `auto`. The results of all plugins are joined. If two plugins prefer a value for the same setting, the
        value of the plugin called first is used. Called once per task, but by `flag estimate --jobs` once per chip,
        engine and size of the cluster.
        """

    @hookspec
    def flagcore_knobs(self, chip: Chip, engine: str, engine_version: str | None) -> Sequence[Knob] | None:
        """Return additional knobs of `engine` on `chip`, or None.

        The space of a spec may include them. The results of all plugins are joined. If two knobs have the same name,
        the first is used. A knob must not have the name of an engine's knob. Called once per task.
        """

    @hookspec
    def flagcore_environment(
        self, chip: Chip, engine: str, engine_version: str | None, task: Task | None, kind: str
    ) -> Mapping[str, str] | None:
        """Return environment variables that trials on `chip` need, or None if the chip is not yours.

        `task` is None if the variables do not depend on a task. The results of all plugins are joined. An add-on
        overrides the plugin of the chip, and the `envs` of the spec override both. Called once per task.
        """


class TrialHooks:
    """Hooks about running trials."""

    @hookspec(firstresult=True)
    def flagcore_telemetry(self, device: Device) -> Telemetry | None:
        """Return a reader of the device's metrics, or None. The hook is called once per device.

        The reader is called about once per second during a trial. The names of metrics end in their units, such as
        `memory_used_bytes` and `power_watts`. If the reader raises, the telemetry of this device ends, but the trial
        continues.
        """
